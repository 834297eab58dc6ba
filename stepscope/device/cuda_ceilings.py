"""What a GPU reaches: HBM bandwidth by working set, copies, the model's own GEMVs, GEMM rates.

Timed with CUDA events around many calls, the short ones replayed as graphs, so that neither
launching nor waiting is part of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

from stepscope.device.ceilings import Call, Progress, Rate, best_rate, gemv_shapes, no_progress
from stepscope.device.cuda import capture, describe_gpu
from stepscope.roofline import Ceilings, GemvPoint
from stepscope.spec import ELEMENT_BYTES, QUANTIZED, ModelSpec

DEVICE = "cuda"
MIB = 1 << 20
READ_BYTES = (32 * MIB, 128 * MIB, 512 * MIB, 2048 * MIB)
READS = 8  # of a working set in one launch
COPY_BYTES = 1024 * MIB
MOST_WEIGHT_BYTES = 2048 * MIB  # distinct matrices of one shape: far more than the L2 holds
MOST_COPIES = 512
REPEATS = 7
NS_PER_REPEAT = 3_000_000  # calls are repeated to fill this
GEMM_SIZE = {"bf16": 8192, "fp16": 8192, "fp32": 4096}

Timer = Callable[[Call, int], float]  # ns per call, over so many calls


def measure_cuda(
    spec: ModelSpec, progress: Progress = no_progress, timer: Timer | None = None
) -> Ceilings:
    """All ceilings of the current GPU for this model. The twin stays empty: it needs a runner."""
    import torch

    timer = timer or _event_timer
    begin = time.perf_counter()
    with torch.inference_mode():
        progress("HBM bandwidth", 0.0)
        reads = read_rates(spec.weight_bytes, timer)
        progress("copy bandwidth", 0.4)
        copy = copy_rate(timer)
        progress("matrix-vector products", 0.5)
        gemv = gemv_rates(spec, timer)
        progress("matrix products", 0.8)
        gemm = gemm_rates(timer)
        progress("ceilings", 1.0)
    torch.cuda.empty_cache()
    return Ceilings(
        device=describe_gpu()["name"],
        threads=0,
        measured_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        read_curve=tuple((size, rate.per_s) for size, rate in reads.items()),
        copy_bytes_per_s=copy.per_s,
        gemm_flops={dtype: rate.per_s for dtype, rate in gemm.items()},
        gemv=tuple(
            GemvPoint(name, rows, cols, spec.dtype, gemv[name].per_s)
            for name, rows, cols in gemv_shapes(spec)
            if name in gemv
        ),
        extra={
            "seconds": time.perf_counter() - begin,
            "read": {str(size): asdict(rate) for size, rate in reads.items()},
            "copy": asdict(copy),
            "gemv": {name: asdict(rate) for name, rate in gemv.items()},
            "gemm": {dtype: asdict(rate) for dtype, rate in gemm.items()},
        },
    )


def read_rates(weight_bytes: int, timer: Timer) -> dict[int, Rate]:
    """Bytes read per second at each working set, by the best of plain reading kernels."""
    import torch

    free = _free_bytes()
    sizes = sorted({s for s in (*READ_BYTES, min(weight_bytes, READ_BYTES[-1])) if s <= free // 2})
    data = torch.ones(max(sizes) // 4, device=DEVICE)
    found = {}
    for size in sizes:
        flat = data[: size // 4]
        rows = flat[: len(flat) // 4096 * 4096].view(-1, 4096)
        calls: dict[str, Call] = {
            "sum": _one_launch([partial(torch.sum, flat)] * READS),
            "rows sum": _one_launch([partial(torch.sum, rows, 1)] * READS),
            "rows amax": _one_launch([partial(torch.amax, rows, 1)] * READS),
        }
        found[size] = best_rate(READS * size, _interleaved(calls, timer))
    return found


def copy_rate(timer: Timer) -> Rate:
    """Bytes read plus bytes written per second (as STREAM counts a copy)."""
    import torch

    elements = min(COPY_BYTES, _free_bytes() // 4) // 4
    source, target = torch.ones(elements, device=DEVICE), torch.zeros(elements, device=DEVICE)
    calls: dict[str, Call] = {"copy": lambda: target.copy_(source)}
    return best_rate(2 * 4 * elements, _interleaved(calls, timer))


def gemv_rates(spec: ModelSpec, timer: Timer) -> dict[str, Rate]:
    """Weight bytes per second of x @ W.T for one token, at each shape of the model."""
    import torch
    from torch.nn.functional import linear

    if spec.dtype in QUANTIZED:
        return {}
    dtype: Any = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[spec.dtype]
    element = ELEMENT_BYTES[spec.dtype]
    rates = {}
    for name, rows, cols in gemv_shapes(spec):
        fitting = min(MOST_WEIGHT_BYTES, _free_bytes() // 4) // (rows * cols * element)
        copies = max(1, min(fitting, MOST_COPIES))
        weights = torch.full((copies, rows, cols), 0.5, dtype=dtype, device=DEVICE)
        x = torch.ones(1, cols, dtype=dtype, device=DEVICE)
        products: list[Call] = [partial(linear, x, weight) for weight in weights.unbind(0)]
        calls = {"linear": _one_launch(products)}
        rates[name] = best_rate(copies * rows * cols * element, _interleaved(calls, timer))
        del weights, products
    return rates


def gemm_rates(timer: Timer) -> dict[str, Rate]:
    """FLOP/s of a square product, 2 n^3, with random values (zeros would run at higher clocks)."""
    import torch

    rates = {}
    for name, n in GEMM_SIZE.items():
        dtype: Any = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
        a = torch.randn(n, n, device=DEVICE).to(dtype)
        calls: dict[str, Call] = {f"{n} x {n}": partial(torch.mm, a, a)}
        rates[name] = best_rate(2 * n**3, _interleaved(calls, timer))
    return rates


def _one_launch(calls: Sequence[Call]) -> Call:
    """All of them as one graph: launched one by one, small ones would wait for the host."""
    replay, _ = capture(lambda: [call() for call in calls])
    return replay


def _interleaved(calls: dict[str, Call], timer: Timer) -> dict[str, list[float]]:
    times = {name: _calls_per_repeat(call, timer) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(REPEATS):
        for name, call in calls.items():
            found[name].append(timer(call, times[name]))
    return found


def _calls_per_repeat(call: Call, timer: Timer) -> int:
    timer(call, 2)
    return max(1, min(1000, round(NS_PER_REPEAT / max(timer(call, 5), 1.0))))


def _event_timer(call: Call, times: int) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e6 / times


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])
