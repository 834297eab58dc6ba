"""The GPU check on a CPU: the same program over tiny shapes, so that no GPU minute is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_check, gpu_parity
from tests.gpu_check import Mode, Plan, check

TINY = Plan(
    device="cpu",
    shapes=(("dummy:llama", "fp32"), ("dummy:nothing-like-it", "fp32"), ("dummy:llama", "bf16")),
    batches=(1, 3),
    modes=(Mode("eager, gather", "gather"), Mode("eager, overlap", "gather", overlap=True)),
    prompt=20,
    output=24,
    kernel_tests=False,
    overrides=(("layers", 2), ("hidden", 32), ("intermediate", 64), ("vocab", 99)),
    reported=("dummy:llama", 3, ("eager-gather", "eager-overlap")),
)


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Quick ceilings; everything else as on a GPU."""
    from stepscope.device import ceilings

    out = tmp_path_factory.mktemp("gpu") / "out"
    plan = ceilings.Plan(
        largest_bytes=1 << 20, repeats=1, seconds_per_repeat=0, gemm_sizes=(8,),
        most_copy_bytes=1 << 20, most_gemv_bytes=1 << 20,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceilings, "Plan", lambda: plan)
        patch.setenv("STEPSCOPE_CACHE", str(out.parent / "cache"))
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
    assert len(cases) == 2 * 2 * 2 and not any("error" in row for row in cases)
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
    monkeypatch.setattr(gpu_parity, "parity", lambda device: [])
    card = {"model": "m", "dtype": "d", "error": "out of time", "best_read_gb_per_s": 1.0}
    monkeypatch.setattr(gpu_check, "_card", lambda *args: card)
    monkeypatch.setattr("stepscope.device.kept_ceilings.load_or_measure", lambda *a, **k: None)
    plan = replace(TINY, shapes=TINY.shapes[:1], budget_s=-1.0)
    check(plan, tmp_path / "out")
    rows = json.loads((tmp_path / "out" / "gpu-check.json").read_text())["steps"]
    assert [row.get("error") for row in rows[1:]] == ["not run: out of time"] * 4


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
