"""Who was held up, by whom, in which step."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from stepscope.analyze.frame import Frame, prefill_tokens
from stepscope.analyze.latency import preemptions, returns
from stepscope.analyze.model import Stall
from stepscope.analyze.tail import Delay
from stepscope.records import Part
from stepscope.text import listing, ms, plural

Interval = tuple[int, int, int]  # request, first step, last step

CAUSES = {
    "gc": "a garbage collection ran",
    "compile": "something was compiled",
    "capture": "a graph was captured",
    "alloc": "the allocator grew",
    "noise": "other processes took the cores",
    "evict": "pages were evicted",
    "swap": "pages were swapped",
    "graph_miss": "no graph fitted the batch",
    "preemption": "a request was preempted",
    "unknown": "no event or token explains it",
}


def find_stalls(frame: Frame, delays: list[Delay]) -> list[Stall]:
    """Every step with prefill tokens beside running or blocked decodes, and every long step.

    Harmful if the gap it lies in grew by more than stall_factor x P50 and by more than
    stall_min_ns. Order: harmful first, then by excess.
    """
    stalled = [d for d in delays if d.cause]
    steps = [frame.rows[d.index].step for d in stalled]
    ordered = sorted(steps)
    parts = sorted(frame.run.parts, key=lambda p: (p.request, p.first_step))
    culprits = _cover(ordered, _prefilling(parts))
    victims = _cover(ordered, _decoding(parts, preemptions(frame)))
    stalls = [
        _stall(frame, d, culprits.get(step, ()), victims.get(step, ()))
        for d, step in zip(stalled, steps, strict=True)
    ]
    return sorted(stalls, key=lambda s: (not s.harmful, -s.excess_ns, s.step))


def _stall(
    frame: Frame, delay: Delay, culprits: tuple[int, ...], victims: tuple[int, ...]
) -> Stall:
    row, limits = frame.rows[delay.index], frame.limits
    limit = max(limits.stall_factor * delay.baseline_ns, limits.stall_min_ns)
    by_tokens = delay.cause in ("prefill", "recompute")
    named = culprits if by_tokens else ()
    return Stall(
        row.step,
        row.begin_ns,
        row.wall_ns,
        delay.excess_ns,
        delay.baseline_ns,
        delay.cause,
        named,
        tuple(v for v in victims if v not in named),
        prefill_tokens(row),
        _detail(delay, prefill_tokens(row), named, row.wall_ns),
        delay.excess_ns > 0 and delay.gap_excess_ns > limit,
    )


def _detail(delay: Delay, tokens: int, culprits: tuple[int, ...], wall_ns: int) -> str:
    took = f"in a step of {ms(wall_ns)} ms; such a batch takes {ms(delay.baseline_ns)} ms alone"
    if delay.cause not in ("prefill", "recompute"):
        return f"{CAUSES.get(delay.cause, delay.cause)} {took}"
    work = "prompt" if delay.cause == "prefill" else "recomputed"
    whose = f" of {_requests(culprits)}" if culprits else ""
    return f"{plural(tokens, f'{work} token')}{whose} {took}"


def _requests(ids: tuple[int, ...]) -> str:
    return ("request " if len(ids) == 1 else "requests ") + listing([str(i) for i in ids])


def _cover(steps: list[int], intervals: Iterable[Interval]) -> dict[int, tuple[int, ...]]:
    """For each of the (ascending) steps the requests whose intervals contain it."""
    found: dict[int, list[int]] = defaultdict(list)
    for request, first, last in intervals:
        for step in steps[bisect_left(steps, first) : bisect_right(steps, last)]:
            found[step].append(request)
    return {step: tuple(sorted(set(ids))) for step, ids in found.items()}


def _prefilling(parts: list[Part]) -> Iterable[Interval]:
    return ((p.request, p.first_step, p.last_step) for p in parts if p.kind != "decode")


def _decoding(parts: list[Part], preempted: Mapping[int, Sequence[int]]) -> Iterable[Interval]:
    """From a request's token to its next decode: it either decodes or is blocked in between.

    A preempted request leaves at its last decode and comes back with its recomputation, or with
    its pages: what it waits for meanwhile is these, not a turn. Parts are ordered by request and
    step.
    """
    before: Part | None = None
    for part in parts:
        if part.kind == "decode":
            first = part.first_step
            if before is not None and before.request == part.request:
                own = preempted.get(part.request, ())
                first = first if returns(part, before.last_step, own) else before.last_step + 1
            yield (part.request, first, part.last_step)
        before = part


def step_spans(stalls: list[Stall]) -> list[int]:
    """Steps of harmful stalls, ascending."""
    return sorted(s.step for s in stalls if s.harmful)


def contains_any(steps: list[int], first: int, last: int) -> bool:
    i = bisect_left(steps, first)
    return i < len(steps) and steps[i] <= last
