"""The loop. One call of `Engine.step` is one trip of a token through the engine:

recv -> schedule -> prepare -> gather -> forward -> sample -> d2h_wait -> commit -> detok -> emit

With `overlap` the tokens that it waits for, commits and emits are those of the step before, so that
the host schedules a step while the device still computes the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from stepscope.engine.plan import Clock, Flight, Runner, StepPlan
from stepscope.engine.recorder import Recorder
from stepscope.engine.request import Request, TokenLogprobs
from stepscope.engine.scheduler import Scheduler
from stepscope.engine.stops import StopText
from stepscope.records import (
    COMMIT,
    D2H_WAIT,
    DETOK,
    EMIT,
    OTHER,
    PREPARE,
    RECV,
    SAMPLE,
    SCHEDULE,
    StepRecord,
)
from stepscope.text import plural

IDLE_SLICE_NS = 20_000_000  # an interrupt is noticed within one slice


class Inbox(Protocol):
    """Where requests come from: a workload being replayed, or a client."""

    def poll(self, now_ns: int) -> list[Request]:
        """Requests that have arrived by now, tokenized."""

    def next_arrival(self) -> int | None:
        """When the next one arrives, None if there will be none."""


class Text(Protocol):
    """Token ids become text, request by request."""

    def push(self, request: int, token: int) -> str: ...

    def flush(self, request: int) -> str: ...


@dataclass(frozen=True, slots=True)
class Output:
    """What one step gave one request."""

    request: Request
    token: int
    piece: str
    finished: bool
    logprobs: TokenLogprobs | None = None


Landed = tuple[Flight, Sequence[Request]]  # and who got a token of it


class Engine:
    """Runs requests to their end. `emit` is the client: it receives each step's outputs."""

    def __init__(
        self,
        inbox: Inbox,
        scheduler: Scheduler,
        runner: Runner,
        recorder: Recorder,
        clock: Clock,
        text: Text,
        emit: Callable[[Sequence[Output]], None],
        on_step: Callable[[StepRecord], None] = lambda row: None,
        overlap: bool = False,
    ) -> None:
        self.inbox = inbox
        self.scheduler = scheduler
        self.runner = runner
        self.recorder = recorder
        self.clock = clock
        self.text = text
        self.emit = emit
        self.on_step = on_step
        self.overlap = overlap
        self.stopping = False
        self._flight: Flight | None = None  # the step whose tokens are still on the device

    def run(self) -> bool:
        """Step until every request has ended. False if `stopping` was set before that."""
        while not self.stopping and self._work_left():
            self.step()
        if self._flight is not None:  # stopped: what is computed is still given out
            self._close(StepPlan(), *self._land(self._flight))
        self.abort()
        return not self.stopping

    def step(self) -> None:
        lap, landed = self.recorder.lap, None
        lap(OTHER)  # what the last iteration did after its row was closed
        self._receive()
        lap(RECV)
        if self._flight is not None and self.scheduler.needs_tokens:
            landed = self._land(self._flight)
        plan = self.scheduler.schedule()
        lap(SCHEDULE)
        last, launched = self._flight, self._launch(plan) if plan.slices else None
        if last is not None:
            landed = self._land(last)
        elif launched is None and landed is None:
            self._idle()
            return
        if launched is not None and not self.overlap:
            landed = self._land(launched)
        else:
            self._flight = launched
        self._close(plan, *(landed or (None, ())))

    def _launch(self, plan: StepPlan) -> Flight:
        lap, runner = self.recorder.lap, self.runner
        if plan.moves:
            self._move(plan)
        batch = runner.prepare(plan)
        lap(PREPARE)
        logits = runner.forward(batch, lap)  # gather and forward alternate, layer by layer
        sampled = runner.sample(logits, batch)
        lap(SAMPLE)
        self.scheduler.advance(plan)
        lap(COMMIT)
        return Flight(self.recorder.step, plan, batch, sampled)

    def _land(self, flight: Flight) -> Landed:
        """Its tokens reach the host, the requests and the client."""
        lap, self._flight = self.recorder.lap, None
        token_ids = self.runner.fetch(flight.sampled)
        self._take_logprobs(flight.plan, flight.batch)
        lap(D2H_WAIT)
        results = self.scheduler.commit(flight.plan, token_ids)
        lap(COMMIT)
        outputs = [self._detokenize(request, token) for request, token in results]
        lap(DETOK)
        self.emit(outputs)
        lap(EMIT)
        flight.emitted_ns = self.recorder.mark
        return flight, [request for request, _ in results]

    def _receive(self) -> None:
        now = self.scheduler.now_ns = self.clock.now()
        for request in self.inbox.poll(now):
            request.record.queued_ns = now
            if request.record.error:  # refused before it became tokens
                self.scheduler.refuse(request)
            else:
                self.scheduler.add(request)

    def _move(self, plan: StepPlan) -> None:
        """Copy KV rows, before any is written. Swapping is a part of `prepare` told apart."""
        begin = self.recorder.mark
        self.runner.move(plan.moves)
        if plan.swapped_pages:
            self.recorder.lap(PREPARE)
            plan.swap_ns = self.recorder.mark - begin
            back = sum(move.kind == "in" for move in plan.moves)
            detail = f"{plural(plan.swapped_pages - back, 'page')} out, {back} back"
            self.recorder.event("swap", None, detail, begin)

    def _take_logprobs(self, plan: StepPlan, batch: Any) -> None:
        asked = [
            s.request for s in plan.slices if s.samples and s.request.sampling.logprobs is not None
        ]
        if asked:
            for request, values in zip(asked, self.runner.logprobs(batch), strict=True):
                request.logprobs = values

    def _detokenize(self, request: Request, token: int) -> Output:
        """The text of a stop id is not shown, nor is anything from a stop string on."""
        reason = request.record.finish_reason
        piece = "" if reason == "stop" else self.text.push(request.id, token)
        if reason is not None:
            piece += self.text.flush(request.id)
        if request.stop_text is not None:
            piece = self._until_stop(request, request.stop_text, piece)
        finished = request.record.finish_reason is not None
        return Output(request, token, piece, finished, request.logprobs)

    def _until_stop(self, request: Request, watch: StopText, piece: str) -> str:
        shown = watch.push(piece, request.record.output_tokens > request.sampling.min_tokens)
        if watch.met:
            self.text.flush(request.id)
            self.scheduler.stop(request)
        elif request.record.finish_reason is not None:
            shown += watch.flush()
        return shown

    def _close(self, plan: StepPlan, landed: Flight | None, served: Sequence[Request]) -> None:
        """Stamp the requests and write the row: what this takes is `other`."""
        recorder = self.recorder
        for piece in plan.slices:
            record = piece.request.record
            if record.admitted_ns is None:  # it may have come after the row began
                record.admitted_ns = max(recorder.begin_ns, record.queued_ns or 0)
        for request in served:
            if request.record.first_token_ns is None and landed is not None:
                request.record.first_token_ns = landed.emitted_ns
        for request in self.scheduler.preempted:
            again = "swapped out" if request.host_pages else "to compute again"
            if request in self.scheduler.unswapped:
                again += ": the host has no room for its pages"
            recorder.event("preempt", request.id, f"{request.high_water} tokens {again}")
        if plan.evicted_pages:
            recorder.event("evict", None, plural(plan.evicted_pages, "cached page"))
        self._finish_row(recorder.end_iteration(plan, landed, len(served)))

    def _idle(self) -> None:
        """Nothing to compute: wait for the next arrival, in a row of kind idle."""
        scheduler = self.scheduler
        if scheduler.waiting and not scheduler.running and not scheduler.ended:
            scheduler.fail_head()
        elif not scheduler.busy and not scheduler.ended:  # what just failed ends before the wait
            self._wait_for_arrival()
        self.recorder.lap(RECV)
        self._finish_row(self.recorder.end_idle())

    def _wait_for_arrival(self) -> None:
        arrival = self.inbox.next_arrival()
        while arrival is not None and not self.stopping and self.clock.now() < arrival:
            self.clock.sleep_until(min(arrival, self.clock.now() + IDLE_SLICE_NS))

    def _finish_row(self, row: StepRecord) -> None:
        row.kv_total_pages = self.scheduler.pool.total
        row.num_finished = self._take_ended(
            row.end_ns if row.emitted_ns is None else row.emitted_ns
        )
        self.on_step(row)

    def _take_ended(self, now: int) -> int:
        ended, self.scheduler.ended = self.scheduler.ended, []
        for request in ended:
            request.record.finished_ns = now
            self.recorder.end_request(request.id)
            self.text.flush(request.id)  # one that failed still has its text open
        return len(ended)

    def _work_left(self) -> bool:
        waiting = self.scheduler.busy or self._flight is not None
        return waiting or self.inbox.next_arrival() is not None

    def abort(self) -> None:
        """End whatever has not ended; does nothing after a run that is complete."""
        self.scheduler.abort_all()
        self._take_ended(self.recorder.mark)
        self.recorder.end_all()
