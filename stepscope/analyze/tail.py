"""Which steps made running decodes wait, by how much, and because of what.

What a victim feels is the gap between two of its tokens. A decode-only step is such a gap, and so
is a mixed step: its excess is T - P50. A step that only prefills while decodes are blocked adds
all of itself to the gap that the next decode closes: without it that decode would have begun when
it began, so its excess is its whole wall time. Consecutive blocking steps and the mixed step that
ends them belong to one gap and are judged together, so that ten small prefills in a row count.
A prefill that runs while nothing decodes delays nobody.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from stepscope.analyze.frame import Frame, bucket, prefill_tokens
from stepscope.analyze.moments import EventIndex
from stepscope.records import StepRecord
from stepscope.stats import median

PAUSES = ("gc", "compile", "alloc", "capture")


@dataclass(slots=True)
class Delay:
    """One working step seen by the decodes that were running."""

    index: int  # into frame.rows
    baseline_ns: float
    excess_ns: float
    gap_excess_ns: float  # of the whole gap it lies in
    cause: str = ""  # prefill, recompute, preemption, an event's kind, unknown; "" = not long
    pause_ns: float = 0.0  # of excess_ns, inside gc, compile, alloc or capture events
    long: bool = False  # the gap exceeds tail_factor x P50


def blocks_decodes(row: StepRecord) -> bool:
    """Only prefills ran while decodes were waiting for their turn."""
    return bool(
        prefill_tokens(row) and not row.num_decode_requests and (row.num_blocked_decodes or 0)
    )


def concerns_decodes(row: StepRecord) -> bool:
    return row.kind != "prefill" or blocks_decodes(row)


def find_delays(frame: Frame) -> list[Delay]:
    """A Delay for each working step that concerns decodes, in time order; none without a P50."""
    delays: list[Delay] = []
    gap: list[Delay] = []
    for i in frame.working:
        row = frame.rows[i]
        baseline = frame.baseline.of(bucket(row))
        if baseline is None or not concerns_decodes(row):
            continue
        blocking = blocks_decodes(row)
        excess = float(row.wall_ns) if blocking else max(0.0, row.wall_ns - baseline)
        delay = Delay(i, baseline, excess, excess)
        delays.append(delay)
        if blocking:
            gap.append(delay)
        else:
            _close_gap(gap, delay if prefill_tokens(row) else None)
    _close_gap(gap, None)
    _judge(frame, delays)
    return delays


def _close_gap(gap: list[Delay], closing: Delay | None) -> None:
    members = gap + ([closing] if closing else [])
    total = sum(d.excess_ns for d in members)
    for delay in members:
        delay.gap_excess_ns = total
    gap.clear()


def _judge(frame: Frame, delays: list[Delay]) -> None:
    events = EventIndex(frame.run.events)
    per_token = _quiet_ns_per_token(frame, delays, events)
    for delay in delays:
        row = frame.rows[delay.index]
        over = (frame.limits.tail_factor - 1) * delay.baseline_ns
        delay.long = delay.excess_ns > 0 and delay.gap_excess_ns > over
        overlaps = events.overlaps(row.begin_ns, row.end_ns) if delay.long else Counter[str]()
        delay.pause_ns = min(delay.excess_ns, float(sum(overlaps[k] for k in PAUSES)))
        if prefill_tokens(row) or delay.long:
            delay.cause = _cause(frame, delay, overlaps, per_token)


def _quiet_ns_per_token(frame: Frame, delays: list[Delay], events: EventIndex) -> float | None:
    """What a prefill token costs running decodes while nobody else uses the cores."""
    costs = []
    for delay in delays:
        row = frame.rows[delay.index]
        tokens = prefill_tokens(row)
        if tokens and not events.overlaps(row.begin_ns, row.end_ns)["noise"]:
            costs.append(delay.excess_ns / tokens)
    return median(costs)


def _cause(
    frame: Frame, delay: Delay, overlaps: Counter[str], quiet_ns_per_token: float | None
) -> str:
    """Pauses that explain half of the excess come first: the tokens did not cause those.

    Nor did they cause what a quiet machine shows them not to cost: that is noise.
    """
    row = frame.rows[delay.index]
    half = frame.limits.pause_share * delay.excess_ns
    if delay.long and delay.pause_ns > half:
        return max(PAUSES, key=lambda k: overlaps[k])
    if tokens := prefill_tokens(row):
        usual = tokens * (quiet_ns_per_token or delay.excess_ns)
        if overlaps["noise"] > half and delay.excess_ns > frame.limits.noise_factor * usual:
            return "noise"
        recomputes = (row.recompute_tokens or 0) >= frame.limits.recompute_share * tokens
        return "recompute" if recomputes else "prefill"
    if follows_preemption(frame, delay.index):
        return "preemption"
    enough = [kind for kind in overlaps if kind not in PAUSES and overlaps[kind] > half]
    return max(enough, key=lambda k: overlaps[k], default="unknown")


def follows_preemption(frame: Frame, index: int) -> bool:
    before = frame.rows[index - 1] if index else frame.rows[index]
    return bool((frame.rows[index].num_preempted or 0) + (before.num_preempted or 0))


def kv_is_full(frame: Frame, row: StepRecord) -> bool:
    used, total = row.kv_used_pages, row.kv_total_pages
    return used is not None and bool(total) and used >= frame.limits.kv_full * (total or 0)


@dataclass(frozen=True, slots=True)
class Tail:
    """The excess of long steps as shares of working time."""

    share: float
    steps: int
    by_verdict: dict[str, float]  # pause_bound, kv_pressure_bound, prefill_stall_bound, unexplained
    pause_kinds: Counter[str]

    def primary(self) -> str | None:
        """The verdict with the largest share, unless what is unexplained is larger."""
        best = max(self.by_verdict, key=lambda k: self.by_verdict[k], default=None)
        return None if best == "unexplained" else best


def verdict_of_delay(frame: Frame, delay: Delay) -> str:
    row = frame.rows[delay.index]
    if delay.cause in PAUSES:
        return "pause_bound"
    evicted = follows_preemption(frame, delay.index) and (
        kv_is_full(frame, row) or kv_is_full(frame, frame.rows[max(delay.index - 1, 0)])
    )
    if delay.cause == "recompute" or evicted:
        return "kv_pressure_bound"
    return "prefill_stall_bound" if delay.cause == "prefill" else "unexplained"


def summarize_tail(frame: Frame, delays: list[Delay]) -> Tail:
    """Excess inside pauses counts as pause, whatever else the step did; the rest by its cause."""
    total = frame.working_ns
    excess: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    long = [d for d in delays if d.long]
    for delay in long:
        name = verdict_of_delay(frame, delay)
        if name == "pause_bound":
            kinds[delay.cause] += round(delay.excess_ns)
            excess[name] += round(delay.excess_ns)
            continue
        excess["pause_bound"] += round(delay.pause_ns)
        excess[name] += round(delay.excess_ns - delay.pause_ns)
    shares = {name: ns / total for name, ns in excess.items() if total and ns}
    return Tail(sum(shares.values()), len(long), shares, kinds)
