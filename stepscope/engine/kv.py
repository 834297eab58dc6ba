"""The page pool: which pages of the KV cache are free, and who holds the others."""

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
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._held)

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing taken) when there are fewer."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def give_back(self, pages: Iterable[int]) -> None:
        """Raises ValueError for a page that is not held: a page freed twice is a bug."""
        for page in pages:
            if page not in self._held:
                raise ValueError(f"page {page} is freed but nobody holds it")
            self._held.remove(page)
            self._free.append(page)
