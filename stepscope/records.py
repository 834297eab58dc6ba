"""What was observed in a run. Everything in stepscope reads or writes these, and nothing else.

Records hold observations only: integer nanoseconds from run start, tokens, pages, bytes, counts.
Bytes moved, FLOPs, bounds and verdicts are derived later (`stepscope.analyze`), so that an old run
can be analysed again. A value that was not observed is None, never 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

SCHEMA_VERSION = 1

Stamp = Literal["MEASURED", "MODELLED", "IMPORTED"]
StepKind = Literal["decode", "prefill", "mixed", "idle"]
PartKind = Literal["prefill", "decode", "recompute"]

# Exclusive and contiguous: the ten phases and `other` sum to end_ns - begin_ns exactly.
PHASES = (
    "recv",
    "schedule",
    "prepare",
    "gather",
    "forward",
    "sample",
    "d2h_wait",
    "commit",
    "detok",
    "emit",
    "other",
)
RECV, SCHEDULE, PREPARE, GATHER, FORWARD, SAMPLE, D2H_WAIT, COMMIT, DETOK, EMIT, OTHER = range(
    len(PHASES)
)
# Phases in which the host works for the engine, not for the model.
HOST_PHASES = ("recv", "schedule", "prepare", "commit", "detok", "emit", "other")


@dataclass(slots=True)
class StepRecord:
    """One iteration of the engine loop. Work columns are named as in ForwardPassMetrics v1."""

    step: int
    kind: StepKind
    begin_ns: int
    end_ns: int
    rank: int = 0
    emitted_ns: int | None = None  # when this step's tokens had reached the client; None if idle
    result_step: int | None = None  # the step whose tokens were committed in this iteration
    warmup: int = 0
    sampled: int = 0  # a profiled step: never pooled with others
    host_cpu_ns: int | None = None  # CPU time of the engine thread
    num_syncs: int | None = None

    recv_ns: int | None = None
    schedule_ns: int | None = None
    prepare_ns: int | None = None
    gather_ns: int | None = None
    forward_ns: int | None = None
    sample_ns: int | None = None
    d2h_wait_ns: int | None = None
    commit_ns: int | None = None
    detok_ns: int | None = None
    emit_ns: int | None = None
    other_ns: int | None = None

    dev_begin_ns: int | None = None
    dev_end_ns: int | None = None
    dev_forward_ns: int | None = None
    dev_sample_ns: int | None = None
    dev_gather_ns: int | None = None
    dev_busy_ns: int | None = None

    num_launches: int | None = None
    graph: str | None = None  # eager, compile or cuda
    graph_hit: int | None = None
    padded_batch: int | None = None

    num_prefill_requests: int | None = None
    sum_prefill_tokens: int | None = None  # prompt tokens computed in this step
    sum_prefill_kv_tokens: int | None = None  # tokens in the cache before it, read by prefills
    num_decode_requests: int | None = None
    sum_decode_kv_tokens: int | None = None  # context read by decodes, the new token included
    recompute_tokens: int | None = None  # of sum_prefill_tokens: computed once before
    expert_reads: int | None = None  # (layer, expert) pairs whose weights were read

    num_output_tokens: int | None = None  # of result_step, given out in this iteration
    num_extra_tokens: int | None = None  # overlap: computed for requests that had just ended

    num_waiting: int | None = None
    num_running: int | None = None
    num_blocked_decodes: int | None = None  # running, past their prefill, not in this step
    num_preempted: int | None = None
    num_admitted: int | None = None
    num_finished: int | None = None

    kv_used_pages: int | None = None
    kv_total_pages: int | None = None
    kv_gather_bytes: int | None = None
    prefix_hit_tokens: int | None = None  # taken from the prefix cache, not computed
    evicted_pages: int | None = None  # given up by the prefix cache
    swapped_pages: int | None = None  # copied to host memory or back
    swap_ns: int | None = None  # of prepare_ns: copying them

    sm_clock_mhz: int | None = None
    mem_clock_mhz: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None

    @property
    def wall_ns(self) -> int:
        return self.end_ns - self.begin_ns

    def phase_ns(self, name: str) -> int | None:
        value: int | None = getattr(self, f"{name}_ns")
        return value


@dataclass(slots=True)
class RequestRecord:
    """One request's life. All times in ns from run start; None = it never got there."""

    id: int
    arrival_ns: int  # when the workload says it arrived
    prompt_tokens: int
    client: str = ""
    priority: int = 0
    queued_ns: int | None = None  # when the engine's recv phase picked it up
    admitted_ns: int | None = None  # begin of its first step, or queued_ns if later
    first_token_ns: int | None = None
    finished_ns: int | None = None  # its last token was out, or it failed
    output_tokens: int = 0
    cached_tokens: int | None = None  # of its tokens, from the prefix cache at each admission
    preemptions: int = 0
    recomputed_tokens: int = 0
    finish_reason: str | None = None  # eos, stop, length, aborted, error
    error: str | None = None


