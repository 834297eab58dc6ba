"""Each policy on a small trace on which first come, first served gives another order."""

from __future__ import annotations

import pytest

from stepscope.engine.policies import policy_of
from stepscope.engine.policies.lengths import noise
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from tests.engine.harness import Outcome, ask, run
from tests.policy_views import ONE, admitted, grants, order_of, orders, sent, spoken, view_of

PREFIX = list(range(100, 140))  # 40 tokens that prompts may share


# ------------------------------------------------------------------ tokens of a step


def mixed() -> list[Request]:
    """0 and 1 at once, 2 while they decode; a budget of 8 and chunks of 3 are too small for 2."""
    return [ask(0, 4, 7), ask(1, 2, 3), ask(2, 7, 2, arrival_ns=20), ask(3, 20, 2, arrival_ns=20)]


SMALL = Limits(max_seqs=3, token_budget=8, chunk=3)


def test_orca_takes_prompts_whole_beside_the_decodes_and_refills_at_once() -> None:
    done = run(mixed(), "orca", limits=SMALL)
    assert done.trace == [
        "p0:4 p1:2",
        "d0 d1",
        "d0 d1 p2:7",  # whole and mixed: neither the chunk of 3 nor the budget of 8 holds
        "d0 d2 p3:20",  # the slot of 1 is taken in the next step, as static would not
        "d0 d3",
        *["d0"] * 2,
    ]
    assert not any(row.num_blocked_decodes for row in done.work)


def test_orca_never_preempts_since_it_reserves() -> None:
    asked = [(i, 10, 40) for i in range(4)]
    done = run([ask(*a) for a in asked], "orca", pages=7, page_size=8)
    assert done.preemptions == 0 and max(row.num_running or 0 for row in done.work) == 1
    assert run([ask(*a) for a in asked], "chunked", pages=7, page_size=8).preemptions


def test_decode_first_waits_until_a_whole_prompt_fits() -> None:
    done = run(mixed(), "decode-first", limits=SMALL)
    assert done.trace == [
        "p0:4 p1:2",
        "d0 d1",
        "d0 d1",  # 6 are left of 8, 2 needs 7 in one piece
        "d0 p2:7",
        "d0 d2 p3:6",  # 20 are more than the budget: in pieces, or it would never run
        "d0 p3:7",
        "d0 p3:7",
        "d3",
    ]


def test_decode_first_in_chunks_is_chunked() -> None:
    done = run(mixed(), policy_of("decode-first,prompts=chunks"), limits=SMALL)
    assert done.trace == run(mixed(), "chunked", limits=SMALL).trace


# ------------------------------------------------------------------ prefixes


def sharing() -> list[Request]:
    """0 and 2 share 40 tokens, 1 is a stranger."""
    return [ask(0, [*PREFIX, 1], 2), ask(1, 41, 2), ask(2, [*PREFIX, 2], 2)]


def test_lpm_lets_a_prompt_wait_for_the_one_that_computes_its_prefix() -> None:
    done = run(sharing(), "lpm", limits=Limits(chunk=16, token_budget=64))
    assert done.trace == [
        "p0:16 p1:16",  # 2 would have got 16 as well
        "p0:16 p1:16",
        "p0:9 p1:9",  # here the common 40 are computed
        "d0 d1 p2:16",
        "p2:16",
        "p2:9",
        "d2",
    ]
    assert run(sharing(), limits=Limits(chunk=16, token_budget=64)).trace[0] == "p0:16 p1:16 p2:16"


@pytest.mark.parametrize("shared,waits", [(31, False), (32, True), (40, True)])
def test_lpm_waits_from_32_shared_tokens_on(shared: int, waits: bool) -> None:
    asked = [ask(0, [*PREFIX, 1], 2), ask(1, [*PREFIX[:shared], *range(50)], 2)]
    done = run(asked, "lpm")
    assert (done.trace[0] == "p0:41") == waits


