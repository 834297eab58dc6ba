"""The page pool: which pages of the KV cache are free, and who holds the others.

A page has two kinds of owners: requests that read or write it (`refs`) and entries of the prefix
cache that remember what it holds (`kept`). It is free when it has neither. A page that only the
prefix cache keeps is idle: full of use, but given up when pages run short.
"""

from __future__ import annotations

from collections.abc import Iterable

from stepscope.errors import UsageError


class PagePool:
    """Pages 0..total-1 of page_size tokens each. Page contents live with the runner, not here."""

    def __init__(self, total: int, page_size: int) -> None:
        if total < 1 or not 1 <= page_size <= 256:
            raise UsageError(
                f"a KV cache of {total} pages of {page_size} tokens is not possible; "
                "use at least one page and a page size from 1 to 256"
            )
        self.total = total
        self.page_size = page_size
        # Taken from the end: a page just freed is reused first, so pages scatter as in real use.
        self._free = list(range(total - 1, -1, -1))
        self.refs = [0] * total
        self._kept = [0] * total
        self.idle = 0

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that at least one request holds."""
        return self.total - self.free - self.idle

    @property
    def available(self) -> int:
        """Pages that can be taken once the prefix cache has given up its idle ones."""
        return self.free + self.idle

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """`count` pages for one request, or None (and nothing taken) when fewer are free."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self.refs[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more request holds these pages, none of which is free."""
        for page in pages:
            if not self.refs[page]:
                if not self._kept[page]:
                    raise ValueError(f"page {page} is shared but nobody holds it")
                self.idle -= 1
            self.refs[page] += 1

    def give_back(self, pages: Iterable[int]) -> None:
        """One request less. Raises ValueError for a page that is not held: freed twice is a bug."""
        for page in pages:
            if not self.refs[page]:
                raise ValueError(f"page {page} is freed but nobody holds it")
            self.refs[page] -= 1
            if self.refs[page]:
                continue
            if self._kept[page]:
                self.idle += 1
            else:
                self._become_free(page)

    def keep(self, page: int) -> None:
        """An entry of the prefix cache remembers this page, which a request or an entry holds."""
        if not self.refs[page] and not self._kept[page]:
            raise ValueError(f"page {page} is kept but nobody holds it")
        self._kept[page] += 1

    def drop(self, page: int) -> None:
        """An entry of the prefix cache forgets this page. Raises ValueError if none kept it."""
        if not self._kept[page]:
            raise ValueError(f"page {page} is dropped but nothing keeps it")
        self._kept[page] -= 1
        if not self._kept[page] and not self.refs[page]:
            self.idle -= 1
            self._become_free(page)

    def kept(self, page: int) -> bool:
        return self._kept[page] > 0

    def _become_free(self, page: int) -> None:
        self._free.append(page)


class HostPages:
    """Numbers for pages in host memory, where swapped-out requests wait; None = without a limit."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self._free: list[int] = []
        self._total = 0

    @property
    def used(self) -> int:
        return self._total - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """`count` places, or None (and nothing taken) when there are not so many."""
        if self.limit is not None and self.used + count > self.limit:
            return None
        fresh = max(0, count - len(self._free))
        self._free.extend(range(self._total, self._total + fresh))
        self._total += fresh
        return [self._free.pop() for _ in range(count)]

    def give_back(self, places: Iterable[int]) -> None:
        self._free.extend(places)
