"""vtc: fair shares between clients, and the bound that makes them fair."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.policies import Policy, View, policy_of
from stepscope.engine.policies.vtc import Counters
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from tests.engine.harness import ask, run
from tests.policy_views import ONE, admitted, folded, orders, ran, sent, view_of


def two_clients() -> list[Request]:
    """a floods the queue, b sends two a little later."""
    flood = [sent(ask(i, 10, 5), "a") for i in range(6)]
    return [*flood, *(sent(ask(i, 10, 5, arrival_ns=20), "b") for i in (6, 7))]


def test_vtc_serves_the_client_that_had_least() -> None:
    assert orders(two_clients, "vtc") == ([*range(8)], [0, 6, 1, 7, 2, 3, 4, 5])


def test_vtc_counts_what_the_same_step_lets_in() -> None:
    """Four slots at once: two for each client."""
    asked = [sent(ask(i, 4, 2), "a" if i < 4 else "b") for i in range(8)]
    done = run(asked, "vtc", limits=Limits(max_seqs=4))
    assert done.trace[0] == "p0:4 p4:4 p1:4 p5:4"


def test_vtc_charges_prompts_once_and_outputs_double() -> None:
    request = sent(ask(0, 10), "a")
    views = [
        {"waiting": [request]},
        {"running": [request], "last": [ran(request, 6, samples=False)]},
        {"running": [request], "last": [ran(request, 4)]},
        {"waiting": [request], "last": [ran(request)]},  # preempted after its second token
        {"running": [request], "last": [ran(request, 12, recomputed=11)]},
    ]
    served = [folded("vtc", *views[:n]).served["a"] for n in range(1, 6)]
    assert served == [0, 10, 12, 14, 16]
    assert folded("vtc,w_in=0,w_out=1", *views).served["a"] == 3


def test_vtc_lifts_a_client_that_comes_back() -> None:
    """b was away while a was served 25; it may not save that up."""
    old, new = sent(ask(0, 25), "a"), sent(ask(1, 4), "b")
    more = [sent(ask(i, 4), "a") for i in (2, 3)]
    away = {"waiting": more, "last": [ran(old, 25, samples=False)]}
    start = {"waiting": [old, *more]}
    back = folded("vtc", start, away, {"waiting": [*more, new]})
    assert back.served == {"a": 25, "b": 25}
    alone_again = folded("vtc", start, {**away, "waiting": []}, {"waiting": [new]})
    assert alone_again.served == {"a": 25, "b": 25}, "an empty queue: as the last that left it"
    ahead = Counters({"a": 3, "b": 9}, frozenset({2}), frozenset(), "")
    view = view_of("vtc", waiting=[more[0], new], memory=ahead)
    assert view.policy.remember(ahead, view).served["b"] == 9, "lifted, never lowered"


def test_vtc_does_not_lift_a_client_that_is_queued() -> None:
    first, second = sent(ask(0, 4), "a"), sent(ask(1, 4), "b")
    before = Counters({"a": 50.0, "b": 0.0}, frozenset({0, 1}), frozenset(), "a")
    view = view_of("vtc", waiting=[first, second, sent(ask(2, 4), "b")], memory=before)
    assert view.policy.remember(before, view).served == {"a": 50.0, "b": 0.0}


def test_vtc_charges_what_was_served_and_nothing_twice() -> None:
    """Also over the times in which the engine idles."""
    asked = [sent(ask(i, 5, 3, arrival_ns=500 * i), "a") for i in range(6)]
    policy, history = watching(policy_of("vtc"))
    done = run([*asked, sent(ask(9, 4, 1, arrival_ns=9000), "a")], policy)
    assert sum(row.kind == "idle" for row in done.steps) > 3
    assert history[-1][0] == {"a": 6 * (5 + 2 * 3)}, "all but the last, which is in its step"


backlogs = st.lists(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=12, max_size=20),
    min_size=2,
    max_size=3,
)


@settings(max_examples=60, deadline=None)
@given(backlogs, st.integers(1, 4))
def test_vtc_bounds_the_service_between_backlogged_clients(
    loads: list[list[tuple[int, int]]], slots: int
) -> None:
    """|W_a - W_b| <= 2 max(w_in x longest prompt, w_out x most tokens in the cache).

    In every interval in which both clients have something waiting; theorem 4.4 of the paper, where
    a whole prompt is charged when it is admitted, as here.
    """
    asked = [
        sent(ask(100 * c + i, p, m), f"c{c}")
        for c, load in enumerate(loads)
        for i, (p, m) in enumerate(load)
    ]
    policy, history = watching(policy_of("vtc"))
    done = run(asked, policy, limits=Limits(max_seqs=slots, token_budget=2000, chunk=2000))
    longest = max(p for load in loads for p, _ in load)
    bound = 2 * max(longest, 2 * slots * max(p + m for load in loads for p, m in load))
    assert done.complete
    for a, b in combinations(range(len(loads)), 2):
        one, other = f"c{a}", f"c{b}"
        lead = [s[one] - s[other] for s, queued in history if {one, other} <= queued]
        assert max(lead) - min(lead) <= bound


def watching(policy: Policy) -> tuple[Policy, list[tuple[dict[str, float], set[str]]]]:
    """The policy, and for each step what every client got so far and who is queued."""
    history: list[tuple[dict[str, float], set[str]]] = []

    def remember(memory: Counters | None, view: View) -> Counters:
        counters: Counters = policy.remember(memory, view)
        history.append((counters.served, {r.client for r in view.waiting}))
        return counters

    return replace(policy, remember=remember), history


def test_first_come_first_served_does_not_keep_that_bound() -> None:
    """What the bound is worth: a client that was early with everything starves the other."""
    asked = [sent(ask(i, 10, 5), "a") for i in range(40)]
    asked += [sent(ask(99, 10, 5), "b")]
    assert admitted(run(asked, limits=ONE))[-1] == 99
    assert admitted(run([sent(r, r.client) for r in remade(asked)], "vtc", limits=ONE))[1] == 99


def remade(asked: list[Request]) -> list[Request]:
    return [sent(ask(r.id, 10, 5), r.client) for r in asked]
