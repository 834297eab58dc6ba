"""Pages, admission, preemption by recompute, and what no workload may ever break."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stepscope.engine.kv import PagePool
from stepscope.engine.policies import POLICIES, Grant, View, policy_named
from stepscope.engine.policies.view import fcfs, nobody
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.errors import UsageError
from tests.engine.harness import VOCAB, Outcome, alone, ask, run

# ------------------------------------------------------------------ the pool


def test_a_pool_gives_each_page_once() -> None:
    pool = PagePool(3, 4)
    first, second = pool.take(1), pool.take(2)
    assert first and second and sorted(first + second) == [0, 1, 2]
    assert (pool.used, pool.free, pool.take(1)) == (3, 0, None)


def test_a_pool_takes_nothing_when_it_cannot_take_all() -> None:
    pool = PagePool(3, 4)
    assert pool.take(4) is None
    assert (pool.used, pool.free) == (0, 3)


def test_a_page_freed_twice_is_a_bug() -> None:
    pool = PagePool(2, 4)
    pages = pool.take(1)
    assert pages is not None
    pool.give_back(pages)
    with pytest.raises(ValueError, match="nobody holds"):
        pool.give_back(pages)
    assert pool.free == 2


@pytest.mark.parametrize("tokens,pages", [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(9, 16).pages_for(tokens) == pages


@pytest.mark.parametrize("total,size", [(0, 16), (4, 0), (4, 257)])
def test_an_impossible_pool(total: int, size: int) -> None:
    with pytest.raises(UsageError, match="page size from 1 to 256"):
        PagePool(total, size)


# ------------------------------------------------------------------ refusals


def refused(done: Outcome, id: int) -> str:
    record = done.records[id]
    assert record.finish_reason == "error" and record.error is not None
    assert record.output_tokens == 0 and record.admitted_ns is None
    assert record.finished_ns is not None
    return record.error


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "prompt,says",
    [
        (0, "its prompt is empty"),
        (64, r"its prompt of 64 tokens leaves no room in the context of 64"),
        (50, r"it needs 4 KV pages of 16 tokens and the cache has 3; raise engine\.kv_tokens"),
    ],
)
def test_a_request_that_can_never_run_fails_alone(policy: str, prompt: int, says: str) -> None:
    asked = [ask(0, 9, 5), ask(1, prompt, 5), ask(2, 9, 5)]
    done = run(asked, policy, pages=3, limits=Limits(max_context=64))
    error = refused(done, 1)
    assert error.startswith("request 1: ")
    assert re.search(says, error)
    for id in (0, 2):
        assert done.outputs[id] == alone(ask(id, 9).tokens, 5)
        assert done.records[id].finish_reason == "length"


def test_the_longest_prompt_that_a_context_holds_gives_one_token() -> None:
    done = run([ask(0, 63, 9)], limits=Limits(max_context=64))
    assert done.records[0].finish_reason == "length" and len(done.outputs[0]) == 1


def test_a_request_refused_by_the_inbox_keeps_its_own_sentence() -> None:
    done = run([ask(0, 0, error="request 0: no tokenizer"), ask(1, 4, 2)])
    assert refused(done, 0) == "request 0: no tokenizer"
    assert done.records[1].finish_reason == "length"


@pytest.mark.parametrize("policy", POLICIES)
def test_running_out_of_pages_alone_fails_that_request_only(policy: str) -> None:
    """2 pages of 8 hold 16 computed tokens; the 17th needs a page that does not exist."""
    done = run([ask(0, 10, 20), ask(1, 5, 4)], policy, pages=2, page_size=8)
    record = done.records[0]
    assert record.finish_reason == "error" and record.error is not None
    assert "request 0: it needs 3 KV pages of 8 tokens and the cache has 2" in record.error
    assert done.outputs[0] == alone(ask(0, 10).tokens, 7), "the tokens it got are its own"
    assert done.outputs[1] == alone(ask(1, 5).tokens, 4)
    assert done.scheduler.pool.free == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_exactly_enough_pages_are_enough(policy: str) -> None:
    done = run([ask(0, 10, 7)], policy, pages=2, page_size=8)
    assert done.records[0].finish_reason == "length"


def test_a_policy_that_grants_nothing_does_not_hang_the_engine() -> None:
    stubborn = replace(policy_named("chunked"), assign=lambda view: [])
    done = run([ask(0, 4), ask(1, 4)], stubborn, most_steps=20)
    assert {r.finish_reason for r in done.records.values()} == {"error"}


# ------------------------------------------------------------------ stopping


def test_eos_ends_a_request_unless_it_ignores_it() -> None:
    eos = alone(ask(0, 5).tokens, 3)[-1:]
    ignoring = ask(1, ask(0, 5).tokens, 6, ignore_eos=True)
    done = run([ask(0, 5, 6), ignoring], eos=eos)
    assert (done.records[0].finish_reason, len(done.outputs[0])) == ("eos", 3)
    assert (done.records[1].finish_reason, len(done.outputs[1])) == ("length", 6)


def test_an_eos_as_last_token_is_eos() -> None:
    eos = alone(ask(0, 5).tokens, 3)[-1:]
    assert run([ask(0, 5, 3)], eos=eos).records[0].finish_reason == "eos"


def test_the_context_ends_a_request() -> None:
    done = run([ask(0, 10, 100)], limits=Limits(max_context=20))
    assert done.records[0].finish_reason == "length" and len(done.outputs[0]) == 10


def test_max_seqs_bounds_what_runs() -> None:
    done = run([ask(i, 4, 3 + i) for i in range(7)], limits=Limits(max_seqs=2))
    assert max(row.num_running or 0 for row in done.work) == 2
    assert done.work[0].num_waiting == 5


# ------------------------------------------------------------------ preemption


def squeezed(policy: str) -> Outcome:
    """Pages of 4, six of them: 0 and 1 run with 2 each and 2 with 1 until 0 needs its third."""
    asked = [ask(0, 7, 12), ask(1, 7, 6), ask(2, 3, 6)]
    return run(asked, policy, pages=6, page_size=4, limits=Limits(token_budget=32, chunk=32))


@pytest.mark.parametrize("policy", ["prefill-first", "chunked"])
def test_preemption_step_by_step(policy: str) -> None:
    done = squeezed(policy)
    assert done.trace == [
        "p0:7 p1:7 p2:3",
        "d0 d1 d2",  # 8, 8 and 4 tokens: 5 pages, full to the last slot
        "d0 d1",  # 0 takes the sixth page, 1 needs a seventh: 2 goes, the youngest
        "d0 d1",
        "d0 d1",
        "d0 d1",  # 1 ends here; 0 goes on with 12 tokens in 3 pages
        "d0 r2:5" if policy == "chunked" else "r2:5",
        *["d0 d2"] * 3,
        *["d0"] * (2 if policy == "chunked" else 3),
    ]
    assert [row.num_preempted for row in done.work[:4]] == [0, 0, 1, 0]
    assert done.work[2].num_waiting == 1 and done.work[2].num_running == 2


@pytest.mark.parametrize("policy", ["prefill-first", "chunked"])
def test_recomputed_tokens_are_counted_exactly(policy: str) -> None:
    """2 had 4 tokens in the cache and a fifth sampled: 4 of the 5 were computed before."""
    done = squeezed(policy)
    victim = done.records[2]
    assert (victim.preemptions, victim.recomputed_tokens) == (1, 4)
    assert sum(row.recompute_tokens or 0 for row in done.work) == 4
    assert [(e.kind, e.request) for e in done.events] == [("preempt", 2)]
    assert "4 tokens" in done.events[0].detail
    assert done.outputs[2] == alone(ask(2, 3).tokens, 6)


def test_a_recompute_in_chunks_ends_with_the_decode_it_interrupted() -> None:
    """2 goes twice, with 7 and with 8 tokens in the cache.

    The token sampled last was never computed: the first time it shares a chunk of 2 with an old
    one, the second time it is left over and so is the decode that it always was.
    """
    asked = [ask(0, 7, 12), ask(1, 7, 6), ask(2, 4, 6)]
    done = run(asked, pages=6, page_size=4, limits=Limits(token_budget=32, chunk=2))
    assert done.records[2].preemptions == 2
    assert done.trace[9:15] == ["d0 r2:2"] * 4 + ["d0"] * 2
    assert done.trace[15:] == ["r2:2"] * 4 + ["d2"]
    again = [row.recompute_tokens for row in done.work if row.recompute_tokens]
    assert again == [2, 2, 2, 1, 2, 2, 2, 2] and done.records[2].recomputed_tokens == 15


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """3 waits and would fit into the page that the victim gave back."""
    asked = [ask(0, 8, 9), ask(1, 8, 9), ask(2, 8, 9), ask(3, 1, 2, arrival_ns=2)]
    done = run(asked, pages=6, page_size=4, limits=Limits(max_seqs=3))
    rows = [row for row in done.work if row.num_preempted]
    assert rows and all(row.num_admitted == 0 for row in rows)


def careless(view: View) -> list[Grant]:
    """Grants everything to everybody, the youngest first, without a look at the pages."""
    return [Grant(r, r.todo) for r in [*reversed(view.running), *view.waiting]]


def test_admission_stops_when_pages_ran_out_unforeseen() -> None:
    """1 has 3 of the 4 pages; when it goes, there would be room for 2, but not in this step."""
    asked = [ask(0, 4, 6), ask(1, 9, 6), ask(2, 1, 1, arrival_ns=5)]
    done = run(asked, replace(policy_named("chunked"), assign=careless), pages=4, page_size=4)
    assert done.trace[:2] == ["p0:4 p1:9", "d0"]
    assert [(r.num_preempted, r.num_admitted) for r in done.work[:2]] == [(0, 2), (1, 0)]
    assert done.work[1].num_waiting == 2


def test_a_victim_already_in_the_plan_leaves_it() -> None:
    """1 got its decode first, then 0 needs its pages: in that step only 0 computes."""
    asked = [ask(0, 4, 6), ask(1, 9, 6)]
    done = run(asked, replace(policy_named("chunked"), assign=careless), pages=4, page_size=4)
    assert done.trace[1] == "d0" and done.records[1].preemptions == 1
    assert done.outputs == {i: alone(ask(i, n).tokens, 6) for i, n in ((0, 4), (1, 9))}


def test_pages_that_decodes_are_about_to_take_are_not_given_to_a_prompt() -> None:
    """0 fills its page to the last slot; the free one is its next, not 1's."""
    done = run([ask(0, 4, 3), ask(1, 3, 1, arrival_ns=5)], "prefill-first", pages=2, page_size=4)
    assert done.trace == ["p0:4", "d0", "d0", "p1:3"] and done.preemptions == 0


