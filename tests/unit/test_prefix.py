"""The pool's owners, and the prefix cache in its two forms, by themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.kv import HostPages, PagePool
from stepscope.engine.prefix import PrefixCache, prefix_cache
from stepscope.engine.prefix_radix import RadixTree, common

FORMS = ("hash", "radix")


@dataclass
class Text:
    """A request as a prefix cache sees it."""

    tokens: list[int]
    digests: list[bytes] = field(default_factory=list)


class Shelf:
    """A pool and a cache, and requests that came, were computed and went."""

    def __init__(self, form: str, pages: int = 64, size: int = 4) -> None:
        self.pool = PagePool(pages, size)
        made = prefix_cache(form, self.pool)
        assert made is not None
        self.cache: PrefixCache = made

    def hold(self, tokens: Sequence[int]) -> list[int]:
        """Computed without a look at the cache; the request is still there."""
        pages = self.pool.take(self.pool.pages_for(len(tokens)))
        assert pages is not None
        self.cache.store(Text(list(tokens)), len(tokens), pages)
        return pages

    def leave(self, tokens: Sequence[int]) -> list[int]:
        pages = self.hold(tokens)
        self.pool.give_back(pages)
        return pages

    def hit(self, tokens: Sequence[int]) -> int:
        return self.cache.look(Text(list(tokens))).tokens

    def use(self, tokens: Sequence[int]) -> int:
        return self.cache.use(Text(list(tokens))).tokens


# ------------------------------------------------------------------ owners of a page


def test_a_shared_page_is_free_when_the_last_owner_is_gone() -> None:
    pool = PagePool(2, 4)
    (page,) = pool.take(1) or []
    pool.share([page])
    pool.keep(page)
    pool.give_back([page])
    assert (pool.used, pool.free, pool.idle) == (1, 1, 0)
    pool.give_back([page])
    assert (pool.used, pool.free, pool.idle, pool.available) == (0, 1, 1, 2)
    pool.share([page])
    assert (pool.used, pool.idle) == (1, 0)
    pool.give_back([page])
    pool.drop(page)
    assert (pool.used, pool.free, pool.idle) == (0, 2, 0)


@pytest.mark.parametrize("deed", ["give_back", "share", "keep", "drop"])
def test_nothing_is_done_with_a_page_that_nobody_holds(deed: str) -> None:
    pool = PagePool(2, 4)
    with pytest.raises(ValueError, match="page 1"):
        getattr(pool, deed)(1 if deed in ("keep", "drop") else [1])
    assert (pool.free, pool.idle) == (2, 0)


def test_host_pages_are_unlimited_and_reused() -> None:
    host = HostPages()
    first = host.take(3)
    host.give_back(first[:2])
    again = host.take(3)
    assert len({*first[2:], *again}) == 4 and host.used == 4
    assert max(again) == 3, "places are reused before new ones are made"


# ------------------------------------------------------------------ hits


def test_off_is_no_cache() -> None:
    assert prefix_cache("off", PagePool(2, 4)) is None


@pytest.mark.parametrize(
    "form,hits",
    [  # stored: 10 tokens on pages of 4. Asked: so many of them, and then others
        ("hash", {0: 0, 3: 0, 4: 4, 7: 4, 8: 8, 10: 8}),
        ("radix", {0: 0, 3: 3, 4: 4, 7: 7, 8: 8, 10: 10}),
    ],
)
def test_what_is_found_of_a_stored_text(form: str, hits: dict[int, int]) -> None:
    shelf = Shelf(form)
    shelf.leave(range(10))
    for same, expected in hits.items():
        assert shelf.hit([*range(same), *range(50, 60)]) == expected


@pytest.mark.parametrize("form,hit", [("hash", 4), ("radix", 7)])
def test_the_last_token_is_never_taken_from_the_cache(form: str, hit: int) -> None:
    shelf = Shelf(form)
    shelf.leave(range(8))
    assert shelf.hit(range(8)) == hit
    assert shelf.hit(range(9)) == 8
    assert shelf.hit([0]) == 0


def test_a_hash_depends_on_all_that_came_before() -> None:
    shelf = Shelf("hash")
    shelf.leave([1, 2, 3, 4, 5, 6, 7, 8])
    assert shelf.hit([9, 9, 9, 9, 5, 6, 7, 8, 0]) == 0
    assert shelf.hit([5, 6, 7, 8, 0]) == 0


def test_a_radix_hit_inside_a_page_names_the_page_to_copy() -> None:
    shelf = Shelf("radix")
    pages = shelf.leave(range(10))
    hit = shelf.cache.look(Text([*range(6), 99, 98]))
    assert (list(hit.pages), hit.tail, hit.rows) == (pages[:1], pages[1], 2)
    full = shelf.cache.look(Text([*range(8), 99]))
    assert (list(full.pages), full.tail, full.rows) == (pages[:2], None, 0)


def test_two_branches_that_part_inside_a_page_have_a_page_each() -> None:
    shelf = Shelf("radix")
    first = shelf.leave([0, 1, 2, 3, 4, 5, 6, 7, 8])
    second = shelf.leave([0, 1, 2, 3, 4, 50, 60, 70, 80])
    one = shelf.cache.look(Text([0, 1, 2, 3, 4, 5, 6, 7, 99]))
    other = shelf.cache.look(Text([0, 1, 2, 3, 4, 50, 60, 70, 99]))
    assert list(one.pages) == first[:2]
    assert list(other.pages) == [first[0], second[1]], "its rows 0 and 1 are of the common part"


def test_a_text_that_grew_is_one_node() -> None:
    shelf = Shelf("radix")
    pages = shelf.pool.take(3) or []
    text = Text(list(range(12)))
    for computed in (3, 4, 6, 12):
        shelf.cache.store(text, computed, pages)
        assert shelf.hit([*range(computed), 99]) == computed
    assert isinstance(shelf.cache, RadixTree) and len(shelf.cache) == 1


@pytest.mark.parametrize("form", FORMS)
def test_looking_changes_nothing(form: str) -> None:
    shelf = Shelf(form)
    shelf.leave(range(8))
    shelf.leave(range(20, 28))
    before = shelf.cache.version
    shelf.hit([*range(6), 7])
    assert shelf.cache.version == before
    shelf.cache.evict(1)
    assert shelf.hit(range(9)) == 4, "the older text lost its end, although it was looked at"
    assert shelf.hit(range(20, 29)) == 8


# ------------------------------------------------------------------ eviction


@pytest.mark.parametrize("form", FORMS)
def test_the_least_recently_used_text_goes_first(form: str) -> None:
    shelf = Shelf(form, pages=6)
    texts = [list(range(b, b + 8)) for b in (0, 20, 40)]
    for text in texts:
        shelf.leave(text)
    assert shelf.use([*texts[0], 99]) == 8
    assert shelf.pool.free == 0
    assert shelf.cache.evict(2) == 2
    assert [shelf.hit([*text, 99]) for text in texts] == [8, 0, 8]
    assert shelf.cache.evict(2) == 2
    assert [shelf.hit([*text, 99]) for text in texts] == [8, 0, 0]


@pytest.mark.parametrize("form", FORMS)
def test_the_end_of_a_text_goes_before_its_beginning(form: str) -> None:
    shelf = Shelf(form)
    shelf.leave(range(8))
    shelf.leave([*range(4), *range(60, 68)])
    shelf.cache.evict(1)
    assert shelf.hit([*range(8), 99]) == 4
    shelf.cache.evict(2)
    assert shelf.hit([*range(4), *range(60, 68), 99]) >= 4


@pytest.mark.parametrize("form", FORMS)
def test_a_page_in_use_is_never_evicted(form: str) -> None:
    shelf = Shelf(form, pages=8)
    used = shelf.hold(range(8))
    shelf.leave(range(20, 28))
    assert shelf.cache.evict(8) == 2
    assert [shelf.pool.refs[page] for page in used] == [1, 1]
    assert shelf.hit([*range(8), 99]) == 8, "and it stays in the cache"


def test_an_idle_page_below_one_in_use_can_still_be_had() -> None:
    """The second text ends inside the first one's page, whose copy another request holds."""
    shelf = Shelf("radix", pages=4)
    (idle,) = shelf.leave(range(3))
    held = shelf.hold(range(6))
    assert held[0] != idle and shelf.pool.idle == 1
    assert shelf.cache.evict(1) == 1
    assert [shelf.pool.refs[page] for page in held] == [1, 1]
    assert shelf.pool.free == 2


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_cache_keeps_no_page(form: str) -> None:
    shelf = Shelf(form)
    for begin in (0, 3, 20):
        shelf.leave(range(begin, begin + 17))
    shelf.use([*range(7), 99])
    assert shelf.pool.free < 64
    shelf.cache.clear()
    assert (shelf.pool.free, shelf.pool.idle) == (64, 0) and shelf.hit(range(9)) == 0


