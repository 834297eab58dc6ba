"""Policies that remember: hrrn, mlfq, deadline-chunk (vtc has its own file)."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.engine.policies import policy_of
from stepscope.engine.policies.deadline_chunk import Fit
from stepscope.engine.policies.mlfq import Place
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from tests.engine.harness import Clock, Outcome, alone, ask, build, finish, run
from tests.policy_views import ONE, admitted, folded, ran, view_of

MS = 1_000_000


def test_a_policy_remembers_nothing_of_another_run() -> None:
    """The same policy object, twice, and from the same start."""
    for name in ("hrrn", "mlfq", "vtc", "deadline-chunk"):
        policy = policy_of(name)
        first, second = (run(stream(), policy, limits=ONE).trace for _ in range(2))
        assert first == second


def test_a_policy_does_not_change_what_it_remembered_before() -> None:
    """A fold, not a shared dictionary: the old value stays what it was."""
    request = ask(0, 40)
    for name in ("hrrn", "mlfq", "vtc", "deadline-chunk"):
        before = folded(name, {"waiting": [request]})
        copy = repr(before)
        view = view_of(name, running=[request], memory=before, last=[ran(request, 40)], now_ns=9)
        assert view.policy.remember(before, view) != before
        assert repr(before) == copy


# ------------------------------------------------------------------ hrrn


def stream() -> list[Request]:
    """A long prompt, and short ones that arrive as fast as the single slot serves them."""
    short = [ask(i, 4, 2, arrival_ns=round((0.1 + 2.5 * (i - 2)) * MS)) for i in range(2, 60)]
    return [ask(0, 4, 2), ask(1, 60, 2), *short]


def test_hrrn_ages_what_sjf_starves() -> None:
    order = {p: admitted(timed(stream(), p, ONE)) for p in ("chunked", "sjf", "hrrn")}
    assert order["chunked"] == sorted(order["chunked"])
    assert order["sjf"][-1] == 1, "shortest first: not before the stream has ended"
    assert 2 < order["hrrn"].index(1) < 30, "later than its turn, but not last"


def test_hrrn_waits_in_tokens_of_others() -> None:
    """Both arrived at once; after 30 tokens 1 + 30/10 of the shorter beats 1 + 30/20."""
    long, short, new, other = ask(0, 20), ask(1, 10), ask(2, 2), ask(9, 30)
    memory = folded(
        "hrrn",
        {"waiting": [long, short], "running": [other]},
        {"waiting": [long, short, new], "running": [other], "last": [ran(other, 30)]},
    )
    assert memory == (30, {0: 0, 1: 0, 2: 30, 9: 0})
    view = view_of("hrrn", waiting=[long, short, new], memory=memory)
    assert [r.id for r in view.policy.order(view)] == [1, 0, 2], "2 is shortest but has not waited"


def test_hrrn_forgets_those_that_ended() -> None:
    done = ask(0, 20)
    memory = folded("hrrn", {"running": [done]}, {"waiting": [ask(1, 4)], "last": [ran(done, 20)]})
    assert memory == (20, {1: 20})


# ------------------------------------------------------------------ mlfq


@pytest.mark.parametrize(
    "prompt,level", [(1, 0), (64, 0), (65, 1), (128, 1), (129, 2), (256, 2), (1000, 4)]
)
def test_mlfq_joins_the_first_queue_that_holds_its_prompt(prompt: int, level: int) -> None:
    assert folded("mlfq", {"waiting": [ask(0, prompt)], "now_ns": 5}) == {0: Place(level, 0, 5)}


def test_mlfq_demotes_on_use_and_does_not_charge_what_is_computed_again() -> None:
    request = ask(0, 60)
    steps = [ran(request, 60), *[ran(request)] * 4]
    views = [{"waiting": [request]}] + [{"running": [request], "last": [s]} for s in steps]
    assert folded("mlfq", *views[:5])[0] == Place(0, 63, 0)
    assert folded("mlfq", *views)[0] == Place(1, 0, 0), "the 64th token used up the quantum"
    again = {"running": [request], "last": [ran(request, 64, recomputed=63)]}
    assert folded("mlfq", *views[:5], again)[0] == Place(1, 0, 0)


def test_mlfq_promotes_who_has_not_been_served_for_a_while() -> None:
    waits, serves = ask(0, 100), ask(1, 100)
    start = {"waiting": [waits, serves]}
    idle = {"waiting": [waits], "running": [serves], "last": [ran(serves)]}
    assert folded("mlfq", start, {**idle, "now_ns": 2999 * MS})[0].level == 1
    assert folded("mlfq", start, {**idle, "now_ns": 3000 * MS}) == {
        0: Place(0, 0, 3000 * MS),
        1: Place(1, 1, 3000 * MS),
    }
    assert folded("mlfq,idle_s=0.5", start, {**idle, "now_ns": 500 * MS})[0].level == 0


def test_mlfq_lets_a_short_one_preempt_without_knowing_any_length() -> None:
    def two() -> list[Request]:
        return [ask(0, 4, 20), ask(1, 4, 3, arrival_ns=60)]

    done = run(two(), policy_of("mlfq,quantum=8"), limits=ONE)
    assert done.trace == [
        "p0:4", *["d0"] * 4,  # 8 tokens: 0 falls to the level of 16
        "p1:4", "d1", "d1",  # 1 begins at the top
        "r0:9", *["d0"] * 14,
    ]  # fmt: skip
    plain = run(two(), limits=ONE)
    assert plain.trace[-1] == "d1" and plain.outputs == done.outputs


def test_mlfq_takes_turns_by_quantum_and_not_at_every_step() -> None:
    """Two equals: each preemption costs a quantum, and quanta double."""
    done = run([ask(0, 4, 60), ask(1, 4, 60)], policy_of("mlfq,quantum=8"), limits=ONE)
    assert done.preemptions == 3, "0: 8 | 1: 8 16 | 0: 16 32 | 1: the rest | 0: the rest"
    assert done.outputs == {i: alone(ask(i, 4).tokens, 60) for i in (0, 1)}


def test_mlfq_starves_nobody() -> None:
    """A long request among short ones that never stop coming: it ends long before they do."""

    def asked() -> list[Request]:
        short = [ask(i, 4, 3, arrival_ns=40 * i) for i in range(1, 120)]
        return [ask(0, 40, 30), *short]

    promoted = run(asked(), policy_of("mlfq,quantum=8,idle_s=0.0000003"), limits=ONE)
    never = run(asked(), policy_of("mlfq,quantum=8,idle_s=1000"), limits=ONE)
    position = {name: ended(done).index(0) for name, done in (("p", promoted), ("n", never))}
    assert position["n"] == 119 and position["p"] < 90


def ended(done: Outcome) -> list[int]:
    return sorted(done.records, key=lambda i: done.records[i].finished_ns or 0)


# ------------------------------------------------------------------ deadline-chunk


def test_a_step_model_is_fitted_to_the_steps_of_the_run() -> None:
    """2 ms and 0.1 ms per token, seen exactly at 10 and at 40 tokens."""
    request, now = ask(0, 100), 0
    views: list[dict[str, Any]] = [{"now_ns": 0}]
    for tokens in (10, 40, 10):
        now += 2 * MS + tokens * MS // 10
        views.append({"now_ns": now, "last": [ran(request, tokens)]})
    assert folded("deadline-chunk", *views[:2]).line() is None, "one size tells no slope"
    views.append({"now_ns": now + 900 * MS})  # idle: a wait is no step
    base, per_token = folded("deadline-chunk", *views).line()
    assert (base, per_token) == (pytest.approx(2 * MS), pytest.approx(MS / 10))
    assert folded("deadline-chunk", *views).now_ns == now + 900 * MS


def test_a_model_that_makes_no_sense_is_no_model() -> None:
    assert Fit(0, 2, 3, 10, 5, 13).line() is None, "more tokens, less time"
    assert Fit(0, 2, 2, 9, 2, 9).line() is None, "the same size twice"


DEADLINES = "deadline-chunk,ttft_ms=10,itl_ms=10,base_ms=1,per_token_ms=0.1,margin=1,least=2"


def decoding(id: int, said: int = 1) -> Request:
    request = ask(id, 4, 50)
    request.tokens += alone(request.tokens, said)
    request.computed = len(request.tokens) - 1
    return request


@pytest.mark.parametrize(
    "now_ms,tokens",
    [
        (0, 189),  # due at 20: (20 - 1) / 0.1 = 190, one of them is the decode's
        (10, 89),
        (18.5, 4),
        (30, 2),  # late as it is: the least, or the prompt would starve
    ],
)
def test_the_chunk_is_what_the_slack_leaves(now_ms: float, tokens: int) -> None:
    view = view_of(
        DEADLINES,
        running=[decoding(0)],
        waiting=[ask(1, 400)],
        free_pages=1000,
        total_pages=1000,
        token_budget=500,
        chunk=500,
        now_ns=round(now_ms * MS),
    )
    assert [(g.request.id, g.tokens) for g in view.policy.assign(view)] == [(0, 1), (1, tokens)]


def test_the_margin_shrinks_the_chunk_and_without_decodes_there_is_no_limit() -> None:
    options: dict[str, Any] = {"waiting": [ask(1, 400)], "token_budget": 300, "chunk": 300}
    options |= {"free_pages": 1000, "total_pages": 1000}
    wary = view_of(DEADLINES.replace("margin=1", "margin=2"), running=[decoding(0)], **options)
    assert wary.policy.assign(wary)[1].tokens == 89
    free = view_of(DEADLINES, **options)
    assert free.policy.assign(free)[0].tokens == 300


def test_decodes_come_by_slack_and_all_of_them() -> None:
    """0 has said 3 tokens: its next is due later than the second of 1."""
    view = view_of(DEADLINES, running=[decoding(0, 3), decoding(1, 1)], token_budget=1, now_ns=0)
    assert [(g.request.id, g.tokens) for g in view.policy.assign(view)] == [(1, 1), (0, 1)]


@pytest.mark.parametrize("alpha,first", [(0, 0), (0.1, 0), (1, 1)])
def test_prefills_come_by_deadline_and_what_is_left_of_them(alpha: float, first: int) -> None:
    """0 came 5 ms earlier with 8 tokens more: 0.625 ms per token is where it turns."""
    waiting = [ask(0, 12), ask(1, 4, arrival_ns=5 * MS)]
    view = view_of(f"{DEADLINES},alpha_ms={alpha}", waiting=waiting)
    assert next(iter(view.policy.order(view))).id == first


def test_deadline_chunk_holds_deadlines_that_chunked_breaks() -> None:
    """0 decodes ahead of its deadlines, but not by the 40 ms that a prompt of 400 takes at once."""

    def asked() -> list[Request]:
        return [ask(0, 8, 90), ask(1, 30, 1, arrival_ns=9 * MS), ask(2, 400, 2, arrival_ns=28 * MS)]

    slo = "ttft_ms=10,itl_ms=1.5,least=1"
    wide = Limits(token_budget=512, chunk=512)
    done = {p: timed(asked(), p, wide) for p in ("chunked", f"deadline-chunk,{slo}")}
    late = {policy: tokens_late(outcome, 10, 1.5) for policy, outcome in done.items()}
    assert late["chunked"] > 10 and late[f"deadline-chunk,{slo}"] == 0
    chunks = [p[3] for pieces in done[f"deadline-chunk,{slo}"].scheduler.slices for p in pieces]
    assert 100 < max(chunks) < 250, "the fit gave a chunk, neither the least nor the budget"


def tokens_late(done: Outcome, ttft_ms: float, itl_ms: float) -> int:
    """Tokens of request 0 that came after arrival + TTFT + i x ITL."""
    said = [
        row.emitted_ns or 0
        for row, outputs in zip(done.work, done.emitted, strict=True)
        if any(o.request.id == 0 for o in outputs)
    ]
    return sum(ns > (ttft_ms + i * itl_ms) * MS for i, ns in enumerate(said))


def timed(asked: list[Request], policy: str, limits: Limits) -> Outcome:
    """A step takes 1 ms and 0.1 ms per token."""
    clock = Clock()
    made = build(asked, policy_of(policy), limits=limits, clock=clock)
    prepare = made.engine.runner.prepare

    def charged(plan: Any) -> Any:
        clock.ns += MS + sum(s.count for s in plan.slices) * MS // 10
        return prepare(plan)

    made.engine.runner.prepare = charged  # type: ignore[method-assign]
    return finish(made)