@pytest.mark.parametrize("policy", ["prefill-first", "chunked"])
def test_victims_are_the_youngest_and_return_in_order(policy: str) -> None:
    asked = [ask(i, 8, 20) for i in range(4)] + [ask(9, 4, 2, arrival_ns=30)]
    done = run(asked, policy, pages=12, page_size=4)
    victims = [e.request for e in done.events if e.kind == "preempt"]
    assert victims[0] == 3 and 0 not in victims
    admissions: list[int] = []
    for pieces in done.scheduler.slices:
        admissions += [i for i, kind, start, _ in pieces if kind != "decode" and start == 0]
    firsts = [admissions.index(i) for i in (0, 1, 2, 3, 9)]
    assert firsts == sorted(firsts)
    assert admissions.index(9) > admissions.index(3, firsts[3] + 1), "9 arrived after 3"


def test_a_victim_has_nothing_computed_and_no_pages() -> None:
    done = run([ask(0, 7, 12), ask(1, 7, 6), ask(2, 3, 6)], pages=6, page_size=4)
    again = [p for pieces in done.scheduler.slices for p in pieces if p[1] == "recompute"]
    assert again[0] == (2, "recompute", 0, 5)


# ------------------------------------------------------------------ whatever comes


@dataclass(frozen=True)
class World:
    policy: str
    pages: int
    page_size: int
    limits: Limits
    asked: list[tuple[int, int, int]]  # prompt tokens, max_tokens, arrival
    eos: list[int]

    def requests(self) -> list[Request]:
        return [ask(i, p, m, arrival_ns=a) for i, (p, m, a) in enumerate(self.asked)]

    def expected(self, request: Request) -> tuple[list[int], str]:
        """Its outputs and its end, from the request and the sizes alone."""
        text = alone(request.tokens, request.sampling.max_tokens, self.eos)
        prompt = request.prompt_tokens
        room = self.pages * self.page_size
        if prompt in (0, *range(self.limits.max_context, prompt + 1)) or prompt > room:
            return [], "error"
        text = text[: self.limits.max_context - prompt]
        if prompt + len(text) - 1 > room:  # the last token is never computed
            return text[: room - prompt + 1], "error"
        return text, "eos" if text[-1] in self.eos else "length"


