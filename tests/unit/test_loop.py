"""The loop on a clock that only the test moves: rows, stamps, arrivals, interruption."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.loop import IDLE_SLICE_NS, Output
from stepscope.engine.plan import Lap, StepPlan
from stepscope.engine.policies import POLICIES
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.records import FORWARD, GATHER, PHASES, StepRecord
from tests.engine.harness import Clock, ContentRunner, Outcome, alone, ask, build, finish, run

# What each stage of the charged engine takes. No two sums of them are equal.
COST = {
    "recv": 1,
    "schedule": 2,
    "prepare": 4,
    "gather": 8,
    "forward": 16,
    "sample": 32,
    "d2h_wait": 64,
    "commit": 128,
    "detok": 256,  # per token
    "emit": 4096,
    "other": 8192,  # between two rows
}


class ChargedRunner(ContentRunner):
    """Two layers: gather and forward alternate twice."""

    def __init__(self, page_size: int, clock: Clock) -> None:
        super().__init__(page_size)
        self.clock = clock

    def prepare(self, plan: StepPlan) -> StepPlan:
        self.clock.ns += COST["prepare"]
        return super().prepare(plan)

    def forward(self, batch: StepPlan, lap: Lap) -> list[list[int]]:
        for _ in range(2):
            self.clock.ns += COST["forward"] // 2
            lap(FORWARD)
            self.clock.ns += COST["gather"] // 2
            lap(GATHER)
        return [self._tokens(s) for s in batch.slices if s.samples]

    def sample(self, logits: list[list[int]], batch: StepPlan) -> list[int]:
        self.clock.ns += COST["sample"]
        return super().sample(logits, batch)

    def fetch(self, sampled: list[int]) -> list[int]:
        self.clock.ns += COST["d2h_wait"]
        return sampled


def charged(requests: list[Request], policy: str = "chunked", **options: Any) -> Outcome:
    """An engine whose every stage takes a known time."""
    clock = Clock()
    made = build(requests, policy, runner=ChargedRunner(16, clock), clock=clock, **options)
    engine, scheduler = made.engine, made.scheduler
    charge(clock, engine.inbox, "poll", "recv")
    charge(clock, scheduler, "schedule", "schedule")
    charge(clock, scheduler, "commit", "commit")
    charge(clock, engine.text, "push", "detok")
    charge(clock, engine, "emit", "emit")
    charge(clock, engine, "on_step", "other")
    return made


def charge(clock: Clock, owner: Any, name: str, phase: str) -> None:
    inner = getattr(owner, name)

    def timed(*args: Any) -> Any:
        result = inner(*args)
        clock.ns += COST[phase]
        return result

    setattr(owner, name, timed)


def check_rows(rows: Sequence[StepRecord]) -> None:
    """Exclusive and contiguous: the sum is the wall time, and no time lies between rows."""
    assert [r.step for r in rows] == list(range(len(rows)))
    for row in rows:
        spent = [row.phase_ns(name) for name in PHASES]
        assert all(ns is not None and ns >= 0 for ns in spent)
        assert sum(ns or 0 for ns in spent) == row.end_ns - row.begin_ns
    for before, after in pairwise(rows):
        assert after.begin_ns == before.end_ns


# ------------------------------------------------------------------ phases


def test_every_phase_gets_its_own_time_and_nothing_else() -> None:
    done = finish(charged([ask(0, 4, 3), ask(1, 4, 3)]))
    check_rows(done.steps)
    assert len(done.steps) == 3
    for row in done.steps:
        expected = {**COST, "detok": 2 * COST["detok"]}
        expected["other"] = COST["other"] if row.step else 0
        assert {name: row.phase_ns(name) for name in PHASES} == expected


def test_an_idle_row_waits_in_recv() -> None:
    done = finish(charged([ask(0, 4, 1, arrival_ns=10**9)]))
    idle, first = done.steps
    assert (idle.kind, first.kind) == ("idle", "prefill")
    assert idle.recv_ns == 10**9 - COST["schedule"] and idle.schedule_ns == COST["schedule"]
    assert (idle.end_ns, first.begin_ns) == (10**9, 10**9)
    assert idle.emitted_ns is None and idle.num_output_tokens is None


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_are_contiguous_through_idling_preemption_and_failure(policy: str) -> None:
    asked = [ask(i, 9, 25, arrival_ns=i * 90_000) for i in range(4)]
    asked += [ask(8, 200), ask(9, 0)]
    done = finish(charged(asked, policy, pages=4, limits=Limits(max_seqs=3)))
    check_rows(done.steps)
    assert {r.kind for r in done.steps} >= {"prefill", "decode"}


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.integers(1, 9),
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2_000)), min_size=1, max_size=6),
)
def test_phases_sum_whatever_happens(policy: str, tick: int, asked: list[tuple[int, int]]) -> None:
    requests = [ask(i, p, 10, arrival_ns=a) for i, (p, a) in enumerate(asked)]
    done = run(requests, policy, pages=12, page_size=4, clock=Clock(tick))
    check_rows(done.steps)
    check_stamps(done)


# ------------------------------------------------------------------ stamps


def check_stamps(done: Outcome) -> None:
    """Each request's life in order, and each stamp the one of its row."""
    emitted = {row.emitted_ns for row in done.work}
    begins = {row.begin_ns for row in done.work}
    for record in done.records.values():
        assert record.queued_ns is not None and record.finished_ns is not None
        assert record.arrival_ns <= record.queued_ns <= record.finished_ns
        if record.admitted_ns is None:
            assert record.finish_reason == "error" and record.output_tokens == 0
            continue
        assert record.queued_ns <= record.admitted_ns
        assert record.admitted_ns in begins or record.admitted_ns == record.queued_ns
        if record.output_tokens:
            assert record.first_token_ns in emitted
            assert record.admitted_ns <= (record.first_token_ns or 0) <= record.finished_ns
            if record.error is None:
                assert record.finished_ns in emitted


