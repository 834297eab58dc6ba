"""Synthetic runs with known answers: a tiny scheduler with a clock that only the test moves.

The numbers look like SmolLM2-135M in fp32 on two CPU threads. By default 4 requests are prefilled
together in step 0 and then decode; a decode step takes 33.8 ms, of which streaming the weights at
22 GB/s explains 24.5 ms and the twin (dispatch) 4 ms, so the default verdict is bandwidth_bound.
Every knob of `make_run` moves one thing away from that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepscope.records import (
    PHASES,
    Event,
    Part,
    RequestRecord,
    Run,
    StepRecord,
)
from stepscope.roofline import Ceilings
from stepscope.spec import ModelSpec
from tests.synthetic_device import MS, PAGE, US, make_ceilings, make_meta, make_spec

__all__ = [
    "DECODE_PHASES",
    "MS",
    "US",
    "Preemption",
    "Prefill",
    "make_ceilings",
    "make_run",
    "make_spec",
]


# A decode step of the default run, in ns: 33.8 ms in total.
DECODE_PHASES: dict[str, int] = {
    "recv": 20 * US,
    "schedule": 60 * US,
    "prepare": 150 * US,
    "gather": 1_500 * US,
    "forward": 31_000 * US,
    "sample": 800 * US,
    "d2h_wait": 5 * US,
    "commit": 80 * US,
    "detok": 120 * US,
    "emit": 30 * US,
    "other": 35 * US,
}
PREFILL_NS_PER_TOKEN = 1_500 * US // 10  # 150 us


@dataclass(frozen=True, slots=True)
class Prefill:
    """A request that joins before (blocking) or in (mixed) the at-th decode iteration."""

    at: int
    tokens: int = 400
    mixed: bool = False  # True: decodes run in the same step, as under `chunked`
    chunks: int = 1  # consecutive steps over which the prompt is computed
    output_tokens: int = 1  # 1: finishes with its first token and never joins the decodes
    forward_ns: int | None = None  # added to a mixed step, or all of a blocking one; per chunk
    late_by: int = 0  # iterations between its arrival and its admission, beyond the usual one


@dataclass(frozen=True, slots=True)
class Preemption:
    """The youngest running request loses its pages at one decode iteration, returns at another."""

    at: int
    back_at: int
    mixed: bool = False
    forward_ns: int | None = None


@dataclass
class _Seq:
    record: RequestRecord
    target: int
    context: int
    first: bool = True


@dataclass
class _Builder:
    phases: Callable[[int], Mapping[str, int]]
    cpu_share: float
    warmup: int
    kv_pages: int
    now: int = 0
    steps: list[StepRecord] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    running: list[_Seq] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    open_parts: dict[int, Part] = field(default_factory=dict)
    decode_index: int = 0

    def note_part(self, request: int, kind: Any, tokens: int, out: int) -> None:
        step = len(self.steps)
        part = self.open_parts.get(request)
        same = part is not None and part.kind == kind and part.tokens_per_step == tokens
        if part is not None and same and part.last_step == step - 1:
            part.last_step = step
            part.output_tokens += out
            return
        part = Part(request, kind, step, step, tokens, out)
        self.open_parts[request] = part
        self.parts.append(part)

    def idle(self, ns: int) -> None:
        row = StepRecord(len(self.steps), "idle", self.now, self.now + ns)
        row.num_waiting = row.num_running = row.num_blocked_decodes = 0
        row.num_running = len(self.running)
        self.steps.append(row)
        self.now += ns

    def step(
        self,
        decoding: list[_Seq],
        prefilling: list[tuple[_Seq, int, int, bool]],  # (seq, tokens, cached before, last chunk)
        phases: Mapping[str, int],
        recompute: bool = False,
        waiting: int = 0,
        preempted: int = 0,
    ) -> StepRecord:
        index = len(self.steps)
        row = StepRecord(
            index,
            "mixed" if decoding and prefilling else "prefill" if prefilling else "decode",
            self.now,
            self.now + sum(phases.values()),
        )
        for name in PHASES:
            setattr(row, f"{name}_ns", phases.get(name, 0))
        row.emitted_ns = row.end_ns - phases.get("other", 0)
        row.result_step = index
        row.warmup = int(index < self.warmup)
        row.host_cpu_ns = round(row.wall_ns * self.cpu_share)
        row.graph = "eager"
        row.num_prefill_requests = len(prefilling)
        row.sum_prefill_tokens = sum(tokens for _, tokens, _, _ in prefilling)
        row.sum_prefill_kv_tokens = sum(cached for _, _, cached, _ in prefilling)
        row.recompute_tokens = row.sum_prefill_tokens if recompute else 0
        row.num_decode_requests = len(decoding)
        row.num_waiting, row.num_preempted = waiting, preempted
        row.num_running = len(self.running) + sum(s not in self.running for s, *_ in prefilling)
        row.num_blocked_decodes = len([s for s in self.running if s not in decoding])
        row.num_admitted = sum(cached == 0 for _, _, cached, _ in prefilling)
        for seq in decoding:
            seq.context += 1
            self.note_part(seq.record.id, "decode", 1, 1)
        row.sum_decode_kv_tokens = sum(s.context for s in decoding)
        for seq, tokens, cached, last in prefilling:
            seq.record.admitted_ns = (
                row.begin_ns if seq.record.admitted_ns is None else seq.record.admitted_ns
            )
            seq.context = cached + tokens
            self.note_part(
                seq.record.id, "recompute" if recompute else "prefill", tokens, int(last)
            )
            if last:
                self.running.append(seq)
        emitted = decoding + [s for s, _, _, last in prefilling if last]
        row.num_output_tokens = len(emitted)
        row.kv_used_pages = sum(math.ceil(s.context / PAGE) for s in self.running)
        row.kv_total_pages = self.kv_pages
        row.num_finished = sum(self._emit(seq, row) for seq in emitted)
        self.steps.append(row)
        self.now = row.end_ns
        return row

    def _emit(self, seq: _Seq, row: StepRecord) -> bool:
        record = seq.record
        record.output_tokens += 1
        if record.first_token_ns is None:
            record.first_token_ns = row.emitted_ns
        if record.output_tokens < seq.target:
            return False
        record.finished_ns, record.finish_reason = row.emitted_ns, "length"
        self.running.remove(seq)
        return True

    def new(self, tokens: int, output_tokens: int, arrival_ns: int) -> _Seq:
        record = RequestRecord(len(self.requests), arrival_ns, tokens, queued_ns=self.now)
        record.cached_tokens = 0
        self.requests.append(record)
        return _Seq(record, output_tokens, 0)

    def join(self, p: Prefill, phases: Mapping[str, int]) -> None:
        back = self.steps[-1 - p.late_by] if len(self.steps) > p.late_by else None
        arrival = (back.begin_ns + back.end_ns) // 2 if back else 0
        seq = self.new(p.tokens, p.output_tokens, arrival)
        sizes = [p.tokens // p.chunks] * p.chunks
        sizes[-1] += p.tokens - sum(sizes)
        done = 0
        for tokens in sizes:
            extra = tokens * PREFILL_NS_PER_TOKEN if p.forward_ns is None else p.forward_ns
            last = done + tokens == p.tokens
            chunk = [(seq, tokens, done, last)]
            self._prefill_step(chunk, p.mixed, phases, extra)
            done += tokens

    def _prefill_step(
        self,
        chunk: list[tuple[_Seq, int, int, bool]],
        mixed: bool,
        phases: Mapping[str, int],
        extra: int,
        recompute: bool = False,
    ) -> None:
        mixed = mixed and bool(self.running)
        base = phases["forward"] if mixed else 0
        gather = phases["gather"] if mixed else 0
        took = {**phases, "forward": base + extra, "gather": gather}
        self.step(list(self.running) if mixed else [], chunk, took, recompute)


def make_run(
    decode_steps: int = 60,
    batch: int = 4,
    prompt_tokens: int = 128,
    phases: Mapping[str, int] | None = None,
    phases_at: Callable[[int], Mapping[str, int]] | None = None,
    prefills: Sequence[Prefill] = (),
    preemptions: Sequence[Preemption] = (),
    idle: Sequence[tuple[int, int]] = (),
    gc: Sequence[tuple[int, int]] = (),
    noise: Sequence[tuple[int, int]] = (),
    warmup: int = 2,
    output_tokens: int | None = None,
    cpu_share: float = 0.98,
    kv_pages: int = 4096,
    spec: ModelSpec | None = None,
    ceilings: Ceilings | str | None = "default",
    slo: Mapping[str, float] | None = None,
    label: str = "chunked",
    complete: bool = True,
    interrupted: bool = False,
    **meta: Any,
) -> Run:
    """A consistent Run. Positions (`at`, idle, gc, noise) count decode iterations from 0.

    phases: ns of the phases of a decode step (given ones replace DECODE_PHASES).
    phases_at: the same per decode iteration, applied on top.
    idle: (iteration, ns) inserts a row of kind idle before it.
    gc, noise: (iteration, ns) lengthens `other` (gc) or `forward` (noise) and adds the event.
    output_tokens: of the initial requests; None lets them run through every decode iteration.
    interrupted: the initial requests have no finish, as after ctrl-c.
    ceilings: None = never measured.
    """
    base = {**DECODE_PHASES, **(phases or {})}

    def at(i: int) -> dict[str, int]:
        return {**base, **(phases_at(i) if phases_at else {})}

    b = _Builder(at, cpu_share, warmup, kv_pages)
    forever = 10**9
    first = [
        b.new(prompt_tokens, output_tokens if output_tokens is not None else forever, 0)
        for _ in range(batch)
    ]
    if first:
        chunk = [(s, prompt_tokens, 0, True) for s in first]
        b._prefill_step(chunk, False, base, batch * prompt_tokens * PREFILL_NS_PER_TOKEN)
    events: list[Event] = []
    gone: dict[int, list[_Seq]] = {}
    for i in range(decode_steps):
        _decode_iteration(b, i, at(i), prefills, preemptions, idle, gc, noise, events, gone)
    if not interrupted:
        _finish(b)
    return Run(
        make_meta(
            len(b.requests),
            b.kv_pages,
            label,
            spec,
            ceilings,
            slo,
            complete and not interrupted,
            meta,
        ),
        b.steps,
        b.requests,
        b.parts,
        events,
    )


def _decode_iteration(
    b: _Builder,
    i: int,
    phases: dict[str, int],
    prefills: Sequence[Prefill],
    preemptions: Sequence[Preemption],
    idle: Sequence[tuple[int, int]],
    gc: Sequence[tuple[int, int]],
    noise: Sequence[tuple[int, int]],
    events: list[Event],
    gone: dict[int, list[_Seq]],
) -> None:
    for _, ns in (p for p in idle if p[0] == i):
        b.idle(ns)
    preempted = 0
    for p in (p for p in preemptions if p.at == i):
        seq = b.running.pop()
        seq.record.preemptions += 1
        gone.setdefault(p.back_at, []).append(seq)
        events.append(Event(b.now, b.now, "preempt", seq.record.id, "no free page"))
        preempted += 1
    used_iteration = False
    for p in (p for p in preemptions if p.back_at == i):
        seq = gone[i].pop(0)
        seq.record.recomputed_tokens += seq.context
        extra = seq.context * PREFILL_NS_PER_TOKEN if p.forward_ns is None else p.forward_ns
        chunk = [(seq, seq.context, 0, True)]
        b._prefill_step(chunk, p.mixed, phases, extra, recompute=True)
        used_iteration |= p.mixed
    for p in (p for p in prefills if p.at == i):
        used_iteration |= p.mixed and bool(b.running)
        b.join(p, phases)
    for kind, rows, phase in (("gc", gc, "other"), ("noise", noise, "forward")):
        for _, ns in (g for g in rows if g[0] == i):
            phases[phase] += ns
            begin = b.now + sum(phases.values()) - phases["other"]
            begin = begin if kind == "gc" else b.now + phases["recv"]
            detail = "generation 2" if kind == "gc" else "1.9 of 2 cores taken"
            events.append(Event(begin, begin + ns, kind, None, detail))
    if b.running and not used_iteration:
        waiting = sum(len(v) for v in gone.values())
        b.step(list(b.running), [], phases, waiting=waiting, preempted=preempted)


def _finish(b: _Builder) -> None:
    """Those still running reached their length with the last step that ran."""
    for seq in b.running:
        last = b.steps[b.open_parts[seq.record.id].last_step]
        seq.record.finished_ns, seq.record.finish_reason = last.emitted_ns, "length"
        last.num_finished = (last.num_finished or 0) + 1
