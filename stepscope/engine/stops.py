"""Stop strings in text that arrives piece by piece: what may be shown, and when to stop."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Holds text back while it might be the beginning of a stop string.

    The stop string that is complete first ends the text, and of several that end with the same
    character the longest: so the result does not depend on how tokens cut the text into pieces.
    The text is cut where that string begins; it is never shown itself.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stops)
        self.met = False
        self._held = ""

    def push(self, piece: str, armed: bool = True) -> str:
        """The text that is certain now. A stop string that ends in an unarmed piece is text."""
        if self.met:
            return ""
        before = len(self._held)
        self._held += piece
        begin = self._first(before) if armed else None
        self.met = begin is not None
        return self._release(self._certain() if begin is None else begin)

    def flush(self) -> str:
        """What was held back: no stop string will be completed any more."""
        return self._release(0 if self.met else len(self._held))

    def _first(self, before: int) -> int | None:
        """Where the first complete stop string begins, in `_held` of which `before` is old."""
        found = []
        for stop in self.stops:
            # It ends in what is new: the rest has been searched, or was not armed.
            begin = self._held.find(stop, max(before + 1 - len(stop), 0))
            if begin >= 0:
                found.append((begin + len(stop), begin))
        return min(found)[1] if found else None

    def _certain(self) -> int:
        """Characters before the earliest place where a stop string may have begun."""
        longest = max(map(len, self.stops), default=1)
        for begin in range(max(len(self._held) - longest + 1, 0), len(self._held)):
            tail = self._held[begin:]
            if any(stop.startswith(tail) and stop != tail for stop in self.stops):
                return begin
        return len(self._held)

    def _release(self, count: int) -> str:
        shown = self._held[:count]
        self._held = "" if self.met else self._held[count:]
        return shown