def test_stamps_of_one_request() -> None:
    done = finish(charged([ask(0, 4, 3, arrival_ns=10**6)]))
    idle, first, _, last = done.steps
    record = done.records[0]
    assert record.queued_ns == idle.end_ns + COST["other"]
    assert record.admitted_ns == record.queued_ns, "admitted, but not before it was seen"
    assert record.first_token_ns == first.emitted_ns
    assert record.finished_ns == last.emitted_ns


def test_emitted_is_when_emit_returned_and_not_the_end_of_the_row() -> None:
    made = charged([ask(0, 4, 2)])
    clock, told = made.engine.clock, []
    inner = made.engine.emit

    def emit(outputs: Sequence[Output]) -> None:
        inner(outputs)
        told.append(clock.now())

    made.engine.emit = emit
    close = made.engine.recorder.end_iteration
    charge(clock, made.engine.recorder, "end_request", "other")  # type: ignore[arg-type]

    def slow_close(*args: Any) -> StepRecord:
        clock.ns += 5  # type: ignore[attr-defined]
        return close(*args)

    made.engine.recorder.end_iteration = slow_close  # type: ignore[assignment,method-assign]
    done = finish(made)
    assert [row.emitted_ns for row in done.steps] == told
    assert [row.end_ns - (row.emitted_ns or 0) for row in done.steps] == [5, 5]
    assert done.records[0].finished_ns == done.steps[-1].emitted_ns


def test_a_request_of_one_token_ends_when_its_first_token_is_out() -> None:
    record = finish(charged([ask(0, 4, 1)])).records[0]
    assert record.first_token_ns == record.finished_ns


