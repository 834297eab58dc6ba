"""What the analyzer concludes: the only thing reports read besides the run itself.

Pure data. Nanoseconds, bytes, FLOPs and shares (0..1); the reports turn them into text and ink.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Answer:
    """One of the three questions, answered in one sentence with its numbers."""

    question: str
    short: str  # a few words: "launch-bound", "weights", "1 prefill, 214 ms"
    sentence: str


@dataclass(frozen=True, slots=True)
class Evidence:
    """One number behind a verdict, with its unit and the threshold it was held against."""

    label: str
    value: float | None
    unit: str  # "%", "ms", "GB/s", "steps", ...
    threshold: str = ""  # "" where nothing was compared


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str  # bandwidth_bound, launch_bound, ... see analyze/rules.py
    sub: str  # weights, kv, a phase name, or ""
    share: float | None  # of the time it was judged on
    sentence: str
    evidence: tuple[Evidence, ...]
    gain: str  # "5.2 -> 2.9 ms if ..." (estimated), or why there is none
    advice: str  # one piece of advice; vLLM's and SGLang's flag where one exists
    falsify: str
    flags: tuple[str, ...] = ()
    runners_up: tuple[tuple[str, float], ...] = ()  # (verdict name, share of time)


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """A share of the time of all working steps. The lines of a budget sum to its total exactly."""

    key: str  # weights, kv, compute, dispatch, inefficient, gather, sample, d2h_wait, host phases
    label: str
    ns: float
    share: float
    estimated: bool  # from ceilings and twin, rather than from a clock around it


@dataclass(frozen=True, slots=True)
class StepView:
    """A step with what was derived for it."""

    step: int
    kind: str
    begin_ns: int
    end_ns: int
    warmup: bool
    phases: tuple[int | None, ...]  # as records.PHASES
    decode_requests: int
    prefill_tokens: int
    batch: int  # running + blocked decodes: the bucket
    context_tokens: int
    output_tokens: int
    weight_bytes: int
    kv_bytes: int
    flops: int
    floor_ns: float | None  # max(memory, compute) at the measured ceilings
    memory_ns: float | None
    compute_ns: float | None
    twin_ns: float | None  # dispatch
    mbu: float | None
    excess_ns: float  # over the decode-only median of its bucket; 0 where it is none
    verdict: str
    waiting: int | None
    running: int | None
    kv_used_pages: int | None

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.begin_ns


@dataclass(frozen=True, slots=True)
class Stall:
    """A step in which someone's prefill (or another cause) held up running decodes."""

    step: int
    begin_ns: int
    wall_ns: int
    excess_ns: float
    baseline_ns: float  # the decode-only median it is measured against
    cause: str  # prefill, recompute, preemption, gc, compile, noise, unknown
    culprits: tuple[int, ...]  # request ids
    victims: tuple[int, ...]  # requests whose next token waited
    prefill_tokens: int
    detail: str
    harmful: bool  # False: within the threshold, listed as harmless


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution in nanoseconds; n counts its values, None where there are none."""

    metric: str  # ttft, queue, prefill, itl, tpot, e2e
    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class BatchPoint:
    """Decode-only steps of one batch size."""

    batch: int
    n: int
    p50_ns: float
    p10_ns: float
    p90_ns: float
    floor_ns: float | None
    twin_ns: float | None
    mean_context: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class GatherPoint:
    """Decode-only steps of about one context length: medians, and the rate over all of them."""

    context: float  # tokens of a request, the mean over requests and steps
    batch: float
    n: int
    gather_ns: float
    forward_ns: float | None
    gather_bytes: float | None
    bytes_per_s: float | None  # gathered bytes / gather time


@dataclass(frozen=True, slots=True)
class WhatIf:
    """An estimate from the budget, never a measurement."""

    change: str  # "weights halved", "dispatch gone", "batch doubled"
    before_ns: float
    after_ns: float
    per_token: bool  # times are per token rather than per step
    sentence: str


@dataclass(frozen=True, slots=True)
class Card:
    """The ceilings next to what the model needs per step."""

    weight_bytes: int
    kv_bytes_per_token: int
    read_bytes_per_s: float | None  # at the weights' working set
    bound_ns: float | None  # weight_bytes / read rate
    bound_tokens_per_s: float | None  # at batch 1
    gemm_flops: float | None
    twin_ns: float | None  # dispatch at batch 1
    gemv_bytes_per_s: float | None  # what matrix-vector products reach, over all shapes
    critical_batch: float | None  # where compute takes over from weight streaming


@dataclass(frozen=True, slots=True)
class Throughput:
    wall_ns: int
    idle_ns: int
    steps: int
    decode_steps: int
    output_tokens: int
    prefill_tokens: int
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    requests_per_s: float | None
    mean_step_ns: float | None
    p50_step_ns: float | None
    mbu: float | None
    mfu: float | None


@dataclass(frozen=True, slots=True)
class Goodput:
    """Requests per second that meet every SLO; None where the scenario sets none."""

    slo: dict[str, float]
    attained: int
    judged: int
    requests_per_s: float | None


@dataclass
class Analysis:
    answers: tuple[Answer, Answer, Answer]
    verdict: Verdict
    budget: list[BudgetLine]
    phase_totals: dict[str, int]  # ns per phase over working steps
    steps: list[StepView]
    stalls: list[Stall]  # harmful first, by excess; then harmless ones
    latency: dict[str, Latency]
    throughput: Throughput
    goodput: Goodput
    batches: list[BatchPoint]
    what_ifs: list[WhatIf]
    card: Card
    flags: list[tuple[str, str]]  # (flag, one sentence)
    late_admissions: list[tuple[int, float]]  # (request, ns waited), worst first
    finish_reasons: dict[str, int]
    failures: list[tuple[int, str]]  # (request, error)
    preemptions: int
    recomputed_tokens: int
    itl_ns: list[int]  # every gap, in time order
    not_available: list[tuple[str, str]]  # (what, why)
    notes: list[str] = field(default_factory=list)
    prefix_hit_tokens: int | None = None  # None: the run had no prefix cache
    prefix_hit_share: float | None = None  # of the prompt tokens that were needed
    gathers: list[GatherPoint] = field(default_factory=list)  # shortest context first

    def to_dict(self) -> dict[str, Any]:
        """The analysis as one JSON object, without the per-step and per-token arrays."""
        raw = asdict(self)
        raw.pop("steps")
        raw.pop("itl_ns")
        return raw


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric over the compared runs; values in `unit`, None where a run lacks it."""

    metric: str
    unit: str
    better: str  # "lower", "higher" or ""
    values: tuple[float | None, ...]
    deltas: tuple[float | None, ...]  # relative to the first run; 0.05 = +5 %
    n: tuple[int, ...]


@dataclass
class Comparison:
    labels: list[str]
    stamps: list[str]
    differences: list[str]  # why the runs are not comparable; empty = comparable
    rows: list[MetricRow]
    notes: list[str]
