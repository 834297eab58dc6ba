"""A run made ready for analysis: its rows sorted into kinds, each with its cost and baseline."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from stepscope.analyze.cost import CostModel, StepCost
from stepscope.analyze.device import has_device, seen_from_device
from stepscope.analyze.moments import EventIndex
from stepscope.analyze.thresholds import Thresholds
from stepscope.errors import StepscopeError
from stepscope.records import Run, StepRecord
from stepscope.roofline import Ceilings
from stepscope.spec import ModelSpec
from stepscope.stats import median
from stepscope.text import plural


def prefill_tokens(row: StepRecord) -> int:
    return (row.sum_prefill_tokens or 0) or (row.recompute_tokens or 0)


def bucket(row: StepRecord) -> int:
    """Running plus blocked decodes: the batch this step would have had with nothing in its way."""
    if row.num_decode_requests is None:
        return row.num_running or 0
    return row.num_decode_requests + (row.num_blocked_decodes or 0)


def is_decode_only(row: StepRecord) -> bool:
    return row.kind == "decode" and not prefill_tokens(row)


def is_compiled(frame: Frame) -> bool:
    """Whether decode-only steps ran as compiled programs, which have no twin."""
    return any(frame.rows[i].graph == "compile" for i in frame.decode_only)


def is_working(row: StepRecord) -> bool:
    return row.kind != "idle" and not row.warmup and not row.sampled


class Baseline:
    """Median period of decode-only steps per batch bucket. Mixed steps never enter it."""

    def __init__(self, rows: list[StepRecord], min_steps: int) -> None:
        walls: dict[int, list[float]] = {}
        for row in rows:
            walls.setdefault(bucket(row), []).append(row.wall_ns)
        # One step alone would be its own median, however long it was.
        enough = {b: w for b, w in walls.items() if len(w) >= min_steps} or walls
        self._medians = {b: median(w) or 0.0 for b, w in enough.items()}
        self._buckets = sorted(self._medians)

    def of(self, batch: int) -> float | None:
        """Its own bucket, else the nearest one (the smaller of two); None without any."""
        if not self._buckets:
            return None
        i = bisect_left(self._buckets, batch)
        near = self._buckets[max(0, i - 1) : i + 1]
        return self._medians[min(near, key=lambda b: (abs(b - batch), b))]


@dataclass
class Frame:
    """Everything the parts of the analysis share; costs are parallel to rows, ints index both."""

    run: Run
    spec: ModelSpec
    ceilings: Ceilings | None
    dtype: str
    limits: Thresholds
    model: CostModel
    rows: list[StepRecord]
    costs: list[StepCost]
    working: list[int]
    decode_only: list[int]  # in quiet blocks, if there are enough of them
    noisy: set[int]  # steps during which other processes took the cores
    baseline: Baseline
    two_timelines: bool  # the rows are seen from the device (analyze/device.py)
    notes: list[str] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)

    @property
    def working_ns(self) -> int:
        return sum(self.rows[i].wall_ns for i in self.working)

    @property
    def wall_ns(self) -> int:
        if not self.rows:
            return 0
        return max(r.end_ns for r in self.rows) - self.rows[0].begin_ns

    @property
    def idle_ns(self) -> int:
        return sum(r.wall_ns for r in self.rows if r.kind == "idle")


def read_spec(run: Run) -> ModelSpec:
    try:
        return ModelSpec.from_dict(run.meta.model)
    except (KeyError, TypeError) as err:
        raise StepscopeError(
            f"run {run.meta.run_id} does not describe its model ({err}), so nothing can be derived "
            "from it: record it again with this version of stepscope."
        ) from err


def read_ceilings(run: Run) -> Ceilings | None:
    return Ceilings.from_dict(run.meta.ceilings) if run.meta.ceilings else None


def noisy_steps(run: Run, rows: list[StepRecord]) -> set[int]:
    """Indices of steps at least half inside a noise event."""
    events = EventIndex([e for e in run.events if e.kind == "noise"])
    return {i for i, row in enumerate(rows) if events.covers(row, "noise")}


def build_frame(run: Run, limits: Thresholds) -> Frame:
    """Raises StepscopeError when run.json carries no readable model."""
    spec, ceilings = read_spec(run), read_ceilings(run)
    dtype = str(run.meta.engine.get("dtype") or spec.dtype)
    model = CostModel(spec, ceilings, dtype)
    first_rank = min((s.rank for s in run.steps), default=0)
    rows = sorted((s for s in run.steps if s.rank == first_rank), key=lambda s: s.begin_ns)
    two_timelines = has_device(rows)
    if two_timelines:
        rows = seen_from_device(rows)
    working = [i for i, row in enumerate(rows) if is_working(row)]
    decoding = [i for i in working if is_decode_only(rows[i])]
    noisy = noisy_steps(run, rows)
    quiet = [i for i in decoding if i not in noisy]
    decode_only = quiet if len(quiet) >= limits.min_decode_steps else decoding
    frame = Frame(
        run,
        spec,
        ceilings,
        dtype,
        limits,
        model,
        rows,
        [model.of(row) for row in rows],
        working,
        decode_only,
        noisy,
        Baseline([rows[i] for i in decode_only], limits.min_bucket_steps),
        two_timelines,
    )
    if len(decode_only) < len(decoding):
        left = plural(len(decoding) - len(decode_only), "decode-only step")
        frame.notes.append(
            f"{left} ran while other processes took the cores: the decode-only statistics leave "
            "them out."
        )
    if two_timelines:
        frame.notes.append(
            "Steps are shown as the device did them: a host phase counts only where the device "
            "had nothing to do meanwhile."
        )
    if len(rows) < len(run.steps):
        frame.notes.append(
            f"Several ranks were recorded; the steps of rank {first_rank} are shown."
        )
    return frame


def idle_with_pending(frame: Frame) -> int:
    """ns of idle rows during which some request had arrived and was not yet queued."""
    pending = sorted(
        (r.arrival_ns, r.queued_ns) for r in frame.run.requests if r.queued_ns is not None
    )
    idle = [r for r in frame.rows if r.kind == "idle"]
    total, at = 0, 0
    for row in idle:
        reached = row.begin_ns
        while at < len(pending) and pending[at][1] <= row.begin_ns:
            at += 1
        for begin, end in pending[at:]:
            if begin >= row.end_ns:
                break
            total += max(0, min(end, row.end_ns) - max(begin, reached))
            reached = max(reached, min(end, row.end_ns))
    return total
