"""Random schedules over a cache that knows what it should hold: no page and no request is lost.

The content runner writes into each row which text it belongs to and checks every row it reads; the
watched scheduler checks after every step who owns which page. STEPSCOPE_WALK_STEPS=1000000 walks
further than the everyday suite does.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.kv import HostPages
from stepscope.engine.policies import POLICIES
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from tests.engine.harness import VOCAB, Outcome, alone, ask, build, finish, run

STEPS = int(os.environ.get("STEPSCOPE_WALK_STEPS", "50000"))
FORMS = ("off", "hash", "radix")


@dataclass(frozen=True)
class World:
    policy: str
    pages: int
    page_size: int
    limits: Limits
    prefix: str
    swap: bool
    swap_pages: int | None
    asked: list[tuple[list[int], int, int]]  # prompt, max_tokens, arrival
    overlap: bool = False

    def requests(self) -> list[Request]:
        return [ask(i, p, m, arrival_ns=a) for i, (p, m, a) in enumerate(self.asked)]

    def build(self) -> Outcome:
        return build(
            self.requests(),
            self.policy,
            pages=self.pages,
            page_size=self.page_size,
            limits=self.limits,
            prefix=self.prefix,
            swap=self.swap,
            overlap=self.overlap,
            swap_pages=self.swap_pages,
        )

    def expected(self, request: Request) -> tuple[list[int], str]:
        text = alone(request.tokens, request.sampling.max_tokens)
        room = self.pages * self.page_size
        prompt = request.prompt_tokens
        if prompt > room:
            return [], "error"
        if prompt + len(text) - 1 > room:
            return text[: room - prompt + 1], "error"
        return text, "length"


def check_end(world: World, done: Outcome) -> None:
    """Everybody got the text they would get alone, and every page came back."""
    for request in world.requests():
        outputs, reason = world.expected(request)
        record = done.records[request.id]
        assert (done.outputs[request.id], record.finish_reason) == (outputs, reason)
    check_empty(done)
    hits = sum(row.prefix_hit_tokens or 0 for row in done.steps)
    assert hits == sum(record.cached_tokens or 0 for record in done.records.values())
    again = [e for e in done.events if e.kind == "preempt" and "no room" in e.detail]
    assert len(again) == done.scheduler.num_unswapped
    if world.swap and not again:
        assert not sum(row.recompute_tokens or 0 for row in done.steps)
    swapped = [row.swapped_pages for row in done.steps if row.swapped_pages]
    assert len(swapped) == len([e for e in done.events if e.kind == "swap"])


def check_empty(done: Outcome) -> None:
    scheduler = done.scheduler
    assert not scheduler.busy and scheduler.memory.host.used == 0
    assert scheduler.pool.used == 0 and not any(scheduler.pool.refs)
    if scheduler.memory.prefix is not None:
        scheduler.memory.prefix.clear()
    assert (scheduler.pool.free, scheduler.pool.idle) == (scheduler.pool.total, 0)


# ------------------------------------------------------------------ whatever comes


beginnings = st.sampled_from([[], [5] * 9, list(range(20)), [*range(13), 77, 78]])
prompts = st.builds(
    lambda begin, end: [*begin, *end] or [1],
    beginnings,
    st.lists(st.integers(0, VOCAB - 1), max_size=14),
)
worlds = st.builds(
    World,
    policy=st.sampled_from(sorted(POLICIES)),
    pages=st.integers(1, 30),
    page_size=st.sampled_from([1, 2, 3, 4, 7, 16]),
    limits=st.builds(
        Limits,
        max_seqs=st.integers(1, 6),
        token_budget=st.integers(1, 40),
        chunk=st.integers(1, 40),
    ),
    prefix=st.sampled_from(FORMS),
    swap=st.booleans(),
    swap_pages=st.sampled_from([None, 0, 1, 3, 8]),
    asked=st.lists(
        st.tuples(prompts, st.integers(1, 25), st.integers(0, 300)), min_size=1, max_size=8
    ),
    overlap=st.booleans(),
)


@settings(max_examples=400, deadline=None)
@given(worlds)
def test_prefix_cache_and_preemption_change_no_text_and_lose_no_page(world: World) -> None:
    done = finish(world.build())
    assert done.complete
    check_end(world, done)


@settings(max_examples=100, deadline=None)
@given(worlds, st.integers(1, 40))
def test_an_interrupt_at_any_step_gives_every_page_back(world: World, steps: int) -> None:
    outcome = world.build()
    outcome.engine.on_step = lambda row: setattr(outcome.engine, "stopping", row.step >= steps)
    done = finish(outcome)
    check_empty(done)
    assert all(r.finish_reason for r in done.records.values() if r.queued_ns is not None)


# ------------------------------------------------------------------ a long walk


def random_world(random: Random) -> World:
    size = random.choice([1, 1, 2, 3, 4, 8, 16])
    begins = [[random.randrange(VOCAB) for _ in range(random.randrange(40))] for _ in range(3)]

    def prompt() -> list[int]:
        begin = random.choice(begins)
        begin = begin[: random.randrange(len(begin) + 1)] if random.random() < 0.3 else begin
        return [*begin, *(random.randrange(VOCAB) for _ in range(random.randrange(1, 20)))]

    moment, asked = 0, []
    for _ in range(random.randrange(5, 40)):
        moment += random.choice([0, 0, 10, 40, 200, 2000])
        asked.append((prompt(), random.randrange(1, 40), moment))
    tokens = random.choice([60, 100, 160, 300, 1000])
    return World(
        random.choice(sorted(POLICIES)),
        max(tokens // size, 1),
        size,
        Limits(random.randrange(1, 9), random.randrange(1, 80), random.randrange(1, 80)),
        random.choice(FORMS),
        random.random() < 0.5,
        random.choice([None, None, 0, 2, 10]),
        asked,
        random.random() < 0.5,
    )


def test_a_long_random_walk_loses_nothing() -> None:
    random, steps, worlds_seen = Random(17), 0, 0
    totals = dict.fromkeys(("prefix_hit_tokens", "evicted_pages", "swapped_pages"), 0)
    preempted = 0
    while steps < STEPS:
        world = random_world(random)
        done = finish(world.build())
        check_end(world, done)
        steps += len(done.scheduler.trace)
        worlds_seen += 1
        preempted += done.preemptions
        for name in totals:
            totals[name] += sum(getattr(row, name) or 0 for row in done.steps)
    print(f"{steps:,} steps of {worlds_seen:,} worlds, {preempted:,} preemptions, {totals}")
    assert preempted > STEPS / 500 and all(count > STEPS / 500 for count in totals.values())


# ------------------------------------------------------------------ what a hit saves


def shared_prompts(count: int = 6, common: int = 50) -> list[Request]:
    """One after the other, so that each finds what the one before has left."""
    begin = [(7 * i + 1) % VOCAB for i in range(common)]
    return [
        ask(i, [*begin, *((31 * i + j) % VOCAB for j in range(9 + i))], 5, arrival_ns=i * 10_000)
        for i in range(count)
    ]


def computed(done: Outcome) -> int:
    return sum(row.sum_prefill_tokens or 0 for row in done.steps)


@pytest.mark.parametrize("policy", ["static", "prefill-first", "chunked"])
@pytest.mark.parametrize(
    "form,size,each", [("hash", 16, 48), ("hash", 1, 50), ("radix", 16, 50), ("radix", 256, 50)]
)
def test_computed_tokens_fall_by_exactly_the_hits(
    form: str, size: int, each: int, policy: str
) -> None:
    plain = run(shared_prompts(), policy, page_size=size)
    cached = run(shared_prompts(), policy, page_size=size, prefix=form)
    hits = [cached.records[i].cached_tokens for i in range(6)]
    assert hits == [0] + [each] * 5
    saved = computed(plain) - computed(cached)
    assert saved == sum(row.prefix_hit_tokens or 0 for row in cached.work) == 5 * each
    assert cached.outputs == plain.outputs
    assert all(row.prefix_hit_tokens is None for row in plain.work)
    assert all(record.cached_tokens is None for record in plain.records.values())


@pytest.mark.parametrize("form,size,computes", [("hash", 4, 4), ("radix", 4, 1), ("hash", 1, 1)])
def test_a_prompt_that_is_all_in_the_cache_computes_a_token(
    form: str, size: int, computes: int
) -> None:
    prompt = ask(0, 16).tokens
    asked = [ask(0, prompt, 3), ask(1, prompt, 3, arrival_ns=10_000)]
    done = run(asked, page_size=size, prefix=form)
    assert done.scheduler.slices[3] == [(1, "prefill", 16 - computes, computes)]
    assert done.outputs[0] == done.outputs[1]


@pytest.mark.parametrize("form", ["hash", "radix"])
def test_a_prompt_that_fills_the_pool_hits_itself(form: str) -> None:
    """There is no page to copy the last one into: the rows in it are computed again instead."""
    prompt = ask(0, 16).tokens
    done = run(
        [ask(0, prompt, 1), ask(1, prompt, 1, arrival_ns=10_000)],
        pages=4,
        page_size=4,
        prefix=form,
    )
    assert done.records[1].cached_tokens == 12 and done.outputs[0] == done.outputs[1]


@pytest.mark.parametrize("form", ["hash", "radix"])
def test_running_requests_share_pages(form: str) -> None:
    """10 requests of 40 tokens fit where 5 would, because 36 of the tokens are the same."""
    begin = list(range(36))
    asked = [ask(i, [*begin, 100 + i, 1, 2, 3], 30, arrival_ns=min(i, 1) * 200) for i in range(10)]
    limits = Limits(max_seqs=10)
    plain = run(asked, pages=60, page_size=4, limits=limits)
    assert max(row.num_running or 0 for row in plain.work) <= 5
    again = [ask(i, r.tokens[:40], 30, arrival_ns=r.arrival_ns) for i, r in plain.requests.items()]
    shared = run(again, pages=60, page_size=4, limits=limits, prefix=form)
    assert max(row.num_running or 0 for row in shared.work) >= 8
    assert shared.outputs == plain.outputs


@pytest.mark.parametrize("form,each", [("hash", 48), ("radix", 50)])
def test_lpm_lets_a_burst_compute_its_common_beginning_once(form: str, each: int) -> None:
    """First come, first served computes it for all that fit into the step."""
    limits = Limits(token_budget=1000, chunk=1000)

    def hits(policy: str) -> list[int | None]:
        burst = [ask(r.id, r.tokens, 5) for r in shared_prompts()]
        done = run(burst, policy, limits=limits, prefix=form)
        return [done.records[i].cached_tokens for i in range(6)]

    assert hits("lpm") == [0] + [each] * 5
    assert hits("chunked") == [0] * 6


def test_evictions_are_recorded_and_spare_the_newest() -> None:
    """Pages for two texts of 16: the third comes back to what the second, not the first, left."""
    texts = [ask(i, 16).tokens for i in range(3)]
    order = (0, 1, 2, 1, 0)
    asked = [ask(i, texts[t], 1, arrival_ns=i * 10_000) for i, t in enumerate(order)]
    done = run(asked, pages=8, page_size=4, prefix="hash")
    assert [done.records[i].cached_tokens for i in range(5)] == [0, 0, 0, 12, 0]
    evicted = [row.evicted_pages for row in done.work]
    # Its last page holds the token that is always computed, so the fourth one takes a page for it.
    assert evicted == [0, 0, 4, 1, 4]
    events = [e.detail for e in done.events if e.kind == "evict"]
    assert events == ["4 cached pages", "1 cached page", "4 cached pages"]


def test_what_a_preempted_request_computed_is_found_again() -> None:
    """It leaves its pages to the cache; what nobody took meanwhile is not computed again."""
    asked = [ask(0, 7, 12), ask(1, 7, 6), ask(2, 3, 6)]
    limits = Limits(token_budget=32, chunk=32)
    off = run(asked, pages=6, page_size=4, limits=limits)
    on = run(
        [ask(0, 7, 12), ask(1, 7, 6), ask(2, 3, 6)],
        pages=6,
        page_size=4,
        limits=limits,
        prefix="radix",
    )
    assert off.preemptions == on.preemptions == 1 and on.outputs == off.outputs


# ------------------------------------------------------------------ swapping


def squeezed(
    swap: bool, policy: str = "chunked", prefix: str = "off", swap_pages: int | None = None
) -> Outcome:
    asked = [ask(0, 7, 12), ask(1, 7, 6), ask(2, 3, 6)]
    limits = Limits(token_budget=32, chunk=32)
    options = {"swap": swap, "prefix": prefix, "swap_pages": swap_pages}
    return run(asked, policy, pages=6, page_size=4, limits=limits, **options)


@pytest.mark.parametrize("policy", ["prefill-first", "chunked"])
def test_swapping_computes_nothing_twice(policy: str) -> None:
    done = squeezed(True, policy)
    assert [" ".join(sorted(step.split())) for step in done.trace] == [
        "p0:7 p1:7 p2:3",
        "d0 d1 d2",
        "d0 d1",  # 2 goes, with its 4 tokens in one page
        "d0 d1",
        "d0 d1",
        "d0 d1",  # 1 ends here
        "d0 d2",  # and 2 goes on where it was
        *["d0 d2"] * 3,
        *["d0"] * 2,
    ]
    victim = done.records[2]
    assert (victim.preemptions, victim.recomputed_tokens) == (1, 0)
    assert [row.swapped_pages for row in done.work] == [0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    swaps = [(e.kind, e.detail) for e in done.events if e.kind != "preempt"]
    assert swaps == [("swap", "1 page out, 0 back"), ("swap", "0 pages out, 1 back")]
    preempts = [(e.request, e.detail) for e in done.events if e.kind == "preempt"]
    assert preempts == [(2, "4 tokens swapped out")]
    assert done.outputs == squeezed(False, policy).outputs


def test_who_finds_no_room_on_the_host_is_computed_again() -> None:
    """The victim has one page: a limit of one changes nothing, none makes it a recomputation."""
    assert squeezed(True, swap_pages=1).trace == squeezed(True).trace
    done = squeezed(True, swap_pages=0)
    assert done.trace == squeezed(False).trace and done.outputs == squeezed(False).outputs
    assert done.records[2].recomputed_tokens == 4
    assert done.scheduler.num_unswapped == 1
    assert [e.detail for e in done.events] == [
        "4 tokens to compute again: the host has no room for its pages"
    ]
    assert {row.swapped_pages for row in done.work} == {0}


def test_places_on_the_host_are_counted() -> None:
    host = HostPages(3)
    first = host.take(2)
    assert first is not None and host.take(2) is None and host.used == 2
    second = host.take(1)
    assert second is not None and not set(first) & set(second)
    host.give_back(first)
    assert host.take(2) is not None and host.take(1) is None
    assert HostPages().take(10_000) is not None and HostPages(0).take(0) == []


def test_the_time_of_swapping_is_a_told_part_of_prepare() -> None:
    done = squeezed(True)
    for row in done.work:
        assert (row.swap_ns is not None) == bool(row.swapped_pages)
        assert (row.swap_ns or 0) <= (row.prepare_ns or 0)
    swaps = [e for e in done.events if e.kind == "swap"]
    rows = [row for row in done.work if row.swapped_pages]
    for event, row in zip(swaps, rows, strict=True):
        assert row.begin_ns < event.begin_ns < event.end_ns < row.end_ns
        assert event.end_ns - event.begin_ns == row.swap_ns
    assert all(row.swapped_pages is None for row in squeezed(False).work)


def test_the_content_runner_would_notice_a_wrong_share() -> None:
    """The walk above can fail: a hit on pages of another text is found at once."""
    outcome = build(shared_prompts(2), prefix="hash")
    cache = outcome.scheduler.memory.prefix
    assert cache is not None
    use = cache.use
    cache.use = lambda request: replace(  # type: ignore[method-assign]
        use(request), pages=list(reversed(use(request).pages))
    )
    with pytest.raises(AssertionError, match="reads a wrong row"):
        finish(outcome)
