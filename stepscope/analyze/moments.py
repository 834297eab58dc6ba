"""When events of a run lie over its steps."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter

from stepscope.records import Event, StepRecord


class EventIndex:
    """Which events overlap a span of time. Events of no duration are moments, not causes."""

    def __init__(self, events: list[Event]) -> None:
        self._events = sorted(
            (e for e in events if e.end_ns > e.begin_ns), key=lambda e: e.begin_ns
        )
        self._begins = [e.begin_ns for e in self._events]
        self._longest = max((e.end_ns - e.begin_ns for e in self._events), default=0)

    def overlaps(self, begin_ns: int, end_ns: int) -> Counter[str]:
        """ns of overlap by event kind."""
        found: Counter[str] = Counter()
        first = bisect_right(self._begins, begin_ns - self._longest - 1)
        for event in self._events[first : bisect_left(self._begins, end_ns)]:
            shared = min(end_ns, event.end_ns) - max(begin_ns, event.begin_ns)
            if shared > 0:
                found[event.kind] += shared
        return found

    def covers(self, row: StepRecord, kind: str) -> bool:
        """Whether events of this kind lie over half of the step or more."""
        return 2 * self.overlaps(row.begin_ns, row.end_ns)[kind] >= max(row.wall_ns, 1)
