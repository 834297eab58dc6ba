"""The same operations, narrow and wide: only the work changes, and with it the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.device import ceilings
from tests.cli.conftest import Result

NARROW = {"hidden": 64, "intermediate": 128, "heads": 2, "kv_heads": 1}
WIDE = {"hidden": 1024, "intermediate": 4096, "heads": 32, "kv_heads": 16}
TRIES = 3  # other processes may take the cores in one of them


@pytest.fixture
def judge(
    stepscope: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[dict[str, int]], tuple[str, float]]:
    """(verdict, share of dispatch in decode-only steps) of the launch-bound scenario, reshaped."""
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    plan = ceilings.Plan(
        largest_bytes=64 << 20, most_read_bytes=256 << 20, repeats=3, gemm_sizes=(256,),
        most_copy_bytes=16 << 20, most_gemv_bytes=64 << 20,
    )  # fmt: skip
    monkeypatch.setattr(ceilings, "Plan", lambda: plan)
    scenario = Path(__file__).parents[2] / "scenarios" / "launch-bound.toml"

    def run(shape: dict[str, int]) -> tuple[str, float]:
        sizes = [x for k, v in shape.items() for x in ("--set", f"model.{k}={v}")]
        result = stepscope(
            "run", scenario, "--json", "--set", "model.layers=20", "--max-tokens", "60",
            "--set", "workload.output_tokens=60", *sizes,
        )  # fmt: skip
        assert result.code == 0, result.err
        analysis = json.loads(result.out)["runs"][0]
        shares = {line["key"]: line["share"] for line in analysis["budget"]}
        return analysis["verdict"]["name"], shares["dispatch"]

    return run


@pytest.mark.slow
def test_widening_a_launch_bound_model_changes_the_verdict(
    judge: Callable[[dict[str, int]], tuple[str, float]],
) -> None:
    for attempt in range(TRIES):
        narrow, dispatch = judge(NARROW)
        wide, rest = judge(WIDE)
        if narrow == "launch_bound" or attempt == TRIES - 1:
            break
    assert narrow == "launch_bound"
    assert wide in ("bandwidth_bound", "kernel_inefficient", "compute_bound")
    assert rest < dispatch / 2
