"""The prefix cache by hash: a full page is known by the hash of its tokens and all before them."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from stepscope.engine.kv import PagePool
from stepscope.engine.prefix import MISS, Hit, Prefixed

DIGEST_BYTES = 16  # two prefixes never share a digest: 2^64 pages would be needed for a likely one


class HashedPages:
    """digest -> page, least recently used first; a page always comes before the one it follows.

    So the end of a sequence goes before its beginning, without which it would be out of reach.
    """

    def __init__(self, pool: PagePool) -> None:
        self.version = 0
        self._pool = pool
        self._pages: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._pages)

    def look(self, request: Prefixed) -> Hit:
        most = (len(request.tokens) - 1) // self._pool.page_size
        pages = []
        for digest in self._digests(request, most):
            page = self._pages.get(digest)
            if page is None:
                break
            pages.append(page)
        return Hit(len(pages) * self._pool.page_size, pages) if pages else MISS

    def use(self, request: Prefixed) -> Hit:
        hit = self.look(request)
        self._touch(request.digests[: len(hit.pages)])
        return hit

    def store(self, request: Prefixed, computed: int, pages: Sequence[int]) -> None:
        digests = self._digests(request, computed // self._pool.page_size)
        for digest, page in zip(digests, pages, strict=False):
            if digest not in self._pages:  # else the request keeps its own copy to itself
                self._pages[digest] = page
                self._pool.keep(page)
                self.version += 1
        self._touch(digests)

    def in_use(self, hit: Hit) -> int:
        return sum(self._pool.refs[page] > 0 for page in hit.pages)

    def evict(self, count: int) -> int:
        before, looked = self._pool.free, 0
        while self._pool.free - before < count and looked < len(self._pages):
            digest, page = next(iter(self._pages.items()))
            if self._pool.refs[page]:  # in use is recently used
                self._pages.move_to_end(digest)
                looked += 1
                continue
            del self._pages[digest]
            self._pool.drop(page)
            self.version += 1
        return self._pool.free - before

    def clear(self) -> None:
        for page in self._pages.values():
            self._pool.drop(page)
        self._pages.clear()
        self.version += 1

    def _touch(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):
            self._pages.move_to_end(digest)

    def _digests(self, request: Prefixed, count: int) -> list[bytes]:
        """Those of the first `count` pages; tokens only ever grow, so they are kept."""
        known, size = request.digests, self._pool.page_size
        for index in range(len(known), count):
            tokens = array("q", request.tokens[index * size : (index + 1) * size])
            before = known[-1] if known else b""
            known.append(blake2b(before + tokens.tobytes(), digest_size=DIGEST_BYTES).digest())
        return known[:count]
