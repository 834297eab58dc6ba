"""The recorder: lap marks become step records. It observes; it never decides.

A lap gives the time since the last mark to one phase, so phases are exclusive and contiguous by
construction: they sum to the step's wall time, and what nobody claims is `other`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from stepscope.engine.plan import Slice, StepPlan
from stepscope.records import (
    FORWARD,
    GATHER,
    OTHER,
    PHASES,
    Event,
    Part,
    StepKind,
    StepRecord,
)


class Recorder:
    """Rows wait in `steps`, `parts` and `events` until they are drained."""

    def __init__(self, now: Callable[[], int], warmup_steps: int = 0) -> None:
        self._now = now
        self._warmup = warmup_steps
        self._spent = [0] * len(PHASES)
        self._open: dict[int, Part] = {}
        self.step = 0
        self.steps: list[StepRecord] = []
        self.parts: list[Part] = []
        self.events: list[Event] = []
        self.begin_ns = self.mark = now()
        self._cpu = time.thread_time_ns()

    def lap(self, phase: int) -> None:
        now = self._now()
        self._spent[phase] += now - self.mark
        self.mark = now

    def event(
        self, kind: str, request: int | None = None, detail: str = "", begin_ns: int | None = None
    ) -> None:
        """Ends at the last mark, where it also began if begin_ns is not given."""
        begin = self.mark if begin_ns is None else begin_ns
        self.events.append(Event(begin, self.mark, kind, request, detail))

    def end_idle(self) -> StepRecord:
        """Close an iteration that computed nothing: it waited for arrivals."""
        return self._close("idle")

    def end_step(self, plan: StepPlan, output_tokens: int, gather_bytes: int | None) -> StepRecord:
        """Close an iteration that computed `plan`; its tokens were out at the last mark."""
        for piece in plan.slices:
            self._extend_part(piece)
        emitted = self.mark
        decodes, prefills = plan.decodes, plan.prefills
        row = self._close("decode" if not prefills else "mixed" if decodes else "prefill")
        row.emitted_ns = emitted
        row.result_step = row.step
        row.num_prefill_requests = len(prefills)
        row.sum_prefill_tokens = sum(s.count for s in prefills)
        row.sum_prefill_kv_tokens = sum(s.start for s in prefills)
        row.num_decode_requests = len(decodes)
        row.sum_decode_kv_tokens = sum(s.context for s in decodes)
        row.recompute_tokens = sum(s.recomputed for s in prefills)
        row.expert_reads = plan.expert_reads
        row.num_output_tokens = output_tokens
        row.num_admitted = plan.admitted
        row.num_preempted = plan.preempted
        row.num_blocked_decodes = plan.blocked_decodes
        row.num_running = plan.running
        row.num_waiting = plan.waiting
        row.kv_used_pages = plan.used_pages
        row.prefix_hit_tokens = plan.prefix_hit_tokens
        row.evicted_pages = plan.evicted_pages
        row.swapped_pages = plan.swapped_pages
        row.swap_ns = plan.swap_ns
        row.kv_gather_bytes = gather_bytes
        if gather_bytes is None and not row.gather_ns:
            row.gather_ns = None  # there was no such phase
        return row

    def end_request(self, request: int) -> None:
        """The request ended: its last part is complete."""
        part = self._open.pop(request, None)
        if part is not None:
            self.parts.append(part)

    def end_all(self) -> None:
        for request in list(self._open):
            self.end_request(request)

    def drain(self) -> tuple[list[StepRecord], list[Part], list[Event]]:
        rows = self.steps, self.parts, self.events
        self.steps, self.parts, self.events = [], [], []
        return rows

    def _close(self, kind: StepKind) -> StepRecord:
        cpu = time.thread_time_ns()
        self.lap(OTHER)
        row = StepRecord(self.step, kind, self.begin_ns, self.mark)
        for name, ns in zip(PHASES, self._spent, strict=True):
            setattr(row, f"{name}_ns", ns)
        row.host_cpu_ns = cpu - self._cpu
        row.warmup = int(self.step < self._warmup)
        self.steps.append(row)
        self._spent = [0] * len(PHASES)
        self.begin_ns, self._cpu = self.mark, cpu
        self.step += 1
        return row

    def _extend_part(self, piece: Slice) -> None:
        request = piece.request.id
        part = self._open.get(request)
        if (
            part is not None
            and part.last_step == self.step - 1
            and part.kind == piece.kind
            and part.tokens_per_step == piece.count
        ):
            part.last_step = self.step
            part.output_tokens += piece.samples
            return
        if part is not None:
            self.parts.append(part)
        self._open[request] = Part(
            request, piece.kind, self.step, self.step, piece.count, int(piece.samples)
        )


def cost_per_step_ns(layers: int, steps: int = 200) -> float:
    """What recording itself takes: the laps of a step and its row, on an empty step."""
    recorder = Recorder(time.monotonic_ns)
    begin = time.perf_counter_ns()
    for _ in range(steps):
        for phase in range(len(PHASES) - 1):
            recorder.lap(phase)
        for _ in range(layers):
            recorder.lap(FORWARD)
            recorder.lap(GATHER)
        recorder.end_step(StepPlan(), 0, None)
    return (time.perf_counter_ns() - begin) / steps