def test_lpm_takes_another_share() -> None:
    asked = [ask(0, [*PREFIX, 1], 2), ask(1, [*PREFIX[:5], *range(50)], 2)]
    assert run(asked, policy_of("lpm,share=5")).trace[0] == "p0:41"


def test_lpm_waits_no_longer_than_the_common_tokens_take() -> None:
    """0 goes on with its own 40 tokens while 1 begins."""
    asked = [ask(0, [*PREFIX, *range(40)], 1), ask(1, [*PREFIX, 99], 1)]
    done = run(asked, "lpm", limits=Limits(chunk=20))
    assert done.trace == ["p0:20", "p0:20", "p0:20 p1:20", "p0:20 p1:20", "p1:1"]


class Cached(Request):
    """A request whose prefix some cache holds."""

    cached_prefix = 16  # type: ignore[assignment]
    todo = property(lambda self: len(self.tokens) - self.computed)  # type: ignore[assignment]


def test_lpm_puts_the_longest_cached_prefix_first() -> None:
    plain, cached = ask(0, 20), ask(1, 20)
    held = Cached(cached.record, cached.tokens, cached.sampling)
    assert grants("lpm", waiting=[plain, held], max_seqs=1) == [(1, 8)]
    assert grants("chunked", waiting=[plain, held], max_seqs=1) == [(0, 8)]


def test_a_cached_prefix_need_not_be_waited_for() -> None:
    first, second = ask(0, [*PREFIX, 1]), ask(1, [*PREFIX, 2])
    held = Cached(second.record, second.tokens, second.sampling)
    both = grants("lpm,share=16", waiting=[first, held], token_budget=100, chunk=50)
    assert both == [(1, 41), (0, 41)]


def tree() -> list[Request]:
    """
    [1 ...] : 0          [2 ...] : 1, 3, 5, of which 3 and 5 share [2 8]
    [3 ...] : 2, 4
    """
    heads = [[1], [2, 7], [3, 1], [2, 8, 1], [3, 2], [2, 8, 2]]
    return [ask(i, [*head, 9, 9], 1) for i, head in enumerate(heads)]


def test_dfs_weight_walks_the_heaviest_branch_first() -> None:
    assert order_of("dfs-weight", tree()) == [3, 5, 1, 2, 4, 0]
    assert run(tree(), "dfs-weight").trace == ["p3:5 p5:5 p1:4 p2:4 p4:4 p0:3"]
    assert run(tree(), "chunked").trace == ["p0:3 p1:4 p2:4 p3:5 p4:4 p5:5"]


def test_dfs_weight_counts_only_those_that_wait() -> None:
    """With one slot, a branch gets lighter with each request that leaves it."""
    assert orders(tree, "dfs-weight") == ([0, 1, 2, 3, 4, 5], [3, 1, 2, 0, 4, 5])


def test_dfs_weight_puts_a_prompt_before_those_that_extend_it() -> None:
    nested = [ask(0, [5, 5, 5]), ask(1, [6]), ask(2, [5, 5]), ask(3, [5, 5, 5])]
    assert order_of("dfs-weight", nested) == [2, 0, 3, 1]


def test_dfs_weight_walks_a_tree_as_deep_as_it_comes() -> None:
    chain = [ask(i, [1] * (i + 1), 1) for i in reversed(range(1500))]
    assert order_of("dfs-weight", chain) == list(range(1500))


# ------------------------------------------------------------------ priority


def classes() -> list[Request]:
    return [
        sent(ask(0, 4, 4), priority=2),
        sent(ask(1, 4, 4), priority=1),
        sent(ask(2, 4, 4, arrival_ns=1), priority=0),
        sent(ask(3, 4, 4, arrival_ns=1), priority=1),
    ]


def test_priority_takes_the_smaller_number_then_the_earlier() -> None:
    def later() -> list[Request]:
        return [sent(ask(9, 4, 8), priority=0), *classes()]

    assert orders(later, "priority") == ([0, 1, 9, 2, 3], [9, 2, 1, 3, 0])


