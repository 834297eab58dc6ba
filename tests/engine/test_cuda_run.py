"""A run on CUDA as far as a CPU can play one: the host's part is real, the device computes here.

Copies, events and captures are replaced; everything that decides what a GPU run records is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from stepscope.device import cuda
from stepscope.device.telemetry import Reading
from stepscope.device.timeline import Anchor, ClockMarks, Timeline
from stepscope.models import transfer
from stepscope.runner.execute import execute
from stepscope.runner.job import Beside, Job, Watcher
from stepscope.runner.torch_runner import TorchRunner
from stepscope.scenario import parse_scenario
from stepscope.store import read_run
from tests import gpu_rows
from tests.engine.harness import small_decoder
from tests.engine.test_graphs import FakeCapture, dense
from tests.gpu_rows import EAGER, GRAPHS, OVERLAPPED, Mode, Plan
from tests.synthetic_device import make_ceilings

pytest.importorskip("triton", reason="the paged batch needs triton, which is not installed")

CUDA = torch.device("cuda")
PLAN = Plan(prompt=20, output=9, ends_at=0.0)


class FakeDownload:
    """Copied when asked for, as late as can be: nobody may have changed it meanwhile."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._was = tensor, tensor.clone()

    def wait(self) -> torch.Tensor:
        assert torch.equal(self._tensor, self._was), "written again before the host had it"
        return self._was


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[FakeCapture]:
    """The runner believes that its device is a GPU; the captures that were made."""
    from stepscope.models import paged_kernel

    captures: list[FakeCapture] = []

    def capture(forward: Callable[[], torch.Tensor], pool: Any = None) -> Any:
        captures.append(FakeCapture())
        return captures[-1](forward)

    def timeline(now: Callable[[], int]) -> tuple[Timeline, int]:
        marks = ClockMarks(now)
        return Timeline(marks, Anchor(marks.record(), now(), 500)), 500

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # paged attention may be chosen
    monkeypatch.setattr(paged_kernel, "attend", dense)
    monkeypatch.setattr(cuda, "capture", capture)
    monkeypatch.setattr(cuda, "graph_pool", lambda: None)
    monkeypatch.setattr(TorchRunner, "device", property(lambda runner: CUDA))
    monkeypatch.setattr(transfer, "moved", lambda tensor, device: tensor.clone())
    monkeypatch.setattr("stepscope.runner.torch_runner.download", FakeDownload)
    monkeypatch.setattr("stepscope.runner.torch_runner.on_host", lambda held: held.wait())
    monkeypatch.setattr("stepscope.runner.execute.cuda_timeline", timeline)
    found = {"name": "Fake GPU", "uuid": "1-2", "gpu_memory_bytes": 1}
    monkeypatch.setattr("stepscope.runner.describe.describe_gpu", lambda: found)
    read = SimpleNamespace(read=lambda: Reading(1980, 3201, 700_000, 50, 0))
    monkeypatch.setattr("stepscope.runner.execute.nvml_reader", lambda uuid: (read.read, "NVML"))
    monkeypatch.setattr("stepscope.runner.launching.count_launches", lambda call: (call(), 41)[1])
    return captures


@pytest.mark.parametrize("mode", [EAGER, GRAPHS, OVERLAPPED, Mode("eager, gather", "gather")])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_row_of_the_gpu_check(
    mode: Mode, batch: int, tmp_path: Path, gpu: list[FakeCapture]
) -> None:
    decoder = small_decoder()
    ceilings = replace(make_ceilings(), twin=())
    row = gpu_rows._one(PLAN, tmp_path, decoder, ceilings, batch, mode)
    assert row["finish_reasons"] == {"length": batch} and row["steps"] == PLAN.output - 1
    times = ["step_ms", "dev_forward_ms", "dev_sample_ms", "host_launch_ms", "twin_ms", "floor_ms"]
    assert all(row[name] > 0 for name in times)
    assert (row["dev_gather_ms"] is not None) == (mode.attention == "gather")
    assert row["graph_hits"] == (PLAN.output - 1 if mode.graphs == "cuda" else 0)
    assert len(gpu) == (3 if mode.graphs == "cuda" else 0), "of the run, of its twin before, after"
    assert row["sm_clock_mhz"] == 1980 and row["clock"]["timelines"] == 2
    assert {"device_offset_uncertainty_ns", "device_drift_ns"} <= row["clock"].keys()
    assert row["basis"]["device"] == "measured with CUDA events"
    assert row["basis"]["launches"] == "absent"


def test_the_text_is_that_of_the_cpu(tmp_path: Path) -> None:
    texts = []
    for mode in (EAGER, GRAPHS, OVERLAPPED, Mode("eager, gather", "gather")):
        gpu_rows._one(PLAN, tmp_path / mode.name, small_decoder(), make_ceilings(), 3, mode)
        run = read_run(next((tmp_path / mode.name).iterdir()))
        texts.append([sample.token_ids for sample in run.meta.samples])
    assert len(texts[0]) == 3 and all(text == texts[0] for text in texts)


def test_launches_are_counted_for_the_rows_that_had_them(tmp_path: Path) -> None:
    text = gpu_rows.SCENARIO.format(
        batch=3, kv_tokens=999, attention="paged", graphs="cuda", overlap="false", output=4,
        prompt=9,
    )  # fmt: skip
    scenario = parse_scenario(text, "gpu-check")
    job = Job(
        scenario, "prefill-first", small_decoder(), None, 1, make_ceilings(), [], tmp_path,
        tmp_path / "run", beside=Beside((3,), (16,)),
    )  # fmt: skip
    execute(job, Watcher())
    run = read_run(tmp_path / "run")
    assert run.meta.basis["launches"] == "counted beside the run"
    decodes = [row for row in run.steps if row.kind == "decode"]
    assert decodes and {row.num_launches for row in decodes} == {41}
    assert {row.num_launches for row in run.steps if row.kind == "prefill"} == {None}
    assert {row.num_syncs for row in decodes} == {1}
