"""Gives requests their pages and takes them back, also from and to the prefix cache and the host.

What has to be copied for that is not copied here: it is a list of `moves` for the runner, in order.
"""

from __future__ import annotations

from stepscope.engine.kv import HostPages, PagePool
from stepscope.engine.plan import Move
from stepscope.engine.prefix import MISS, Hit, PrefixCache
from stepscope.engine.request import Request


class Memory:
    """`moves` and `evicted` (pages) gather until the step that they belong to takes them."""

    def __init__(
        self, pool: PagePool, prefix: PrefixCache | None = None, host_pages: int | None = None
    ) -> None:
        """host_pages: how many may wait in host memory; None = any number."""
        self.pool = pool
        self.prefix = prefix
        self.host = HostPages(host_pages)
        self.moves: list[Move] = []
        self.evicted = 0

    def hold(self, request: Request, pages: int) -> bool:
        """Let it hold at least so many pages; False, and nothing taken, if it cannot."""
        taken = self._take(max(pages - len(request.pages), 0))
        if taken is None:
            return False
        request.pages.extend(taken)
        return True

    def enter(self, request: Request, tokens: int, pages: int) -> bool:
        """Let a waiting request hold `pages` pages, and enough for its next `tokens`.

        Its `computed` tokens are then those that were swapped out or that the prefix cache has.
        """
        if request.host_pages:
            return self._swap_in(request, tokens, pages)
        hit = self.prefix.use(request) if self.prefix is not None else MISS
        if self._borrow(request, hit, tokens, pages):
            return True
        # The page to copy from may be the very one that is missing: then its rows are computed.
        whole = Hit(hit.tokens - hit.rows, hit.pages)
        return hit.tail is not None and self._borrow(request, whole, tokens, pages)

    def remember(self, request: Request) -> None:
        """What it has computed so far may serve others from now on."""
        if self.prefix is not None and request.pages:  # not while it is swapped out
            known = min(request.computed, len(request.tokens))
            self.prefix.store(request, known, request.pages)

    def release(self, request: Request) -> None:
        self.pool.give_back(request.pages)
        del request.pages[:]
        self.host.give_back(request.host_pages)
        request.host_pages = []

    def swap_out(self, request: Request) -> bool:
        """Its computed pages go to the host, where they wait until it is admitted again.

        False, and nothing done, if the host has no room for them.
        """
        pages = request.pages[: self.pool.pages_for(request.computed)]
        places = self.host.take(len(pages))
        if places is None:
            return False
        self.moves += [Move("out", *pair) for pair in zip(pages, places, strict=True)]
        self.release(request)
        request.host_pages = places
        return True

    def _swap_in(self, request: Request, tokens: int, pages: int) -> bool:
        least = self.pool.pages_for(request.computed + min(tokens, request.todo))
        if not self.hold(request, max(pages, least)):
            return False
        places, request.host_pages = request.host_pages, []
        self.moves += [Move("in", *pair) for pair in zip(places, request.pages, strict=False)]
        self.host.give_back(places)
        return True

    def _borrow(self, request: Request, hit: Hit, tokens: int, pages: int) -> bool:
        """Share the pages of the hit, copy its tail, and take the rest."""
        tail = [] if hit.tail is None else [hit.tail]
        least = self.pool.pages_for(min(hit.tokens + tokens, request.length))
        # Shared first, so that nothing of the hit is evicted to make room for the rest.
        self.pool.share([*hit.pages, *tail])
        taken = self._take(max(pages, least) - len(hit.pages))
        if taken is None:
            self.pool.give_back([*hit.pages, *tail])
            return False
        request.pages.extend([*hit.pages, *taken])
        request.computed = hit.tokens
        if hit.tail is not None:
            self.moves.append(Move("copy", hit.tail, taken[0], hit.rows))
            self.pool.give_back(tail)
        return True

    def _take(self, count: int) -> list[int] | None:
        if count > self.pool.available:
            return None
        if count > self.pool.free and self.prefix is not None:
            self.evicted += self.prefix.evict(count - self.pool.free)
        return self.pool.take(count)
