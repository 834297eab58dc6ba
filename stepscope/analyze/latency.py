"""What clients felt: token times from parts and emitted_ns, and the distributions over them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from stepscope.analyze.frame import Frame
from stepscope.analyze.model import Goodput, Latency
from stepscope.records import Part, RequestRecord, StepRecord
from stepscope.stats import mean, median, percentile
from stepscope.text import plural

FINISHED = ("eos", "stop", "length")
FEW = 100  # below this a p99 is little more than the maximum


@dataclass(slots=True)
class Tokens:
    """When one request's tokens reached its client, and the steps that made them."""

    times_ns: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    preempted_before: set[int] = field(default_factory=set)  # indices into times_ns

    @property
    def gaps_ns(self) -> list[int]:
        return [b - a for a, b in zip(self.times_ns, self.times_ns[1:], strict=False)]


def emission_times(rows: list[StepRecord]) -> dict[int, int]:
    """step -> when its tokens were out. Under overlap a later row (result_step) emits them."""
    times: dict[int, int] = {}
    for row in rows:
        if row.emitted_ns is not None:
            times[row.step if row.result_step is None else row.result_step] = row.emitted_ns
    return times


def preemptions(frame: Frame) -> dict[int, list[int]]:
    """Per request the steps that preempted it, ascending."""
    begins = [row.begin_ns for row in frame.rows]
    found: dict[int, list[int]] = defaultdict(list)
    for event in frame.run.events:
        index = bisect_right(begins, event.begin_ns) - 1
        if event.kind == "preempt" and event.request is not None and index >= 0:
            found[event.request].append(frame.rows[index].step)
    return {request: sorted(steps) for request, steps in found.items()}


def returns(part: Part, last_step: int, preempted: Sequence[int]) -> bool:
    """Is the part the first after a preemption? The request computed last in `last_step`.

    What was swapped out comes back with a decode, not with a recomputation.
    """
    return bisect_right(preempted, last_step) < bisect_left(preempted, part.first_step)


def token_times(frame: Frame) -> dict[int, Tokens]:
    """Per request. A decode part emits one token per step, another part at most one at its end."""
    emitted = emission_times(frame.rows)
    tokens: dict[int, Tokens] = defaultdict(Tokens)
    preempted = preemptions(frame)
    for part in sorted(frame.run.parts, key=lambda p: (p.request, p.first_step)):
        found = tokens[part.request]
        last = found.steps[-1] if found.steps else part.first_step
        if part.kind == "recompute" or returns(part, last, preempted.get(part.request, ())):
            found.preempted_before.add(len(found.times_ns))
        for step in _emitting_steps(part):
            if step in emitted:
                found.times_ns.append(emitted[step])
                found.steps.append(step)
    return tokens


def _emitting_steps(part: Part) -> Sequence[int]:
    if part.kind == "decode":
        return range(part.first_step, part.last_step + 1)
    return [part.last_step] if part.output_tokens else []


def all_gaps(tokens: dict[int, Tokens]) -> list[int]:
    """Every gap between consecutive tokens of one request, in the order the later ones came."""
    dated = [pair for t in tokens.values() for pair in zip(t.times_ns[1:], t.gaps_ns, strict=True)]
    return [gap for _, gap in sorted(dated)]


def describe(metric: str, values: Sequence[float], note: str = "") -> Latency:
    notes = [note] if note else []
    if 0 < len(values) < FEW:
        notes.append(f"p99 of {plural(len(values), 'value')} is close to their maximum")
    ordered = sorted(values)
    p50, p90, p95, p99 = (percentile(ordered, q) for q in (50, 90, 95, 99))
    top = ordered[-1] if ordered else None
    return Latency(metric, len(ordered), mean(ordered), p50, p90, p95, p99, top, "; ".join(notes))


def succeeded(request: RequestRecord) -> bool:
    return request.finish_reason in FINISHED and not request.error


def first_token(request: RequestRecord, tokens: Tokens) -> int | None:
    if request.first_token_ns is not None:
        return request.first_token_ns
    return tokens.times_ns[0] if tokens.times_ns else None