worlds = st.builds(
    World,
    policy=st.sampled_from(sorted(POLICIES)),
    pages=st.integers(1, 24),
    page_size=st.sampled_from([1, 2, 3, 7, 16]),
    limits=st.builds(
        Limits,
        max_seqs=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk=st.integers(1, 40),
        max_context=st.sampled_from([20, 60, 500]),
    ),
    asked=st.lists(
        st.tuples(st.integers(0, 45), st.integers(1, 25), st.integers(0, 300)),
        min_size=1,
        max_size=8,
    ),
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=12),
)
TIGHT = World("chunked", 7, 3, Limits(4, 5, 2), [(4, 20, 0)] * 5, [])


@settings(max_examples=400, deadline=None)
@given(worlds)
@example(TIGHT)
@example(replace(TIGHT, policy="prefill-first"))
@example(replace(TIGHT, policy="static"))
@example(replace(TIGHT, limits=Limits(6, 1, 1)))
def test_every_request_gets_its_own_text_and_every_page_comes_back(world: World) -> None:
    """Policy, batch, chunk, pages and preemption never change a token; nobody starves."""
    done = run(world.requests(), world.policy, pages=world.pages, page_size=world.page_size,
               limits=world.limits, eos=world.eos)  # fmt: skip
    for request in world.requests():
        outputs, reason = world.expected(request)
        record = done.records[request.id]
        assert done.outputs[request.id] == outputs
        assert (record.finish_reason, record.output_tokens) == (reason, len(outputs))
        assert (record.error is not None) == (reason == "error")
    assert done.complete
    assert done.scheduler.pool.free == world.pages and not done.scheduler.busy
    counts_agree(done, never_chosen=POLICIES[world.policy].evict is nobody)
    if POLICIES[world.policy].order is fcfs:
        oldest_first(done, world.policy)


