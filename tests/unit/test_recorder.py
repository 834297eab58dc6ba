"""Laps become rows, slices become parts; nothing is lost and nothing is invented."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.policies import POLICIES
from stepscope.engine.recorder import Recorder, cost_per_step_ns
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.records import (
    COMMIT,
    EMIT,
    FORWARD,
    GATHER,
    OTHER,
    PHASES,
    RECV,
    Part,
    PartKind,
    StepRecord,
)
from tests.engine.harness import Clock, Outcome, ask, run


def phases(row: StepRecord) -> dict[str, int]:
    """The phases that took time."""
    spent = {name: row.phase_ns(name) for name in PHASES}
    return {name: ns for name, ns in spent.items() if ns}


def step(recorder: Recorder, *pieces: tuple[Request, PartKind, int, bool]) -> StepRecord:
    """One step computing these slices: request, kind, count, samples?"""
    slices = [Slice(r, 0, n, kind, samples) for r, kind, n, samples in pieces]
    plan = StepPlan(
        decodes=[s for s in slices if s.kind == "decode"],
        prefills=[s for s in slices if s.kind != "decode"],
    )
    return recorder.end_step(plan, sum(s.samples for s in slices))


def parts(recorder: Recorder) -> list[tuple[str, int, int, int, int]]:
    recorder.end_all()
    return [
        (p.kind, p.first_step, p.last_step, p.tokens_per_step, p.output_tokens)
        for p in recorder.drain()[1]
    ]


# ------------------------------------------------------------------ laps


def test_a_lap_gives_the_time_since_the_last_mark_to_one_phase() -> None:
    clock = Clock()
    recorder = Recorder(clock.now)
    for phase, ns in ((RECV, 5), (FORWARD, 100), (GATHER, 30), (FORWARD, 200), (COMMIT, 7)):
        clock.ns += ns
        recorder.lap(phase)
    clock.ns += 11
    row = recorder.end_idle()
    assert phases(row) == {"recv": 5, "gather": 30, "forward": 300, "commit": 7, "other": 11}
    assert (row.begin_ns, row.end_ns) == (0, 353)


def test_the_next_row_begins_where_this_one_ends() -> None:
    clock = Clock()
    recorder = Recorder(clock.now)
    clock.ns = 40
    first = recorder.end_idle()
    clock.ns = 50  # nobody laps: what happens between rows is the next one's `other`
    second = recorder.end_idle()
    assert (first.end_ns, second.begin_ns, second.end_ns) == (40, 40, 50)
    assert phases(second) == {"other": 10}
    assert (first.step, second.step) == (0, 1)


@given(st.lists(st.lists(st.tuples(st.integers(0, OTHER), st.integers(0, 10**12))), min_size=1))
def test_phases_sum_to_the_wall_time(iterations: list[list[tuple[int, int]]]) -> None:
    clock = Clock(tick=3)
    recorder = Recorder(clock.now)
    rows = []
    for laps in iterations:
        for phase, ns in laps:
            clock.ns += ns
            recorder.lap(phase)
        rows.append(recorder.end_idle())
    for row in rows:
        assert sum(row.phase_ns(name) or 0 for name in PHASES) == row.wall_ns
    assert [r.begin_ns for r in rows[1:]] == [r.end_ns for r in rows[:-1]]


def test_tokens_are_out_at_the_last_mark_before_the_row_is_closed() -> None:
    clock = Clock()
    recorder = Recorder(clock.now)
    clock.ns = 70
    recorder.lap(EMIT)
    clock.ns = 90
    row = step(recorder, (ask(0, 4), "prefill", 4, True))
    assert (row.emitted_ns, row.end_ns, row.other_ns) == (70, 90, 20)


def test_warmup_rows_are_marked() -> None:
    recorder = Recorder(Clock().now, warmup_steps=2)
    assert [recorder.end_idle().warmup for _ in range(4)] == [1, 1, 0, 0]


def test_what_was_not_observed_is_none() -> None:
    recorder = Recorder(Clock().now)
    idle = recorder.end_idle()
    for name in ("emitted_ns", "result_step", "num_output_tokens", "sum_prefill_tokens"):
        assert getattr(idle, name) is None
    row = step(recorder, (ask(0, 4), "decode", 1, True))
    for name in ("dev_begin_ns", "num_launches", "sm_clock_mhz", "kv_gather_bytes", "graph"):
        assert getattr(row, name) is None


def test_drained_rows_are_not_given_twice() -> None:
    recorder = Recorder(Clock().now)
    recorder.end_idle()
    recorder.event("preempt", 3)
    assert [len(rows) for rows in recorder.drain()] == [1, 0, 1]
    assert [len(rows) for rows in recorder.drain()] == [0, 0, 0]


# ------------------------------------------------------------------ what a step did


def test_a_mixed_step_is_described_exactly() -> None:
    recorder = Recorder(Clock().now)
    a, b, c = ask(0, 9), ask(1, 9), ask(2, 9)
    plan = StepPlan(
        decodes=[Slice(a, 20, 1, "decode", True)],
        prefills=[
            Slice(b, 5, 4, "prefill", False),
            Slice(c, 0, 7, "recompute", True, recomputed=6),
        ],
        admitted=1,
        preempted=2,
        blocked_decodes=3,
        running=4,
        waiting=5,
        used_pages=6,
        gather_bytes=4096,
    )
    row = recorder.end_step(plan, 2)
    assert (row.kind, row.result_step) == ("mixed", 0)
    assert (row.num_decode_requests, row.sum_decode_kv_tokens) == (1, 21)
    assert (row.num_prefill_requests, row.sum_prefill_tokens) == (2, 11)
    assert (row.sum_prefill_kv_tokens, row.recompute_tokens) == (5, 6)
    assert (row.num_output_tokens, row.kv_gather_bytes) == (2, 4096)
    assert (row.num_admitted, row.num_preempted, row.num_blocked_decodes) == (1, 2, 3)
    assert (row.num_running, row.num_waiting, row.kv_used_pages) == (4, 5, 6)


@pytest.mark.parametrize("kind,name", [("decode", "decode"), ("prefill", "prefill")])
def test_the_kind_of_a_step(kind: PartKind, name: str) -> None:
    assert step(Recorder(Clock().now), (ask(0, 4), kind, 1, True)).kind == name


# ------------------------------------------------------------------ parts


def test_equal_steps_are_one_part() -> None:
    recorder, a = Recorder(Clock().now), ask(0, 4)
    for _ in range(5):
        step(recorder, (a, "decode", 1, True))
    assert parts(recorder) == [("decode", 0, 4, 1, 5)]


def test_a_change_of_kind_or_of_tokens_begins_a_part() -> None:
    recorder, a = Recorder(Clock().now), ask(0, 4)
    steps: Sequence[tuple[PartKind, int, bool]] = [
        ("prefill", 8, False),
        ("prefill", 8, False),
        ("prefill", 3, True),
        ("decode", 1, True),
        ("recompute", 3, False),
        ("recompute", 2, True),
        ("decode", 1, True),
    ]
    for kind, count, samples in steps:
        step(recorder, (a, kind, count, samples))
    assert parts(recorder) == [
        ("prefill", 0, 1, 8, 0),
        ("prefill", 2, 2, 3, 1),
        ("decode", 3, 3, 1, 1),
        ("recompute", 4, 4, 3, 0),
        ("recompute", 5, 5, 2, 1),
        ("decode", 6, 6, 1, 1),
    ]


def test_a_step_without_the_request_begins_a_part() -> None:
    recorder, a, b = Recorder(Clock().now), ask(0, 4), ask(1, 4)
    step(recorder, (a, "decode", 1, True))
    step(recorder, (b, "prefill", 4, True))
    step(recorder, (a, "decode", 1, True), (b, "decode", 1, True))
    recorder.end_idle()
    step(recorder, (a, "decode", 1, True))
    recorder.end_all()
    own = [(p.first_step, p.last_step) for p in recorder.drain()[1] if p.request == 0]
    assert own == [(0, 0), (2, 2), (4, 4)]


def test_a_part_is_out_when_its_request_ends_or_the_next_one_begins() -> None:
    recorder, a, b = Recorder(Clock().now), ask(0, 4), ask(1, 4)
    step(recorder, (a, "prefill", 4, True), (b, "prefill", 4, True))
    assert recorder.drain()[1] == []
    step(recorder, (a, "decode", 1, True), (b, "decode", 1, True))
    assert [p.request for p in recorder.drain()[1]] == [0, 1]
    recorder.end_request(0)
    recorder.end_request(0)
    assert recorder.drain()[1] == [Part(0, "decode", 1, 1, 1, 1)]


def by_request(done: Outcome) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = defaultdict(list)
    for part in sorted(done.parts, key=lambda p: p.first_step):
        found[part.request].append(part)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(POLICIES)),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 15)), min_size=1, max_size=6),
    st.integers(12, 30),
    st.integers(1, 12),
)
def test_parts_hold_every_token_of_a_run(
    policy: str, asked: list[tuple[int, int]], pages: int, chunk: int
) -> None:
    """Computed tokens, recomputed ones included, and outputs; no two parts overlap."""
    done = run(
        [ask(i, p, m, arrival_ns=50 * i) for i, (p, m) in enumerate(asked)],
        policy,
        pages=pages,
        page_size=4,
        limits=Limits(max_seqs=4, token_budget=2 * chunk, chunk=chunk),
    )
    computed: dict[int, int] = defaultdict(int)
    for pieces in done.scheduler.slices:
        for request, _, _, count in pieces:
            computed[request] += count
    found = by_request(done)
    for id, record in done.records.items():
        own = found[id]
        assert (
            sum((p.last_step - p.first_step + 1) * p.tokens_per_step for p in own) == computed[id]
        )
        assert sum(p.output_tokens for p in own) == record.output_tokens
        again = record.recomputed_tokens
        if record.output_tokens:
            assert computed[id] - again == record.prompt_tokens + record.output_tokens - 1
        assert all(b.first_step > a.last_step for a, b in pairwise(own))
        for part in own:
            if part.kind == "decode":
                assert part.tokens_per_step == 1
                assert part.output_tokens == part.last_step - part.first_step + 1
            else:
                assert part.output_tokens <= 1
    assert sum(computed.values()) == sum(
        (row.sum_prefill_tokens or 0) + (row.num_decode_requests or 0) for row in done.work
    )


def test_recording_costs_next_to_nothing_to_ask() -> None:
    assert cost_per_step_ns(30, steps=5) > 0