def tpot(tokens: Tokens) -> float | None:
    """(last - first) / (n - 1); one token has none."""
    times = tokens.times_ns
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def latencies(frame: Frame, tokens: dict[int, Tokens], gaps: list[int]) -> dict[str, Latency]:
    """ttft, queue, prefill, itl, tpot, e2e and normalized, each over the requests that have it."""
    values: dict[str, list[float]] = defaultdict(list)
    single = 0
    for request in frame.run.requests:
        own = tokens.get(request.id) or Tokens()
        single += len(own.times_ns) == 1
        for metric, value in _of_request(request, own).items():
            if value is not None:
                values[metric].append(value)
    values["itl"] = list(map(float, gaps))
    notes = {"tpot": f"{plural(single, 'request')} had one token: n/a" if single else ""}
    names = ("ttft", "queue", "prefill", "itl", "tpot", "e2e", "normalized")
    return {name: describe(name, values[name], notes.get(name, "")) for name in names}


def _of_request(request: RequestRecord, tokens: Tokens) -> dict[str, float | None]:
    first, admitted, finished = (
        first_token(request, tokens),
        request.admitted_ns,
        request.finished_ns if succeeded(request) else None,
    )
    e2e = _difference(finished, request.arrival_ns)
    count = request.output_tokens or len(tokens.times_ns)
    return {
        "ttft": _difference(first, request.arrival_ns),
        "queue": _difference(admitted, request.arrival_ns),
        "prefill": _difference(first, admitted),
        "tpot": tpot(tokens),
        "e2e": e2e,
        "normalized": e2e / count if e2e is not None and count else None,
    }


def _difference(later: int | None, earlier: int | None) -> int | None:
    return None if later is None or earlier is None else later - earlier


def goodput(frame: Frame, tokens: dict[int, Tokens]) -> Goodput:
    """Requests per second of run time that meet every SLO.

    ttft_ms is held against the request's TTFT, itl_ms against the longest of its own
    gaps. A failed request is judged and misses; one that was aborted or never ended is not judged.
    """
    slo = dict(frame.run.meta.slo)
    judged = [r for r in frame.run.requests if r.error or r.finish_reason in (*FINISHED, "error")]
    if not slo:
        return Goodput({}, 0, 0, None)
    attained = sum(_meets(r, tokens.get(r.id) or Tokens(), slo) for r in judged)
    seconds = frame.wall_ns / 1e9
    return Goodput(slo, attained, len(judged), attained / seconds if seconds else None)


def _meets(request: RequestRecord, tokens: Tokens, slo: dict[str, float]) -> bool:
    ttft = _difference(first_token(request, tokens), request.arrival_ns)
    if not succeeded(request) or ttft is None:
        return False
    gap = max(tokens.gaps_ns, default=0)
    limits = ((ttft, slo.get("ttft_ms")), (gap, slo.get("itl_ms")))
    return all(limit is None or ns <= limit * 1e6 for ns, limit in limits)


def late_admissions(frame: Frame) -> list[tuple[int, float]]:
    """(request, ns waited) of those admitted after the iteration that could first have had them.

    A request that arrives during iteration i can be picked up by i + 1 at the earliest; one that
    was queued or admitted later than the end of i + 1 is late.
    """
    begins = [row.begin_ns for row in frame.rows]
    late = []
    for request in frame.run.requests:
        moment = request.queued_ns if request.admitted_ns is None else request.admitted_ns
        following = bisect_right(begins, request.arrival_ns)
        if moment is None or following >= len(begins):
            continue
        if moment > frame.rows[following].end_ns:
            late.append((request.id, float(moment - request.arrival_ns)))
    return sorted(late, key=lambda pair: -pair[1])


def finish_reasons(requests: list[RequestRecord]) -> dict[str, int]:
    return dict(Counter(r.finish_reason or "unfinished" for r in requests).most_common())


def failures(requests: list[RequestRecord]) -> list[tuple[int, str]]:
    return [(r.id, r.error or "error") for r in requests if r.error or r.finish_reason == "error"]


@dataclass(frozen=True, slots=True)
class LongGap:
    """A gap of more than itl_gap_factor x its request's median."""

    request: int
    ns: int
    first_step: int  # of the token before: what follows its emission is part of the gap
    last_step: int
    preempted: bool


def long_gaps(tokens: dict[int, Tokens], factor: float) -> list[LongGap]:
    found = []
    for request, own in tokens.items():
        gaps = own.gaps_ns
        limit = factor * (median(gaps) or 0.0)
        for i, gap in enumerate(gaps):
            if limit and gap > limit:
                preempted = i + 1 in own.preempted_before
                found.append(LongGap(request, gap, own.steps[i], own.steps[i + 1], preempted))
    return found
