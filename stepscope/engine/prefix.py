"""The prefix cache: what a prompt begins with may have been computed for another one before.

Two forms behind one interface. `hash` remembers full pages by a chained hash of their contents;
`radix` remembers token sequences in a tree and can end a hit inside a page, whose rows are then
copied into a page of the request's own (copy-on-write).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from stepscope.engine.kv import PagePool


@dataclass(frozen=True, slots=True)
class Hit:
    """`tokens` leading tokens are in the cache.

    pages: those that hold only such tokens, to be shared. If the hit ends inside a page, its first
    `rows` rows are in page `tail`, to be copied.
    """

    tokens: int = 0
    pages: Sequence[int] = ()
    tail: int | None = None
    rows: int = 0


MISS = Hit()


class Prefixed(Protocol):
    """A request as a prefix cache sees it."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def digests(self) -> list[bytes]:
        """Chained hashes of its first pages, as far as they were needed yet."""


class PrefixCache(Protocol):
    version: int  # changes with what is in the cache

    def look(self, request: Prefixed) -> Hit:
        """The longest hit that leaves at least one token to compute. Changes nothing."""

    def use(self, request: Prefixed) -> Hit:
        """The same hit, now the most recently used."""

    def store(self, request: Prefixed, computed: int, pages: Sequence[int]) -> None:
        """Remember the first `computed` tokens, whose K and V lie in these pages."""

    def in_use(self, hit: Hit) -> int:
        """Pages of the hit that are shared and that a request holds."""

    def evict(self, count: int) -> int:
        """Free so many pages, least recently used first and none that a request holds.

        Returns how many were freed; fewer than `count` only when fewer were idle.
        """

    def clear(self) -> None:
        """Forget everything."""


def prefix_cache(form: str, pool: PagePool) -> PrefixCache | None:
    """form: off (None), hash or radix."""
    from stepscope.engine.prefix_hash import HashedPages
    from stepscope.engine.prefix_radix import RadixTree

    forms: dict[str, type[HashedPages] | type[RadixTree]] = {
        "hash": HashedPages,
        "radix": RadixTree,
    }
    return forms[form](pool) if form in forms else None