def counts_agree(done: Outcome, never_chosen: bool) -> None:
    """The rows, the records and the events tell one story."""
    records = done.records.values()
    assert sum(r.num_preempted or 0 for r in done.steps) == done.preemptions
    assert len([e for e in done.events if e.kind == "preempt"]) == done.preemptions
    assert sum(r.recompute_tokens or 0 for r in done.steps) == sum(
        r.recomputed_tokens for r in records
    )
    assert sum(r.num_output_tokens or 0 for r in done.steps) == sum(
        r.output_tokens for r in records
    )
    assert sum(r.num_finished or 0 for r in done.steps) == len(done.records)
    admitted = sum(r.admitted_ns is not None for r in records)
    assert sum(r.num_admitted or 0 for r in done.steps) == admitted + done.preemptions
    for row in done.work:
        if row.num_preempted and never_chosen:
            assert row.num_admitted == 0


def oldest_first(done: Outcome, policy: str) -> None:
    """Whoever is oldest in a step computes in it, unless it decodes and prompts go first."""
    age = {r.id: (r.arrival_ns, r.id) for r in done.requests.values()}
    last = {i: n for n, pieces in enumerate(done.scheduler.slices) for i, *_ in pieces}
    first: dict[int, int] = {}
    for n, pieces in enumerate(done.scheduler.slices):
        for i, *_ in pieces:
            first.setdefault(i, n)
    for n, pieces in enumerate(done.scheduler.slices):
        alive = [i for i in first if first[i] <= n <= last[i]]
        oldest = min(alive, key=lambda i: age[i])
        blocked = policy == "prefill-first" and all(kind != "decode" for _, kind, *_ in pieces)
        assert blocked or oldest in {i for i, *_ in pieces}
    entered = sorted(first, key=lambda i: (first[i], age[i]))
    assert entered == sorted(first, key=lambda i: age[i]), "first come, first served"
    if first:
        assert done.records[min(first, key=lambda i: age[i])].preemptions == 0