def test_a_request_that_waits_is_admitted_at_the_begin_of_its_step() -> None:
    done = finish(charged([ask(0, 4, 3), ask(1, 4, 1)], limits=Limits(max_seqs=1)))
    assert done.trace == ["p0:4", "d0", "d0", "p1:4"]
    assert done.records[1].admitted_ns == done.steps[3].begin_ns


def test_a_first_token_survives_preemption() -> None:
    done = run([ask(0, 7, 12), ask(1, 7, 6)], pages=4, page_size=4)
    assert done.records[1].preemptions == 1
    assert done.records[1].first_token_ns == done.steps[0].emitted_ns
    assert done.records[1].admitted_ns == done.records[1].queued_ns


def test_refused_while_idle_ends_at_once_and_not_at_the_next_arrival() -> None:
    done = finish(charged([ask(0, 0), ask(1, 4, 1, arrival_ns=10**9)]))
    assert (done.records[0].finished_ns or 0) < 10**6
    assert sum(row.kind == "idle" for row in done.steps) == 2
    assert done.steps[0].num_finished == 1


def test_out_of_pages_while_alone_ends_at_once() -> None:
    done = finish(charged([ask(0, 10, 20), ask(1, 4, 1, arrival_ns=10**9)], pages=1))
    assert done.records[0].finish_reason == "error"
    assert (done.records[0].finished_ns or 0) < 10**6


# ------------------------------------------------------------------ arrivals


def test_a_request_that_arrives_in_a_step_is_admitted_in_the_next() -> None:
    """It arrives while the second step computes."""
    alone_run = finish(charged([ask(0, 4, 6)]))
    middle = (alone_run.steps[1].emitted_ns or 0) - COST["emit"]
    done = finish(charged([ask(0, 4, 6), ask(1, 3, 2, arrival_ns=middle)]))
    assert done.trace == ["p0:4", "d0", "d0 p1:3", "d0 d1", "d0", "d0"]
    record, row = done.records[1], done.steps[2]
    assert row.begin_ns <= (record.queued_ns or 0) < row.begin_ns + COST["other"] + COST["recv"]
    assert [r.num_admitted for r in done.steps] == [1, 0, 1, 0, 0, 0]


def test_a_request_that_arrives_between_begin_and_recv_is_not_admitted_before_it_arrived() -> None:
    """What the last iteration did after its row closed belongs to this row: time passes there."""
    first = finish(charged([ask(0, 4, 6)])).steps[1]
    arrival = first.begin_ns + COST["other"] // 2
    done = finish(charged([ask(0, 4, 6), ask(1, 3, 2, arrival_ns=arrival)]))
    assert done.trace[1] == "d0 p1:3"
    record = done.records[1]
    assert record.arrival_ns <= (record.queued_ns or 0) <= (record.admitted_ns or 0)


def test_waiting_sleeps_in_slices_up_to_the_arrival() -> None:
    arrival = 2 * IDLE_SLICE_NS + 5
    clock = Clock()
    finish(build([ask(0, 4, 1, arrival_ns=arrival)], clock=clock))
    assert clock.sleeps == [IDLE_SLICE_NS, 2 * IDLE_SLICE_NS, arrival]


def test_an_engine_without_requests_does_nothing() -> None:
    done = run([])
    assert done.complete and done.steps == []


# ------------------------------------------------------------------ outputs


def test_what_is_emitted_is_the_text_in_order() -> None:
    done = run([ask(0, 4, 3), ask(1, 5, 2)])
    heard: dict[int, str] = {0: "", 1: ""}
    for outputs in done.emitted:
        for output in outputs:
            heard[output.request.id] += output.piece
    for id, text in heard.items():
        assert text == "".join(f" {t}" for t in done.outputs[id]) + ".", "flushed once, at the end"
    finished = [(o.request.id, o.finished) for outputs in done.emitted for o in outputs]
    assert finished == [(0, False), (1, False), (0, False), (1, True), (0, True)] or finished == [
        (0, False), (1, False), (1, True), (0, False), (0, True)
    ]  # fmt: skip