# ------------------------------------------------------------------ whatever is stored

texts = st.lists(st.integers(0, 2), min_size=1, max_size=24)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FORMS), st.sampled_from([1, 2, 3, 4, 16]), st.lists(texts, max_size=8), texts
)
def test_the_hit_is_the_longest_common_beginning(
    form: str, size: int, stored: list[list[int]], asked: list[int]
) -> None:
    shelf = Shelf(form, pages=256, size=size)
    for text in stored:
        shelf.leave(text)
        shelf.use([*text[: len(text) // 2], 9])
    best = max((_shared(text, asked) for text in stored), default=0)
    if form == "hash":
        best = max((_shared(t[: len(t) // size * size], asked) for t in stored), default=0)
        best -= best % size
    most = len(asked) - 1
    assert shelf.hit(asked) == min(best, most if form == "radix" else most // size * size)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(FORMS),
    st.sampled_from([1, 2, 3, 4]),
    st.lists(st.tuples(texts, st.booleans(), st.integers(0, 5)), max_size=12),
)
def test_every_idle_page_can_be_had(
    form: str, size: int, deeds: list[tuple[list[int], bool, int]]
) -> None:
    """However texts share pages, evict frees as many as are idle and none that is held."""
    shelf = Shelf(form, pages=512, size=size)
    held: list[int] = []
    for text, leaves, evict in deeds:
        if leaves:
            shelf.leave(text)
        else:
            held += shelf.hold(text)
        shelf.use([*text[: len(text) // 2], 9])
        idle = shelf.pool.idle
        assert shelf.cache.evict(evict) >= min(evict, idle)
        assert shelf.pool.used == len(held)
    idle = shelf.pool.idle
    assert shelf.cache.evict(512) == idle and shelf.pool.idle == 0
    assert all(shelf.pool.refs[page] == 1 for page in held)
    shelf.pool.give_back(held)
    shelf.cache.clear()
    assert shelf.pool.free == 512


@given(texts, texts, st.integers(0, 24))
def test_common_counts_equal_tokens(edge: list[int], tokens: list[int], depth: int) -> None:
    depth = min(depth, len(tokens))
    assert common(edge, tokens, depth, len(tokens)) == _shared(edge, tokens[depth:])
