"""Overlap: the tokens of a step are taken one iteration later, and nobody's text changes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.policies import POLICIES
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.records import PHASES, Part, StepRecord
from tests.engine.harness import Outcome, alone, ask, build, finish, run


def overlapped(requests: list[Request], policy: str = "chunked", **options: object) -> Outcome:
    return run(requests, policy, overlap=True, **options)  # type: ignore[arg-type]


def tokens_in(parts: list[Part]) -> dict[int, int]:
    found: dict[int, int] = {}
    for part in parts:
        found[part.request] = found.get(part.request, 0) + part.output_tokens
    return found


def launched(rows: list[StepRecord]) -> list[StepRecord]:
    return [row for row in rows if row.num_decode_requests is not None]


# ------------------------------------------------------------------ which row says what


def test_a_row_gives_out_the_tokens_of_the_step_before() -> None:
    done = overlapped([ask(0, 4, 4)])
    assert [row.result_step for row in done.steps] == [None, 0, 1, 2, 3]
    assert [row.num_output_tokens for row in done.steps] == [None, 1, 1, 1, 1]
    assert [row.kind for row in done.steps] == ["prefill", "decode", "decode", "decode", "idle"]
    assert done.steps[0].emitted_ns is None
    assert done.records[0].first_token_ns == done.steps[1].emitted_ns
    assert done.records[0].finished_ns == done.steps[4].emitted_ns


def test_a_length_that_is_known_costs_no_extra_step() -> None:
    done = overlapped([ask(0, 4, 3), ask(1, 4, 5)])
    assert done.trace == ["p0:4 p1:4", "d0 d1", "d0 d1", "d1", "d1"]
    assert sum(row.num_extra_tokens or 0 for row in done.steps) == 0
    assert not tokens_wanting(done)


def tokens_wanting(done: Outcome) -> dict[int, int]:
    """Tokens of requests that no part tells of, or the reverse."""
    told = tokens_in(done.parts)
    differences = {i: len(out) - told.get(i, 0) for i, out in done.outputs.items()}
    return {i: n for i, n in differences.items() if n}


def test_an_end_that_is_not_known_costs_one_extra_token() -> None:
    text = alone(ask(0, 4).tokens, 8)
    eos = [text[3]]
    plain = run([ask(0, 4, 8)], eos=eos)
    done = overlapped([ask(0, 4, 8)], eos=eos)
    assert done.outputs == plain.outputs == {0: text[:4]}
    assert done.records[0].finish_reason == "eos"
    assert len(done.trace) == len(plain.trace) + 1
    assert [row.num_extra_tokens for row in launched(done.steps)] == [0, 0, 0, 0, 1]
    assert [row.num_extra_tokens for row in plain.steps] == [None] * 4
    assert tokens_in(done.parts) == {0: 4} == tokens_in(plain.parts)


def test_a_stop_string_is_met_one_step_late_and_shows_nothing_more() -> None:
    text = alone(ask(0, 4).tokens, 8)
    stop = (f"{text[2]} {text[3]}",)
    plain, done = run([ask(0, 4, 8, stop=stop)]), overlapped([ask(0, 4, 8, stop=stop)])

    def shown(outcome: Outcome) -> str:
        return "".join(out.piece for outputs in outcome.emitted for out in outputs)

    assert shown(done) == shown(plain)
    assert done.records[0].finish_reason == plain.records[0].finish_reason == "stop"
    assert done.outputs == plain.outputs


def test_penalties_wait_for_the_token_they_depend_on() -> None:
    """The engine under test never grants a step whose draw needs an id it does not have."""
    both = [ask(0, 4, 6, repetition_penalty=1.5), ask(1, 4, 6)]
    done = build(both, overlap=True)
    prepare = done.engine.runner.prepare

    def checked(plan):  # type: ignore[no-untyped-def]
        for piece in plan.slices:
            assert not (piece.request.sampling.penalizes and piece.request.pending)
        return prepare(plan)

    done.engine.runner.prepare = checked  # type: ignore[method-assign]
    finish(done)
    assert {i: len(out) for i, out in done.outputs.items()} == {0: 6, 1: 6}
    assert all((row.num_output_tokens or 0) <= 2 for row in done.steps)


def test_rows_stay_contiguous_and_every_step_lands_once() -> None:
    asked = [ask(i, 9, 25, arrival_ns=i * 40) for i in range(4)]
    asked += [ask(8, 200), ask(9, 0)]
    done = overlapped(asked, pages=4, limits=Limits(max_seqs=3))
    for row in done.steps:
        assert sum(row.phase_ns(name) or 0 for name in PHASES) == row.wall_ns
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(done.steps))
    landed = [row.result_step for row in done.steps if row.result_step is not None]
    assert landed == [row.step for row in launched(done.steps)]
    assert done.preemptions


# ------------------------------------------------------------------ nobody's text changes


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("swap", [False, True])
def test_every_policy_gives_the_same_text(policy: str, swap: bool) -> None:
    asked = lambda: [ask(i, 5 + 3 * i, 12, arrival_ns=40 * i) for i in range(7)]  # noqa: E731
    options = {"pages": 9, "page_size": 4, "limits": Limits(max_seqs=4), "eos": [17, 80, 113, 200]}
    plain = run(asked(), policy, swap=swap, **options)  # type: ignore[arg-type]
    done = overlapped(asked(), policy, swap=swap, **options)
    assert done.outputs == plain.outputs
    reasons = {i: r.finish_reason for i, r in plain.records.items()}
    assert {i: r.finish_reason for i, r in done.records.items()} == reasons
    assert not tokens_wanting(done)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 30), st.integers(0, 3))
def test_an_interrupt_gives_out_what_was_computed(steps: int, eos: int) -> None:
    done = build([ask(i, 5, 9) for i in range(4)], overlap=True, eos=list(range(eos * 40)))
    done.engine.on_step = lambda row: setattr(done.engine, "stopping", row.step >= steps)
    finish(done)
    assert all(r.finish_reason for r in done.records.values() if r.queued_ns is not None)
    given_out = sum(len(outputs) for outputs in done.emitted)
    assert given_out == sum(len(out) for out in done.outputs.values())
    assert not tokens_wanting(done)
    assert done.scheduler.pool.used == 0