def test_a_step_that_samples_nothing_emits_nothing_but_has_a_row() -> None:
    done = run([ask(0, 9, 1)], limits=Limits(chunk=4))
    assert [len(outputs) for outputs in done.emitted] == [0, 0, 1]
    assert [row.num_output_tokens for row in done.steps] == [0, 0, 1]
    assert all(row.emitted_ns for row in done.steps)


def test_rows_tell_pages_queue_and_ends() -> None:
    done = run([ask(0, 16, 2), ask(1, 16, 3)], pages=10)
    assert [row.kv_used_pages for row in done.steps] == [2, 4, 2]
    assert [row.num_finished for row in done.steps] == [0, 1, 1]
    assert {row.kv_total_pages for row in done.steps} == {10}
    assert [row.num_running for row in done.steps] == [2, 2, 1]


# ------------------------------------------------------------------ interruption


def stop_at(made: Outcome, step: int) -> Outcome:
    def on_step(row: StepRecord) -> None:
        if row.step == step:
            made.engine.stopping = True

    made.engine.on_step = on_step
    return finish(made)


def test_an_interrupted_run_keeps_its_rows_and_aborts_what_runs() -> None:
    asked = [ask(0, 4, 2), ask(1, 4, 50), ask(2, 4, 50), ask(3, 4, arrival_ns=10**9)]
    done = stop_at(build(asked, limits=Limits(max_seqs=2)), 5)
    assert not done.complete and len(done.steps) == 6
    check_rows(done.steps)
    reasons = {i: r.finish_reason for i, r in done.records.items()}
    assert reasons == {0: "length", 1: "aborted", 2: "aborted", 3: None}
    assert done.outputs[1] == alone(ask(1, 4).tokens, 6)
    assert done.records[1].error is None and done.records[1].finished_ns == done.steps[-1].end_ns
    last = max(p.last_step for p in done.parts if p.request == 1)
    assert last == 5, "the open part is written"
    assert done.scheduler.pool.used == 0


def test_requests_still_queued_are_aborted_too() -> None:
    done = stop_at(build([ask(0, 4, 50), ask(1, 4)], limits=Limits(max_seqs=1)), 2)
    assert done.records[1].finish_reason == "aborted" and done.records[1].admitted_ns is None


def test_a_second_abort_changes_nothing() -> None:
    done = stop_at(build([ask(0, 4, 50)]), 2)
    before = done.records[0].finished_ns
    done.engine.abort()
    assert done.records[0].finished_ns == before
    assert done.engine.recorder.drain() == ([], [], [])


def test_an_interrupt_ends_the_wait_for_an_arrival() -> None:
    clock = Clock()
    made = build([ask(0, 4, arrival_ns=3600 * 10**9)], clock=clock)
    sleep = clock.sleep_until

    def interrupted(ns: int) -> None:
        sleep(ns)
        made.engine.stopping = len(clock.sleeps) == 3

    clock.sleep_until = interrupted  # type: ignore[method-assign]
    done = finish(made)
    assert not done.complete and len(clock.sleeps) == 3
    assert [row.kind for row in done.steps] == ["idle"]


def test_stopping_before_the_start_runs_nothing() -> None:
    made = build([ask(0, 4)])
    made.engine.stopping = True
    done = finish(made)
    assert (done.complete, done.steps) == (False, [])


def test_an_error_in_a_client_leaves_a_state_that_abort_can_end() -> None:
    made = build([ask(0, 4, 50)])
    calls: list[int] = []

    def emit(outputs: Sequence[Output]) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    made.engine.emit = emit
    with pytest.raises(KeyboardInterrupt):
        made.engine.run()
    made.engine.abort()
    steps, parts, _ = made.engine.recorder.drain()
    assert len(steps) == 2 and sum(p.output_tokens for p in parts) == 2
    assert made.records[0].finish_reason == "aborted" and made.scheduler.pool.used == 0
