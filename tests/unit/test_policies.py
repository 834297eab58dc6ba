"""Each policy on one small trace on which the three of them differ, and what makes each itself."""

from __future__ import annotations

import pytest

from stepscope.engine.policies import POLICIES, policy_named
from stepscope.engine.policies.preempt import youngest
from stepscope.engine.policies.view import fcfs
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.errors import UsageError
from tests.engine.harness import Outcome, alone, ask, run
from tests.policy_views import grants, view_of

# Requests 0 and 1 are there at once, 2 arrives while they decode. One slot stays free for it.
LIMITS = Limits(max_seqs=3, token_budget=8, chunk=3)
LATE_NS = 20
FCFS = [name for name, policy in POLICIES.items() if policy.order is fcfs]


def trio() -> list[Request]:
    return [ask(0, 4, 7), ask(1, 2, 3), ask(2, 7, 2, arrival_ns=LATE_NS)]


def decoding(id: int, computed: int = 4) -> Request:
    request = ask(id, computed)
    request.tokens.append(9)
    request.computed = computed
    return request


def test_static_drains_its_batch_before_it_admits() -> None:
    done = run(trio(), "static", limits=LIMITS)
    assert done.trace == [
        "p0:4 p1:2",
        "d0 d1",
        "d0 d1",
        "d0",  # the slot of 1 idles, and 2 waits although it would fit
        "d0",
        "d0",
        "d0",
        "p2:7",
        "d2",
    ]
    assert done.work[3].num_waiting == 1 and done.work[3].num_running == 1


def test_prefill_first_lets_a_prompt_have_the_step() -> None:
    done = run(trio(), "prefill-first", limits=LIMITS)
    assert done.trace == [
        "p0:4 p1:2",
        "d0 d1",
        "p2:7",  # whole, although the chunk is 3; 0 and 1 stall
        "d0 d1 d2",
        "d0",
        "d0",
        "d0",
        "d0",
    ]
    assert [row.num_blocked_decodes for row in done.work] == [0, 0, 2, 0, 0, 0, 0, 0]
    assert [row.kind for row in done.work[:4]] == ["prefill", "decode", "prefill", "decode"]


def test_chunked_mixes_and_stalls_nobody() -> None:
    done = run(trio(), "chunked", limits=LIMITS)
    assert done.trace == [
        "p0:3 p1:2",
        "d1 p0:1",
        "d0 d1 p2:3",  # 2 arrived: its prompt goes in pieces of 3 beside the decodes
        "d0 p2:3",
        "d0 p2:1",
        "d0 d2",
        "d0",
        "d0",
    ]
    assert [row.kind for row in done.work[1:4]] == ["mixed"] * 3
    assert not any(row.num_blocked_decodes for row in done.work)


@pytest.mark.parametrize("policy", POLICIES)
def test_all_of_them_give_the_same_text(policy: str) -> None:
    done = run(trio(), policy, limits=LIMITS)
    assert done.outputs == {r.id: alone(r.tokens, r.sampling.max_tokens) for r in trio()}


# ------------------------------------------------------------------ static


def test_static_reserves_the_full_length() -> None:
    """16 + 17 - 1 computed tokens are 2 pages each, so that of 5 pages only two requests run."""
    done = run([ask(i, 16, 17) for i in range(3)], "static", pages=5)
    assert done.work[0].kv_used_pages == 4 and done.work[0].num_running == 2
    assert {row.kv_used_pages for row in done.work} == {4, 2}


def test_static_never_preempts() -> None:
    """The same pages make the other two policies preempt."""
    asked = [(i, 10, 40) for i in range(4)]

    def preempted(policy: str) -> Outcome:
        return run([ask(*a) for a in asked], policy, pages=7, page_size=8)

    assert preempted("static").preemptions == 0
    assert preempted("prefill-first").preemptions and preempted("chunked").preemptions


def test_static_reserves_no_more_than_there_is() -> None:
    """A request that may stop early is not refused for what it may need at most."""
    done = run(
        [ask(0, 4, 100)], "static", pages=2, page_size=8, eos=alone(ask(0, 4).tokens, 6)[-1:]
    )
    assert done.records[0].finish_reason == "eos"