def test_priority_preempts_only_where_it_is_told_to() -> None:
    """0 runs alone in the slot when the better 1 arrives."""

    def two() -> list[Request]:
        return [sent(ask(0, 4, 6), priority=1), sent(ask(1, 4, 3, arrival_ns=20), priority=0)]

    gentle = run(two(), "priority", limits=ONE)
    assert gentle.preemptions == 0 and gentle.trace[-1] == "d1"
    harsh = run(two(), policy_of("priority,preempt=yes"), limits=ONE)
    assert harsh.trace == ["p0:4", "d0", "p1:4", "d1", "d1", "r0:6", "d0", "d0", "d0"]
    assert (harsh.records[0].preemptions, harsh.records[1].preemptions) == (1, 0)
    assert harsh.outputs == gentle.outputs


def test_priority_does_not_preempt_an_equal() -> None:
    asked = [sent(ask(1, 4, 6), priority=1), sent(ask(0, 4, 3, arrival_ns=20), priority=1)]
    assert run(asked, policy_of("priority,preempt=yes"), limits=ONE).preemptions == 0


def test_as_few_are_preempted_as_the_better_one_needs() -> None:
    """Pages of 4: 0, 1 and 2 hold 2 each. 3 needs 3 of 6: two of class 2 go, not the one of 1."""
    asked = [sent(ask(i, 7, 9), priority=p) for i, p in enumerate((2, 1, 2))]
    asked.append(sent(ask(3, 9, 2, arrival_ns=20), priority=0))
    done = run(asked, policy_of("priority,preempt=yes"), pages=6, page_size=4)
    victims = [e.request for e in done.events if e.kind == "preempt"]
    assert victims[:2] == [2, 0] and done.records[1].preemptions == 0


def test_nobody_is_preempted_for_one_that_would_get_no_token() -> None:
    """Without 1, a budget of 1 is still spent on the decode of 0, which is as good."""
    running = []
    for id in (0, 1):
        running.append(sent(spoken(id, 1), priority=2 * id))
        running[-1].computed = 4
    better = [sent(ask(2, 4), priority=0)]
    for budget, gone in ((1, []), (2, [1])):
        view = view_of(
            "priority,preempt=yes",
            running=running,
            waiting=better,
            max_seqs=2,
            token_budget=budget,
        )
        assert [r.id for r in view.policy.evict(view)] == gone


def test_nobody_is_preempted_for_one_that_would_not_fit_even_so() -> None:
    """1 needs 5 pages; the worse 0 holds 2, but 9, as good as 1, holds 2 of the other 4."""
    asked = [sent(ask(9, 7, 2), priority=0), sent(ask(0, 7, 2), priority=1)]
    asked.append(sent(ask(1, 20, 1, arrival_ns=8), priority=0))
    done = run(asked, policy_of("priority,preempt=yes"), pages=6, page_size=4)
    assert done.trace[:2] == ["p9:7 p0:7", "d9 d0"] and done.preemptions == 0


# ------------------------------------------------------------------ shortest first


def jobs() -> list[Request]:
    """(prompt, output): 0 is there first and runs; the rest waits for it."""
    sizes = [(4, 3), (30, 2), (5, 40), (12, 9)]
    return [ask(i, p, m, ignore_eos=True) for i, (p, m) in enumerate(sizes)]


@pytest.mark.parametrize(
    "policy,order",
    [
        ("sjf", [0, 2, 3, 1]),  # prompts 4, 5, 12, 30
        ("sjf,by=oracle", [1, 0, 3, 2]),  # outputs 2, 3, 9, 40
        ("sjf,by=predicted,sigma=0", [1, 0, 3, 2]),  # without noise the oracle itself
    ],
)
def test_sjf(policy: str, order: list[int]) -> None:
    assert orders(jobs, policy) == ([0, 1, 2, 3], order)


