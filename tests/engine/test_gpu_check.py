"""The GPU check on a CPU: the same program over tiny shapes, so that no GPU minute is lost."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_check, gpu_parity, gpu_rows
from tests.gpu_check import check
from tests.gpu_rows import Mode, Plan, Row, Shape, measured

MODES = (Mode("eager, gather", "gather"), Mode("eager, overlap", "gather", overlap=True))
TINY = Plan(
    device="cpu",
    shapes=(
        Shape("dummy:llama", "fp32", MODES),
        Shape("dummy:nothing-like-it", "fp32", MODES),
        Shape("dummy:llama", "bf16", MODES[:1]),
    ),
    batches=(1, 3),
    prompt=20,
    output=24,
    ends_at=time.monotonic() + 3600,
    kernel_tests=False,
    overrides=(("layers", 2), ("hidden", 32), ("intermediate", 64), ("vocab", 99)),
    reported=("dummy:llama", 3, ("eager-gather", "eager-overlap")),
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quick ceilings; everything else as on a GPU."""
    import torch

    from stepscope.device import ceilings
    from stepscope.device.kept_ceilings import cache_file, save
    from stepscope.models.load import load_model

    out = tmp_path_factory.mktemp("gpu") / "out"
    plan = ceilings.Plan(
        largest_bytes=1 << 20, repeats=1, seconds_per_repeat=0, gemm_sizes=(8,),
        most_copy_bytes=1 << 20, most_gemv_bytes=1 << 20,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEPSCOPE_CACHE", str(out.parent / "cache"))
        for shape in (TINY.shapes[0], TINY.shapes[2]):
            spec = load_model(shape.model, shape.dtype, overrides=dict(TINY.overrides)).spec
            threads = torch.get_num_threads()
            save(cache_file(spec, threads), ceilings.measure(spec, threads, plan=plan))
        assert check(TINY, out) == 1, "a shape that does not exist is a failure, and no more"
    return out


@pytest.fixture(scope="module")
def found(checked: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((checked / "gpu-check.json").read_text())
    return result


def test_every_way_gives_the_ids_of_transformers(found: dict[str, Any]) -> None:
    assert [row["differs"] for row in found["parity"]] == [""] * len(found["parity"])
    assert len(found["parity"]) == 5 + 2


def test_every_case_is_a_row(found: dict[str, Any]) -> None:
    cases = [row for row in found["steps"] if "batch" in row]
    assert len(cases) == 2 * 2 + 2 and not any("error" in row for row in cases)
    for row in cases:
        assert row["steps"] == 23 and row["step_ms"] > 0 and row["mbu"] > 0
        assert (row["dev_forward_ms"] is not None) == ("overlap" in row["mode"])
        assert row["finish_reasons"] == {"length": row["batch"]}
    missing = [row for row in found["steps"] if "error" in row]
    assert len(missing) == 1 and "There is no dummy model" in missing[0]["error"]


def test_tables_and_reports_are_few_small_files(checked: Path) -> None:
    files = sorted(path.name for path in checked.iterdir())
    assert files == [
        "gpu-check.json",
        "gpu-check.md",
        "report-eager-gather.html",
        "report-eager-overlap.html",
        "runs.tar.gz",
    ]
    assert sum(path.stat().st_size for path in checked.iterdir()) < 4 << 20
    table = (checked / "gpu-check.md").read_text()
    assert "| gather, swapped | fp32 | no |" in table and "nothing-like-it" in table


def test_what_is_out_of_time_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_rows, "_card", lambda ceilings: {"best_read_gb_per_s": 1.0})
    monkeypatch.setattr("stepscope.device.kept_ceilings.load_or_measure", lambda *a, **k: None)
    plan = replace(TINY, shapes=TINY.shapes[:1], ends_at=-1.0)
    rows = list(measured(plan, tmp_path))
    assert [row.get("error") for row in rows[1:]] == ["not run: out of time"] * 4


def test_each_shape_has_its_share_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slow rows of the first one leave some for the last one."""
    clock = [0.0]

    def one(*arguments: Any) -> Row:
        clock[0] += 30.0
        return {}

    monkeypatch.setattr(gpu_rows, "_card", lambda ceilings: {"best_read_gb_per_s": 1.0})
    monkeypatch.setattr("stepscope.device.kept_ceilings.load_or_measure", lambda *a, **k: None)
    monkeypatch.setattr(gpu_rows, "_one", one)
    monkeypatch.setattr(gpu_rows.time, "monotonic", lambda: clock[0])
    shapes = (TINY.shapes[0], TINY.shapes[2])
    rows = list(measured(replace(TINY, shapes=shapes, ends_at=100.0), tmp_path))
    run = [r for r in rows if "took_s" in r]
    assert [r["dtype"] for r in run] == ["fp32", "fp32", "bf16", "bf16"]


def test_launches_of_each_way_to_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.models.load import load_model
    from stepscope.runner.job import build_decoder

    monkeypatch.setattr("stepscope.runner.launching.count_launches", lambda call: (call(), 7)[1])
    shape = replace(TINY.shapes[0], modes=(*MODES, Mode("paged")))
    model = load_model(shape.model, shape.dtype, overrides=dict(TINY.overrides))
    rows = list(gpu_rows._launches(TINY, shape, build_decoder(model, "plain")))
    assert rows[-1]["launches"] == {"eager, gather": 7}
    assert rows[0]["mode"] == "launches of paged" and "does not run on cpu" in rows[0]["error"]
    table = "\n".join(gpu_check._step_tables(rows))
    assert "launches of a decode step: eager, gather 7" in table and "does not run" in table


BREAKING = """
import json, pickle, sys, time
plan, done = pickle.loads(open(sys.argv[1], "rb").read())
for batch in (1, 2, 3):
    row = {"model": "m", "dtype": "d", "batch": batch, "mode": "x"}
    if ("m", "d", batch, "x") in done:
        continue
    print(json.dumps({"begun": row}), flush=True)
    if batch == 2:
        HOW
    print(json.dumps({**row, "step_ms": 1.0}), flush=True)
"""


@pytest.mark.parametrize(
    "how,told",
    [
        ("sys.exit('an illegal address')", "ended with 1: an illegal address"),
        ("time.sleep(600)", "ended with -9: "),
    ],
)
def test_a_row_that_takes_the_process_with_it_is_one_row(
    how: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "ROWS", ("-c", BREAKING.replace("HOW", how)))
    monkeypatch.setattr(gpu_check, "ROW_S", 2.0)
    rows = list(gpu_check._rows(TINY, tmp_path))
    assert [(row["batch"], row.get("error")) for row in rows] == [(1, None), (2, told), (3, None)]


def test_a_part_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    code = 'print(\'{"way": "a", "differs": ""}\', flush=True); import time; time.sleep(600)'
    monkeypatch.setattr(gpu_check, "PARITY_S", 2.0)
    rows = gpu_check._parity(gpu_check._Outside(("-c", code)))
    assert [row["way"] for row in rows] == ["a", "all the others"]
    assert rows[1]["differs"].startswith("ended with -9")


def test_the_kernel_s_cases_are_where_they_are_looked_for() -> None:
    files = [name for name in gpu_check.KERNEL_CASES if name.endswith(".py")]
    assert len(files) == 2 and all((gpu_check.ROOT / name).is_file() for name in files)


def test_a_wrong_id_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from stepscope.runner.torch_runner import TorchRunner

    fetch = TorchRunner.fetch
    monkeypatch.setattr(TorchRunner, "fetch", lambda self, ids: [i ^ 1 for i in fetch(self, ids)])
    rows = gpu_parity.parity("cpu")
    assert all("which leads by" in row["differs"] for row in rows if row["dtype"] == "fp32")


MISSING = ("gguf", "platformdirs", "transformers", "huggingface_hub", "playwright")


def test_it_needs_no_package_that_a_bare_gpu_machine_lacks() -> None:
    """Everything up to the question whether there is a GPU, and parity on the CPU."""
    code = (
        "import sys\n"
        f"for name in {MISSING!r}: sys.modules[name] = None\n"
        "import stepscope.runner.execute, stepscope.report.html, stepscope.report.png\n"
        "import stepscope.analyze, stepscope.device.cuda_ceilings, tests.gpu_check\n"
        "from tests.gpu_parity import parity\n"
        "print([row['differs'] for row in parity('cpu')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=gpu_check.ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert set(eval(done.stdout)) == {""}