@dataclass(slots=True)
class Part:
    """A run of consecutive steps in which a request did the same thing.

    A new row starts whenever the kind or tokens_per_step changes, or a step passes without it;
    and at each flush (about once a second), so that a killed run keeps its tokens' times.
    output_tokens is what the part emitted: one per step of a decode part; for a prefill or
    recompute part 1 if its last step sampled a token, else 0.
    """

    request: int
    kind: PartKind
    first_step: int
    last_step: int
    tokens_per_step: int
    output_tokens: int


@dataclass(slots=True)
class Event:
    """Something that took time or changed state beside the phases (gc, compile, preempt, ...)."""

    begin_ns: int
    end_ns: int
    kind: str  # gc, compile, capture, alloc, preempt, evict, swap, graph_miss, noise
    request: int | None = None
    detail: str = ""


@dataclass(slots=True)
class Sample:
    """The text of one request, kept so that a person sees what was generated."""

    request: int
    prompt: str
    text: str
    token_ids: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # the text each token released, may be ""
    # Natural log-probabilities under the raw logits, for requests that asked: of each token, and
    # of the likeliest at its place.
    logprobs: list[float] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)


@dataclass
class RunMeta:
    """Everything about a run that is not a row (`run.json`)."""

    run_id: str
    label: str  # what `compare` calls it, e.g. the policy
    stamp: Stamp
    created_utc: str
    scenario: str  # name
    policy: str
    model: dict[str, Any]  # ModelSpec.to_dict()
    device: dict[str, Any]  # kind, name, threads, host description
    engine: dict[str, Any]  # page_size, kv_pages, budget, chunk, max_seqs, dtype, graphs, ...
    schema_version: int = SCHEMA_VERSION
    complete: bool = False
    command: list[str] = field(default_factory=list)
    seed: int = 0
    workload: dict[str, Any] = field(default_factory=dict)  # resolved scenario, sha of arrivals
    slo: dict[str, float] = field(default_factory=dict)  # ttft_ms, itl_ms
    ceilings: dict[str, Any] | None = None  # Ceilings.to_dict()
    clock: dict[str, Any] = field(default_factory=dict)  # source, resolution_ns, one timeline?
    recorder: dict[str, Any] = field(default_factory=dict)  # ns_per_step, laps_per_step, ...
    basis: dict[str, str] = field(default_factory=dict)  # column group -> measured, absent, ...
    versions: dict[str, str] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> RunMeta:
        known = {f.name for f in fields(cls)}
        data = {k: v for k, v in raw.items() if k in known}
        data["samples"] = [Sample(**s) for s in data.get("samples", [])]
        return cls(**data)


@dataclass
class Run:
    """One run, in memory: what `store` reads and writes and `analyze` works on."""

    meta: RunMeta
    steps: list[StepRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
