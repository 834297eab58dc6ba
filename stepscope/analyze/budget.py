"""Where the time of the working steps went. Integer nanoseconds, so that it sums exactly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from stepscope.analyze.cost import StepCost
from stepscope.analyze.frame import Frame, bucket, is_decode_only
from stepscope.analyze.model import BudgetLine
from stepscope.records import HOST_PHASES, PHASES, StepRecord

# key -> (label, estimated)
LINES: dict[str, tuple[str, bool]] = {
    "weights": ("weights at the read ceiling", True),
    "kv": ("KV at the read ceiling", True),
    "compute": ("arithmetic at the GEMM ceiling", True),
    "dispatch": ("dispatch (twin)", True),
    "inefficient": ("kernel inefficiency", True),
    "forward": ("forward, not split", False),
    "gather": ("gather", False),
    "sample": ("sample", False),
    "d2h_wait": ("d2h_wait", False),
    **{name: (name, False) for name in HOST_PHASES},
    "noise": ("others on the cores", True),
    "unknown": ("phases not observed", False),
}

# Which verdict a line speaks for. What is left in d2h_wait is no waiting for the model: with one
# timeline the host copies the ids itself, and with two the device has finished by then.
VERDICT_OF: dict[str, str] = {
    "weights": "bandwidth_bound",
    "kv": "bandwidth_bound",
    "compute": "compute_bound",
    "dispatch": "launch_bound",
    "inefficient": "kernel_inefficient",
    "forward": "undetermined",
    "unknown": "undetermined",
    "noise": "cpu_starved",
    "gather": "copy_bound",
    "sample": "sampling_bound",
    "d2h_wait": "host_bound",
    **dict.fromkeys(HOST_PHASES, "host_bound"),
}

# What a verdict's term is, as part of a sentence.
TERMS = {
    "bandwidth_bound": "reading weights and cache at the measured ceiling",
    "launch_bound": "dispatch",
    "kernel_inefficient": "kernel inefficiency",
    "compute_bound": "arithmetic at the measured ceiling",
    "host_bound": "host phases",
    "copy_bound": "gathering KV pages",
    "sampling_bound": "sampling",
    "cpu_starved": "waiting for cores that other processes took",
    "undetermined": "time that cannot be split",
}

Split = dict[str, int]


def split_forward(model_ns: int, cost: StepCost) -> Split:
    """Floor first, then the twin, each at most what is left; the rest is inefficiency.

    Without a floor nothing is split; without a twin the rest cannot be told from dispatch.
    """
    floor = cost.floor_ns
    if floor is None:
        return {"forward": model_ns}
    bound = min(round(floor), model_ns)
    rest = model_ns - bound
    if cost.compute_limited:
        parts = {"compute": bound}
    else:
        weights = bound * cost.weight_bytes // max(cost.weight_bytes + cost.kv_bytes, 1)
        parts = {"weights": weights, "kv": bound - weights}
    if cost.twin_ns is None:
        return {**parts, "forward": rest}
    dispatch = min(round(cost.twin_ns), rest)
    return {**parts, "dispatch": dispatch, "inefficient": rest - dispatch}


def split_step(row: StepRecord, cost: StepCost) -> Split:
    """One step's time by budget line; the values sum to its wall time.

    Time outside every observed phase is `other`; without any observed phase it is `unknown`.
    """
    phases = {name: ns for name in PHASES if (ns := row.phase_ns(name)) is not None}
    if not phases:
        return {"unknown": row.wall_ns}
    model_ns = phases.pop("forward", 0)
    unaccounted = row.wall_ns - model_ns - sum(phases.values())
    phases["other"] = phases.get("other", 0) + max(unaccounted, 0)
    return {**split_forward(model_ns, cost), **phases}


def clamped(row: StepRecord, cost: StepCost) -> bool:
    """Whether floor plus twin claim more than the measured forward."""
    if cost.floor_ns is None or row.forward_ns is None:
        return False
    return cost.floor_ns + (cost.twin_ns or 0.0) > row.forward_ns


@dataclass(frozen=True, slots=True)
class Budget:
    """Totals over some steps: ns by line, and what the lines say as verdicts."""

    ns: Split
    steps: int

    @property
    def total(self) -> int:
        return sum(self.ns.values())

    @property
    def mean_ns(self) -> float:
        return self.total / self.steps if self.steps else 0.0

    def share(self, *keys: str) -> float:
        return sum(self.ns.get(k, 0) for k in keys) / self.total if self.total else 0.0

    @property
    def host_share(self) -> float:
        return self.share("d2h_wait", *HOST_PHASES)

    def ranking(self) -> list[tuple[str, float]]:
        """(verdict, share of time), largest first."""
        return ranking(self.ns)

    def lines(self) -> list[BudgetLine]:
        total = self.total
        return [
            BudgetLine(key, label, self.ns[key], self.ns[key] / total if total else 0.0, estimated)
            for key, (label, estimated) in LINES.items()
            if key in self.ns
        ]


def ranking(ns: Split) -> list[tuple[str, float]]:
    totals: Counter[str] = Counter()
    for key, value in ns.items():
        totals[VERDICT_OF[key]] += value
    whole = sum(totals.values())
    return [(name, value / whole) for name, value in totals.most_common() if whole and value]


def budget_of(splits: Iterable[Split]) -> Budget:
    totals: Counter[str] = Counter()
    steps = 0
    for split in splits:
        steps += 1
        for key, value in split.items():
            totals[key] += value
    return Budget(dict(totals), steps)


def split_all(frame: Frame) -> list[Split]:
    """Parallel to frame.rows."""
    both = zip(frame.rows, frame.costs, strict=True)
    splits = [split_step(row, cost) for row, cost in both]
    for i in frame.noisy:
        if is_decode_only(frame.rows[i]):
            splits[i] = charge_noise(
                splits[i], frame.rows[i], frame.baseline.of(bucket(frame.rows[i]))
            )
    return splits


def charge_noise(split: Split, row: StepRecord, baseline_ns: float | None) -> Split:
    """What a step in a noisy block takes beyond the quiet median is not its kernels' doing.

    It is taken from the part of forward that nothing explains, so at most that much moves.
    """
    if baseline_ns is None:
        return split
    rest = "forward" if row.graph == "compile" else "inefficient"
    unexplained = split.get(rest, 0)
    noise = min(unexplained, max(0, round(row.wall_ns - baseline_ns)))
    if not noise:
        return split
    return {**split, rest: unexplained - noise, "noise": noise}


def phase_totals(frame: Frame) -> dict[str, int]:
    """ns per observed phase over working steps."""
    totals: dict[str, int] = {}
    for name in PHASES:
        seen = [ns for i in frame.working if (ns := frame.rows[i].phase_ns(name)) is not None]
        if seen:
            totals[name] = sum(seen)
    return totals
