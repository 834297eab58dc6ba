"""When a device that works by itself did each step, in the host clock's nanoseconds.

A mark is recorded between the pieces of work that are handed to the device and is reached when the
device comes to it. Marks are read a step or more later and only if they were reached, so measuring
never waits. Times are chained from one mark to the next: a CUDA event pair gives float32
milliseconds, which over a minute would lose microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from stepscope.records import FORWARD, GATHER, SAMPLE, StepRecord

ANCHOR_TRIES = 5


class Marks(Protocol):
    """Where marks come from: CUDA events, or a clock that another thread reads."""

    def record(self) -> Any:
        """A new mark behind everything that was handed to the device so far."""

    def reached(self, mark: Any) -> bool: ...

    def wait(self, mark: Any) -> None:
        """Block until it is reached: a synchronisation."""

    def between_ns(self, earlier: Any, later: Any) -> int: ...

    def reuse(self, mark: Any) -> None:
        """The mark was read and will not be looked at again."""


class ClockMarks:
    """Readings of the host's own clock, made by the thread that works."""

    def __init__(self, now: Callable[[], int]) -> None:
        self._now = now

    def record(self) -> int:
        return self._now()

    def reached(self, mark: int) -> bool:
        return True

    def wait(self, mark: int) -> None:
        return

    def between_ns(self, earlier: int, later: int) -> int:
        return later - earlier

    def reuse(self, mark: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class Anchor:
    """A mark whose host time is known, to within so many ns."""

    mark: Any
    ns: int
    uncertainty_ns: int


def clock_timeline(now: Callable[[], int]) -> Timeline:
    """Of a thread on the host, whose marks are readings of the run's clock."""
    return Timeline(ClockMarks(now), Anchor(0, 0, 0))


def anchor(marks: Marks, now: Callable[[], int]) -> Anchor:
    """Waits for an idle device a few times; the shortest wait tells best when the mark was.

    It lies between the clock readings before and after, hence in the middle give or take half.
    """
    found: list[Anchor] = []
    for _ in range(ANCHOR_TRIES):
        before = now()
        mark = marks.record()
        marks.wait(mark)
        after = now()
        found.append(Anchor(mark, (before + after) // 2, (after - before + 1) // 2))
    return min(found, key=lambda a: a.uncertainty_ns)


class Timeline:
    """Turns marks into times, in the order in which they were recorded."""

    def __init__(self, marks: Marks, start: Anchor) -> None:
        self.marks = marks
        self._mark, self._ns = start.mark, start.ns

    def step(self) -> Spans:
        return Spans(self)

    def read(self, mark: Any) -> int:
        """ns of a mark that was reached; later marks only from now on."""
        self._ns += self.marks.between_ns(self._mark, mark)
        self.marks.reuse(self._mark)
        self._mark = mark
        return self._ns

    def drift_ns(self, now: Callable[[], int]) -> int:
        """How far the chained time is ahead of the host's clock by now. Synchronises."""
        end = anchor(self.marks, now)
        return self.read(end.mark) - end.ns


@dataclass(slots=True)
class Spans:
    """One step on the device: `begin`, a mark after each piece of work, `end`."""

    timeline: Timeline
    _marks: list[tuple[int, Any]] = field(default_factory=list)  # phase that the mark ends
    _ended: bool = False
    expert_reads: int | None = None  # known when the step was computed

    def begin(self) -> None:
        self.mark(-1)

    def mark(self, phase: int) -> None:
        self._marks.append((phase, self.timeline.marks.record()))

    def end(self) -> None:
        """The last mark was recorded: the step may be read when the device has reached it."""
        self._ended = True

    def read(self, row: StepRecord, wait: bool) -> bool:
        """Write the device columns if the device is through with the step."""
        if not self._ended:
            return False
        marks, last = self.timeline.marks, self._marks[-1][1]
        if not marks.reached(last):
            if not wait:
                return False
            marks.wait(last)
        self._write(row)
        return True

    def _write(self, row: StepRecord) -> None:
        spent: dict[int, int] = {}
        before = row.dev_begin_ns = self.timeline.read(self._marks[0][1])
        for phase, mark in self._marks[1:]:
            now = self.timeline.read(mark)
            spent[phase] = spent.get(phase, 0) + now - before
            before = now
        row.dev_end_ns = before
        row.dev_gather_ns = spent.get(GATHER)
        row.dev_forward_ns = spent.get(FORWARD)
        row.dev_sample_ns = spent.get(SAMPLE)
        if self.expert_reads is not None:
            row.expert_reads = self.expert_reads
