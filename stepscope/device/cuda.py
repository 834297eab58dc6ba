"""The one place that asks CUDA: events as marks, what the GPU is, how often a step launches."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

from stepscope.device.timeline import Timeline, anchor
from stepscope.errors import CannotJudge, UsageError

Result = TypeVar("Result")
WARM_UPS = 2  # before a capture
# What the host calls to hand work to the device (CUDA runtime and driver, as CUPTI names them).
LAUNCH_CALLS = (
    "cudaLaunchKernel",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cudaGraphLaunch",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
)


def cuda_available() -> bool:
    import torch

    return bool(torch.cuda.is_available())


def choose_device(wanted: str) -> str:
    """cpu or cuda for auto, cpu or cuda. Raises UsageError, or CannotJudge without a GPU."""
    if wanted not in ("auto", "cpu", "cuda"):
        raise UsageError(f"there is no device '{wanted}'; choose auto, cpu or cuda")
    if wanted == "cpu":
        return wanted
    found = cuda_available()
    if wanted == "cuda" and not found:
        raise CannotJudge("--device cuda: torch sees no CUDA device here; use --device cpu")
    return "cuda" if found else "cpu"


class CudaMarks:
    """Events with timing, used again when they were read."""

    def __init__(self, make: Callable[[], Any] | None = None) -> None:
        """make: a new event; None = torch's."""
        self._make = make or _new_event
        self._pool: list[Any] = []

    def record(self) -> Any:
        event = self._pool.pop() if self._pool else self._make()
        event.record()
        return event

    def reached(self, mark: Any) -> bool:
        return bool(mark.query())

    def wait(self, mark: Any) -> None:
        mark.synchronize()

    def between_ns(self, earlier: Any, later: Any) -> int:
        return round(float(earlier.elapsed_time(later)) * 1e6)  # it says milliseconds

    def reuse(self, mark: Any) -> None:
        self._pool.append(mark)


def _new_event() -> Any:
    import torch

    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def cuda_timeline(now: Callable[[], int]) -> tuple[Timeline, int]:
    """The current GPU's timeline in the clock's nanoseconds, and how far the two may be apart."""
    marks = CudaMarks()
    start = anchor(marks, now)
    return Timeline(marks, start), start.uncertainty_ns


def describe_gpu() -> dict[str, Any]:
    """Name, compute capability, processors, memory (bytes), caches, CUDA and driver versions."""
    import torch

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "gpu_memory_bytes": found.total_memory,
        "l2_bytes": getattr(found, "L2_cache_size", None),
        "cuda": torch.version.cuda,
        "uuid": str(getattr(found, "uuid", "")) or None,
    }


def gpu_key() -> str:
    """Names the current GPU in a file name."""
    import torch

    return re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name()).strip("-").lower()


@cache
def _side_stream() -> Any:
    """One for every capture: cuBLAS keeps a workspace of megabytes for each stream it has seen."""
    import torch

    return torch.cuda.Stream()  # type: ignore[no-untyped-call]


def graph_pool() -> Any:
    """Memory that graphs captured into it share."""
    import torch

    return torch.cuda.graph_pool_handle()


def capture(call: Callable[[], Result], pool: Any = None) -> tuple[Callable[[], None], Result]:
    """The call as a CUDA graph: how to replay it, and its result, whose memory replays fill again.

    Warmed up beside the main stream, as capturing demands. What the call reads must be kept.
    """
    import torch

    stream = _side_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        result = call()
    return graph.replay, result


def count_launches(call: Callable[[], object]) -> int | None:
    """Kernels, copies and graphs that one call hands to the device; None where CUPTI is missing.

    The profiler slows the call down, so this is done beside the run and never in it.
    """
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            call()
            torch.cuda.synchronize()
    except RuntimeError:
        return None
    count = sum(e.count for e in seen.key_averages() if e.key.startswith(LAUNCH_CALLS))
    return count or None
