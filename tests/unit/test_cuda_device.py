"""What asks CUDA, as far as a CPU can tell: the arithmetic of rates, and what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from stepscope.device import cuda, cuda_ceilings
from stepscope.device.telemetry import nvml_reader
from tests.synthetic_device import make_spec

TINY = make_spec(layers=2, hidden=32, heads=2, kv_heads=1, head_dim=16, intermediate=48, vocab=96)
CALL_NS = 1000.0


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A CPU in place of the GPU; how many calls each launch holds."""
    held: list[int] = []

    def one_launch(calls: Sequence[Callable[[], object]]) -> Callable[[], object]:
        held.append(len(calls))
        return lambda: [call() for call in calls]

    monkeypatch.setattr(cuda_ceilings, "DEVICE", "cpu")
    monkeypatch.setattr(cuda_ceilings, "_one_launch", one_launch)
    monkeypatch.setattr(cuda_ceilings, "_free_bytes", lambda: 1 << 20)
    monkeypatch.setattr(cuda_ceilings, "describe_gpu", lambda: {"name": "Fake"})
    monkeypatch.setattr(cuda_ceilings, "READ_BYTES", (1 << 16, 1 << 18, 1 << 30))
    monkeypatch.setattr(cuda_ceilings, "GEMM_SIZE", {"bf16": 16, "fp32": 8})
    return held


def timer(call: Callable[[], object], times: int) -> float:
    call()
    return CALL_NS


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_rates_are_what_one_launch_moves_over_its_time(launches: list[int], dtype: str) -> None:
    found = cuda_ceilings.measure_cuda(make_like(dtype), timer=timer)
    assert {size for size, _ in found.read_curve} >= {1 << 16, 1 << 18}, "but not 1 GiB"
    assert len(found.read_curve) == 3
    for size, rate in found.read_curve:
        assert rate == pytest.approx(cuda_ceilings.READS * size / CALL_NS * 1e9)
    assert found.copy_bytes_per_s == pytest.approx(2 * (1 << 18) / CALL_NS * 1e9)
    assert found.gemm_flops["fp32"] == pytest.approx(2 * 8**3 / CALL_NS * 1e9)
    assert bool(found.gemv) == (dtype != "fp8")
    element = {"fp32": 4, "bf16": 2, "fp8": 1}[dtype]
    products = launches[-len(found.gemv) :] if found.gemv else []
    for point, copies in zip(found.gemv, products, strict=True):
        moved = copies * point.rows * point.cols * element
        assert point.bytes_per_s == pytest.approx(moved / CALL_NS * 1e9)
        assert moved <= 1 << 18 and copies <= cuda_ceilings.MOST_COPIES
    assert found.to_dict()["device"] == "Fake"


def make_like(dtype: str) -> Any:
    from dataclasses import replace

    return replace(TINY, dtype=dtype)


def test_launches_are_counted_by_the_names_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(cuda, "LAUNCH_CALLS", ("aten::add", "aten::mul"))
    x = torch.ones(3)
    assert cuda.count_launches(lambda: x.add(x).mul(x).add_(1)) == 3
    assert cuda.count_launches(lambda: x.sub(x)) is None, "nothing was seen, so nothing is known"


def test_without_nvml_s_package_telemetry_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml_reader(None) == (None, "n/a: nvidia-ml-py is not installed")
