"""`--dtype int8` and `int4`: what the run records, what the card says, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.analyze import analyze
from stepscope.store import read_run
from tests.cli.conftest import Result


def test_a_run_says_its_format_and_its_card_the_smaller_bytes(
    stepscope: Callable[..., Result], tiny: Path, tmp_path: Path
) -> None:
    weights: dict[str, int] = {}
    for dtype in ("bf16", "fp16", "int8", "int4"):
        out = tmp_path / dtype
        options = ("--dtype", dtype, "--set", "engine.products=auto", "--no-ceilings", "-o", out)
        result = stepscope("run", tiny, *options)
        assert result.code == 0, result.err
        run = read_run(out)
        assert run.meta.engine["dtype"] == run.meta.model["dtype"] == dtype
        assert run.meta.model["kv_dtype"] == ("fp16" if dtype == "fp16" else "bf16")
        assert run.meta.engine["products"].startswith("packed") == (dtype not in ("bf16", "fp16"))
        weights[dtype] = analyze(run).card.weight_bytes
    assert weights["fp16"] == weights["bf16"]
    assert weights["int4"] < 0.75 * weights["int8"] < 0.75 * 0.6 * weights["bf16"]


def test_what_does_not_fit_int4_is_told(stepscope: Callable[..., Result], tiny: Path) -> None:
    result = stepscope(
        "run", tiny, "--dtype", "int4", "--no-ceilings",
        "--set", "model.intermediate=72", "--max-tokens", "2", "-o", "out",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "held as int8, as int4 needs" in " ".join(result.err.split())
    assert any("held as int8, as int4 needs" in note for note in read_run(Path("out")).meta.notes)
    assert "held as int8, as int4 needs" in " ".join(result.out.split()), "and in the result"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--dtype", "int5"), ("int5", "dtype")),
        (("--dtype", "fp8"), ("fp8 weights are for CUDA GPUs", "choose int8 or int4")),
        (("--dtype", "int8", "--set", "engine.products=onednn"), ("onednn", "auto or plain")),
    ],
)
def test_refused_in_a_sentence(
    stepscope: Callable[..., Result], tiny: Path, options: tuple[str, ...], words: tuple[str, ...]
) -> None:
    result = stepscope("run", tiny, *options, "--no-ceilings")
    assert result.code == 2 and all(word in " ".join(result.err.split()) for word in words)
    assert "Traceback" not in result.err