def test_predictions_are_drawn_once_per_request_and_seed() -> None:
    """The order is the one of oracle x exp(sigma x noise)."""
    sizes = [20] * 8

    def equal() -> list[Request]:
        return [ask(i, 4, m, ignore_eos=True) for i, m in enumerate(sizes)]

    by_noise = {s: sorted(range(8), key=lambda i: noise(s, i)) for s in (0, 1)}
    for seed in (0, 1):
        order = orders(equal, f"sjf,by=predicted,sigma=1,seed={seed}")[1]
        assert order == by_noise[seed]
    assert by_noise[0] != by_noise[1]


def test_the_noise_is_standard_normal() -> None:
    draws = [noise(3, i) for i in range(4000)]
    mean = sum(draws) / len(draws)
    assert abs(mean) < 0.06 and abs(sum((d - mean) ** 2 for d in draws) / len(draws) - 1) < 0.08


def test_srpt_puts_back_whoever_has_more_to_go() -> None:
    def two() -> list[Request]:
        return [ask(0, 4, 12), ask(1, 4, 2, arrival_ns=40)]

    done = run(two(), "srpt", limits=ONE)
    assert done.trace[:6] == ["p0:4", "d0", "d0", "p1:4", "d1", "r0:7"]
    assert done.records[0].preemptions == 1
    assert run(two(), limits=ONE).trace[-1] == "d1"


def test_srpt_lets_one_finish_that_is_nearly_done() -> None:
    """When 1 arrives with 4 + 4 to go, 0 has 6 to go."""
    done = run([ask(0, 4, 8), ask(1, 4, 4, arrival_ns=24)], "srpt", limits=ONE)
    assert done.preemptions == 0


def test_srpt_counts_the_prompt_of_what_waits() -> None:
    """1 has fewer tokens to say (2 against 7) but 20 to read first."""
    done = run([ask(0, 4, 10), ask(1, 20, 2, arrival_ns=24)], "srpt", limits=ONE)
    assert done.preemptions == 0


# ------------------------------------------------------------------ deadlines


def test_edf_takes_the_earliest_deadline_also_of_one_that_was_preempted() -> None:
    """A request that has said i tokens is due i x ITL later than a new one of the same arrival."""
    waiting = [spoken(0, 3, arrival_ns=0), ask(1, 4, arrival_ns=2_000_000), spoken(2, 1)]
    assert order_of("edf,ttft_ms=10,itl_ms=1", waiting) == [2, 1, 0]
    assert order_of("edf,ttft_ms=10,itl_ms=0.5", waiting) == [2, 0, 1]


def test_edf_on_a_trace() -> None:
    """Three victims come back: the one that has said least is due first."""

    def squeezed() -> list[Request]:
        return [ask(i, 8, 30, arrival_ns=i) for i in range(4)] + [ask(4, 4, 2, arrival_ns=60)]

    plain = run(squeezed(), policy_of("chunked"), pages=12, page_size=4)
    done = run(squeezed(), policy_of("edf,ttft_ms=1,itl_ms=1"), pages=12, page_size=4)
    assert plain.outputs == done.outputs
    assert admitted(plain) == admitted(done) == [0, 1, 2, 3, 4]
    back, new = step_of(plain, 3, "recompute"), step_of(plain, 4, "prefill")
    assert back < new, "first come: the victim 3 returns before 4 begins"
    back, new = step_of(done, 3, "recompute"), step_of(done, 4, "prefill")
    assert new < back, "earliest deadline: 4 has said nothing yet"


def step_of(done: Outcome, request: int, kind: str) -> tuple[int, int]:
    """Step, and place in it, where it did that first."""
    places = (
        (n, at) for n, pieces in enumerate(done.scheduler.slices) for at in range(len(pieces))
    )
    return next((n, at) for n, at in places if done.scheduler.slices[n][at][:2] == (request, kind))
