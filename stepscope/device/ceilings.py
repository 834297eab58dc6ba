"""What this device reaches: bandwidth by working set, copies, the model's own GEMVs, GEMM rate.

Measured once and cached. Every rate is the best of several kernels or sizes, each the median of
interleaved repeats, so that neither one slow kernel nor one disturbed moment becomes the ceiling.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from stepscope.device.host import (
    ForeignLoad,
    cpu_model,
    foreign_share,
    memory_bytes,
)
from stepscope.errors import StepscopeError
from stepscope.roofline import Ceilings, GemvPoint
from stepscope.spec import ELEMENT_BYTES, QUANTIZED, ModelSpec, compute_dtype
from stepscope.stats import median, percentile

if TYPE_CHECKING:
    import torch

MIB = 1 << 20
ROW_BYTES = 16_384
GEMM_DTYPES = ("fp32", "bf16")
SLOW_GEMM_S = 0.5

Progress = Callable[[str, float], None]  # what is measured now, share done (0 to 1)
Call = Callable[[], object]


def no_progress(what: str, share: float) -> None:
    """The default: say nothing."""


PATIENCE = 3  # a repeat may take so many times its planned length


@dataclass(frozen=True)
class Plan:
    """Sizes and repeats; the defaults take about 10 s on two slow cores."""

    smallest_bytes: int = MIB
    largest_bytes: int = 512 * MIB  # or the model's weights, if they are larger
    most_read_bytes: int = 2048 * MIB  # the curve is flat long before
    repeats: int = 5
    seconds_per_repeat: float = 0.015  # a fast kernel is repeated until it fills this
    most_copy_bytes: int = 256 * MIB  # source; as much again for the destination
    most_gemv_bytes: int = 384 * MIB  # distinct weights of one shape, so they come from memory
    gemm_sizes: tuple[int, ...] = (512, 1024)
    clock: Callable[[], int] = field(default=time.perf_counter_ns)


# ---------------------------------------------------------------- timing


def calls_per_repeat(call: Call, plan: Plan) -> int:
    """How often to call in one timed repeat; also warms the call up."""
    call()
    begin = plan.clock()
    call()
    return max(1, round(plan.seconds_per_repeat * 1e9 / max(1, plan.clock() - begin)))


def interleaved_ns(calls: dict[str, Call], plan: Plan) -> dict[str, list[float]]:
    """ns per call, one value per repeat, taken in turn so that a disturbance hits all alike."""
    times = {name: calls_per_repeat(call, plan) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(plan.repeats):
        for name, call in calls.items():
            call()  # brings in what the call before it pushed out of the cache
            found[name].append(_timed(call, times[name], plan))
    return found


def _timed(call: Call, times: int, plan: Plan) -> float:
    """ns per call over so many calls, or over fewer if the machine has become slow meanwhile."""
    patience = PATIENCE * plan.seconds_per_repeat * 1e9
    begin = now = plan.clock()
    done = 0
    while done < times and now - begin <= patience:
        call()
        done += 1
        now = plan.clock()
    return max(1, now - begin) / done


@dataclass(frozen=True)
class Rate:
    """Units per second of the best call, and how far its repeats lie apart."""

    per_s: float
    best: str
    spread: float  # (p90 - p10) / median of the best call's times


def best_rate(amount: float, found: dict[str, list[float]]) -> Rate:
    """amount (bytes or FLOPs) of one call / median time, of the call where that is largest."""
    best = min(found, key=lambda name: median(found[name]) or 0)
    middle = median(found[best]) or 1.0
    low, high = percentile(found[best], 10), percentile(found[best], 90)
    return Rate(amount * 1e9 / middle, best, ((high or 0) - (low or 0)) / middle)


# ---------------------------------------------------------------- what is measured


def measure(
    spec: ModelSpec,
    threads: int,
    progress: Progress = no_progress,
    plan: Plan | None = None,
) -> Ceilings:
    """All CPU ceilings for this model, with so many torch threads. Raises StepscopeError.

    The twin stays empty: it needs a runner.
    """
    import torch

    plan = plan or Plan()
    begin = plan.clock()
    load = ForeignLoad(plan.clock)
    before = load.sample()
    try:
        with _threads(threads), torch.inference_mode():
            progress("read bandwidth", 0.0)
            reads = read_rates(working_sets(plan, spec.weight_bytes, memory_bytes()), plan)
            progress("copy bandwidth", 0.4)
            copy = copy_rate(plan)
            progress("matrix-vector products", 0.5)
            gemv = gemv_rates(spec, plan)
            progress("matrix products", 0.8)
            gemm = gemm_rates(plan, spec.dtype)
            progress("ceilings", 1.0)
    except RuntimeError as error:  # torch's word for out of memory
        raise StepscopeError(
            f"the ceilings could not be measured ({str(error).splitlines()[0]}); "
            "free some memory and try again"
        ) from error
    foreign = foreign_share(before, load.sample(), load.cores)
    load.close()
    return Ceilings(
        device=cpu_model(),
        threads=threads,
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
            "seconds": (plan.clock() - begin) / 1e9,
            "foreign_share": foreign,  # of the cores, by other processes; None = not known
            "read": {str(size): asdict(rate) for size, rate in reads.items()},
            "copy": asdict(copy),
            "gemv": {name: asdict(rate) for name, rate in gemv.items()},
            "gemm": {dtype: asdict(rate) for dtype, rate in gemm.items()},
        },
    )


@contextlib.contextmanager
def _threads(threads: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def working_sets(plan: Plan, weight_bytes: int, memory: int | None) -> list[int]:
    """Powers of two and the model's own weights, in whole rows, within a quarter of the memory."""
    most = min(max(plan.largest_bytes, weight_bytes), plan.most_read_bytes)
    if memory is not None:
        most = min(most, memory // 4)
    sizes = {plan.smallest_bytes << i for i in range(24)} | {plan.largest_bytes, weight_bytes}
    whole = {size // ROW_BYTES * ROW_BYTES for size in sizes if size <= most}
    return sorted(size for size in whole if size >= plan.smallest_bytes) or [plan.smallest_bytes]


def read_rates(sizes: Sequence[int], plan: Plan) -> dict[int, Rate]:
    """Bytes read per second at each working set, by the best of plain reading kernels.

    One call reads the working set once. `dot` reads its two halves side by side; `rows` kernels
    reduce each 16 KiB row, which torch splits over its threads most evenly.
    """
    import torch

    data = torch.full((max(sizes) // 4,), 1.0)  # written, so that every page is real memory
    calls: dict[str, Call] = {}
    for size in sizes:
        flat = data[: size // 4]
        rows, half = flat.view(-1, ROW_BYTES // 4), flat.numel() // 2
        calls |= {
            f"{size} sum": partial(torch.sum, flat),
            f"{size} dot": partial(torch.dot, flat[:half], flat[half:]),
            f"{size} rows sum": partial(torch.sum, rows, 1),
            f"{size} rows amax": partial(torch.amax, rows, 1),
        }
    found = interleaved_ns(calls, plan)
    return {
        size: best_rate(size, {k: v for k, v in found.items() if k.startswith(f"{size} ")})
        for size in sizes
    }


def copy_rate(plan: Plan) -> Rate:
    """Bytes read plus bytes written per second (as STREAM counts a copy)."""
    import torch

    elements = min(plan.most_copy_bytes, plan.largest_bytes) // 4
    source, target = torch.full((elements,), 1.0), torch.full((elements,), 2.0)
    return best_rate(2 * 4 * elements, interleaved_ns({"copy": lambda: target.copy_(source)}, plan))


def gemv_shapes(spec: ModelSpec) -> tuple[tuple[str, int, int], ...]:
    return (*spec.layer_linears, ("head", spec.vocab, spec.hidden))


def gemv_rates(spec: ModelSpec, plan: Plan) -> dict[str, Rate]:
    """Weight bytes per second of x @ W.T for one token, at each shape of the model.

    All shapes cut their matrices from one buffer as large as the model (or the plan's cap), and
    each call takes the next one: like a step, which comes back to a weight after all the others.
    """
    import torch

    if spec.dtype in QUANTIZED:
        from stepscope.device.packed_gemv import packed_gemv_rates

        return packed_gemv_rates(spec, plan)
    dtype = torch_dtype(spec.dtype)
    element = ELEMENT_BYTES[spec.dtype]
    largest = max(rows * cols for _, rows, cols in gemv_shapes(spec))
    room = max(largest, min(plan.most_gemv_bytes, spec.weight_bytes) // element)
    buffer = torch.full((room,), 0.5, dtype=dtype)
    calls: dict[str, Call] = {}
    for name, rows, cols in gemv_shapes(spec):
        count = rows * cols
        starts = range(0, room - count + 1, count)
        weights = cycle([buffer[at : at + count].view(rows, cols) for at in starts])
        calls[name] = partial(_gemv, torch.ones(1, cols, dtype=dtype), weights)
    found = interleaved_ns(calls, plan)
    return {
        name: best_rate(rows * cols * element, {"linear": found[name]})
        for name, rows, cols in gemv_shapes(spec)
    }


def _gemv(x: torch.Tensor, weights: Iterator[torch.Tensor]) -> torch.Tensor:
    from torch.nn.functional import linear

    return linear(x, next(weights))


def gemm_rates(plan: Plan, own: str = "fp32") -> dict[str, Rate]:
    """FLOP/s of square products, 2 n^3 each, the best size per dtype; also of the model's own."""
    import torch

    rates = {}
    for dtype in dict.fromkeys((*GEMM_DTYPES, compute_dtype(own))):
        by_size: list[Rate] = []
        for n in plan.gemm_sizes:
            if by_size and 2 * n**3 / by_size[-1].per_s > SLOW_GEMM_S:
                break  # fp16 on a CPU: a larger one takes seconds a call and is not faster
            a = torch.full((n, n), 0.5, dtype=torch_dtype(dtype))
            found = interleaved_ns({f"{n} x {n}": partial(torch.mm, a, a)}, plan)
            by_size.append(best_rate(2 * n**3, found))
        rates[dtype] = max(by_size, key=lambda rate: rate.per_s)
    return rates


def torch_dtype(name: str) -> torch.dtype:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