def test_static_fills_its_batch_from_the_queue_in_order() -> None:
    waiting = [ask(i, 4) for i in range(5)]
    assert grants("static", waiting=waiting, max_seqs=3) == [(0, 4), (1, 4), (2, 4)]
    assert grants("static", waiting=waiting, running=[decoding(9)]) == [(9, 1)]


# ------------------------------------------------------------------ prefill-first


def test_prefill_first_takes_prompts_up_to_the_budget_and_a_long_one_alone() -> None:
    waiting = [ask(0, 5), ask(1, 3), ask(2, 1)]
    assert grants("prefill-first", waiting=waiting) == [(0, 5), (1, 3)]
    assert grants("prefill-first", waiting=[ask(0, 20), ask(1, 1)]) == [(0, 20)]
    assert grants("prefill-first", waiting=[ask(0, 1), ask(1, 20)]) == [(0, 1)]


def test_prefill_first_decodes_when_nothing_fits() -> None:
    running = [decoding(0), decoding(1)]
    assert grants("prefill-first", waiting=[ask(2, 8)], running=running, free_pages=1) == [
        (0, 1),
        (1, 1),
    ]
    assert grants("prefill-first", waiting=[ask(2, 8)], running=running, max_seqs=2) == [
        (0, 1),
        (1, 1),
    ]


# ------------------------------------------------------------------ chunked


def test_chunked_never_clips_decodes() -> None:
    running = [decoding(i) for i in range(5)]
    assert grants("chunked", waiting=[ask(9, 4)], running=running, token_budget=3) == [
        (i, 1) for i in range(5)
    ]


def test_chunked_gives_running_prefills_what_is_left_before_new_ones() -> None:
    half = ask(1, 9)
    half.computed = 2
    running = [decoding(0), half]
    assert grants("chunked", waiting=[ask(2, 5)], running=running, chunk=4) == [
        (0, 1),
        (1, 4),
        (2, 3),
    ]
    assert grants("chunked", waiting=[ask(2, 5)], running=running, chunk=7) == [(0, 1), (1, 7)]


@pytest.mark.parametrize("chunk,budget", [(1, 1), (3, 8), (8, 8), (100, 10), (7, 3)])
def test_chunked_respects_chunk_and_budget_in_every_step(chunk: int, budget: int) -> None:
    limits = Limits(max_seqs=6, token_budget=budget, chunk=chunk)
    done = run([ask(i, 5 + 7 * i, 9, arrival_ns=40 * i) for i in range(6)], limits=limits)
    for pieces in done.scheduler.slices:
        decodes = sum(kind == "decode" for _, kind, _, _ in pieces)
        prefills = [count for _, kind, _, count in pieces if kind != "decode"]
        assert max(prefills, default=0) <= chunk
        assert sum(prefills) <= max(budget - decodes, 0)
    assert not any(row.num_blocked_decodes for row in done.work)


# ------------------------------------------------------------------ what they share


@pytest.mark.parametrize("policy", ["prefill-first", "chunked"])
def test_admission_leaves_pages_for_decodes_that_grow(policy: str) -> None:
    running = [decoding(0)]
    waiting = [ask(1, 8)]
    fits = grants(policy, waiting=waiting, running=running, free_pages=4, growth=1)
    assert (1, 7 if policy == "chunked" else 8) in fits
    full = grants(policy, waiting=waiting, running=running, free_pages=3, growth=1)
    assert full == [(0, 1)], "the watermark is 1 page of 100, the prompt needs 2, the decode 1"


@pytest.mark.parametrize("policy", ["prefill-first", "chunked"])
def test_the_watermark_is_off_when_nobody_runs(policy: str) -> None:
    assert grants(policy, waiting=[ask(1, 8)], free_pages=2, total_pages=500) == [(1, 8)]


@pytest.mark.parametrize("policy", FCFS)
def test_nobody_overtakes_a_prompt_that_does_not_fit(policy: str) -> None:
    assert grants(policy, waiting=[ask(0, 40), ask(1, 1)], free_pages=5) == []


def test_the_victim_is_the_latest_arrival_and_of_equals_the_last() -> None:
    running = [ask(3, 4, arrival_ns=5), ask(1, 4, arrival_ns=9), ask(2, 4, arrival_ns=9)]
    assert youngest(view_of("chunked"), running).id == 2


def test_an_unknown_policy_is_named_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'lifo'.*chunked.*prefill-first.*static"):
        policy_named("lifo")
