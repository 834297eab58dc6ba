"""The recorder: lap marks become step records. It observes; it never decides.

A lap gives the time since the last mark to one phase, so phases are exclusive and contiguous by
construction: they sum to the step's wall time, and what nobody claims is `other`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from stepscope.engine.plan import DeviceSpans, Flight, Slice, StepPlan
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
        self._waiting: deque[tuple[StepRecord, DeviceSpans]] = deque()
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

    def end_step(self, plan: StepPlan, output_tokens: int) -> StepRecord:
        """Close an iteration that computed `plan`; its tokens were out at the last mark."""
        landed = Flight(self.step, plan, None, None, self.mark)
        return self.end_iteration(plan, landed, output_tokens)

    def end_iteration(
        self, plan: StepPlan, landed: Flight | None, output_tokens: int
    ) -> StepRecord:
        """Close an iteration that launched `plan` (empty: nothing) and gave out what has landed.

        Parts are told when their tokens are known, so those of a step in flight are not yet.
        """
        if landed is not None:
            for piece in landed.plan.slices:
                if not piece.extra:
                    self._extend_part(piece, landed.step)
        row = self._close(plan.kind)
        if landed is not None:
            row.emitted_ns, row.result_step = landed.emitted_ns, landed.step
            row.num_output_tokens = output_tokens
        if plan.slices:
            self._tell(row, plan)
            overlapped = landed is None or landed.step != row.step
            row.num_extra_tokens = plan.extra_tokens if overlapped else None
        return row

    def _tell(self, row: StepRecord, plan: StepPlan) -> None:
        """What was launched, and the queue and the memory that it was launched with."""
        decodes, prefills = plan.decodes, plan.prefills
        if plan.spans is not None:
            self._waiting.append((row, plan.spans))
        row.num_prefill_requests = len(prefills)
        row.sum_prefill_tokens = sum(s.count for s in prefills)
        row.sum_prefill_kv_tokens = sum(s.start for s in prefills)
        row.num_decode_requests = len(decodes)
        row.sum_decode_kv_tokens = sum(s.context for s in decodes)
        row.recompute_tokens = sum(s.recomputed for s in prefills)
        row.expert_reads = plan.expert_reads
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
        row.kv_gather_bytes = plan.gather_bytes
        row.graph, row.graph_hit = plan.graph, plan.graph_hit
        row.padded_batch = plan.padded_batch
        row.num_launches, row.num_syncs = plan.launches, plan.syncs
        if plan.gather_bytes is None and not row.gather_ns:
            row.gather_ns = None  # there was no such phase

    def end_request(self, request: int) -> None:
        """The request ended: its last part is complete."""
        part = self._open.pop(request, None)
        if part is not None:
            self.parts.append(part)

    def end_all(self) -> None:
        for request in list(self._open):
            self.end_request(request)

    def drain(self, final: bool = True) -> tuple[list[StepRecord], list[Part], list[Event]]:
        """final: also rows whose device times are not known yet, as soon as they are."""
        self._read_device(final)
        first = self._waiting[0][0].step if self._waiting else self.step
        ready = [row for row in self.steps if row.step < first]
        rows = ready, self.parts, self.events
        self.steps, self.parts, self.events = self.steps[len(ready) :], [], []
        return rows

    def _read_device(self, wait: bool) -> None:
        """Device times come a step or more later, in order. Without any, a last row has none."""
        while self._waiting:
            row, spans = self._waiting[0]
            if not spans.read(row, wait) and not wait:
                return
            self._waiting.popleft()

    def _close(self, kind: StepKind) -> StepRecord:
        cpu = time.thread_time_ns()
        self.lap(OTHER)
        row = StepRecord(self.step, kind, self.begin_ns, self.mark)
        for name, ns in zip(PHASES, self._spent, strict=True):
            setattr(row, f"{name}_ns", ns)
        row.host_cpu_ns = cpu - self._cpu
        row.warmup = int(self.step < self._warmup)
        self._read_device(wait=False)
        self.steps.append(row)
        self._spent = [0] * len(PHASES)
        self.begin_ns, self._cpu = self.mark, cpu
        self.step += 1
        return row

    def _extend_part(self, piece: Slice, step: int) -> None:
        request = piece.request.id
        part = self._open.get(request)
        if (
            part is not None
            and part.last_step == step - 1
            and part.kind == piece.kind
            and part.tokens_per_step == piece.count
        ):
            part.last_step = step
            part.output_tokens += piece.samples
            return
        if part is not None:
            self.parts.append(part)
        self._open[request] = Part(request, piece.kind, step, step, piece.count, int(piece.samples))


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
        recorder.end_step(StepPlan(), 0)
    return (time.perf_counter_ns() - begin) / steps
