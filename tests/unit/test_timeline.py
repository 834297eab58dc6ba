"""The device's times from marks that a fake device reaches when the test says so."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import pytest

from stepscope.device.timeline import Anchor, Timeline, anchor
from stepscope.engine.plan import Lap, StepPlan
from stepscope.records import FORWARD, GATHER, SAMPLE, StepRecord
from tests.engine.harness import Clock, ContentRunner, ask, build, finish


@dataclass(eq=False)
class Event:
    number: int
    at: int | None = None  # ns on the device's clock


class FakeDevice:
    """Events are reached one by one, `lag` of them behind the host; it counts who waits for it."""

    def __init__(self, clock: Clock, lag: int = 0, ahead_ns: int = 1_000_000) -> None:
        self.clock, self.lag, self.ahead = clock, lag, ahead_ns
        self.queue: deque[Event] = deque()
        self.made = self.waits = 0
        self.pool: list[Event] = []
        self.time = 0

    def work(self, ns: int) -> None:
        self.time = max(self.time, self.clock.ns) + ns

    def record(self) -> Event:
        event = self.pool.pop() if self.pool else self._new()
        event.at = max(self.time, self.clock.ns) + self.ahead
        self.queue.append(event)
        return event

    def _new(self) -> Event:
        self.made += 1
        return Event(self.made)

    def reached(self, mark: Event) -> bool:
        return mark not in list(self.queue)[-self.lag :] if self.lag else True

    def wait(self, mark: Event) -> None:
        self.waits += 1
        self.queue.clear()

    def between_ns(self, earlier: Event, later: Event) -> int:
        assert earlier.at is not None and later.at is not None, "an event was used after its reuse"
        return later.at - earlier.at

    def reuse(self, mark: Event) -> None:
        assert mark not in self.pool, "given back twice"
        mark.at = None
        self.pool.append(mark)


class DeviceRunner(ContentRunner):
    """Each step gathers 3, computes 20 and samples 4 ns on the fake device, in two layers."""

    def __init__(self, device: FakeDevice, timeline: Timeline) -> None:
        super().__init__(16)
        self.device, self.timeline = device, timeline
        self.read_in: list[tuple[int, int]] = []

    def prepare(self, plan: StepPlan) -> StepPlan:
        plan.spans = self.timeline.step()
        return super().prepare(plan)

    def forward(self, batch: StepPlan, lap: Lap) -> list[list[int]]:
        spans: Any = batch.spans
        spans.begin()
        for gather, forward in ((1, 8), (2, 12)):
            self.device.work(gather)
            spans.mark(GATHER)
            self.device.work(forward)
            spans.mark(FORWARD)
        return super().forward(batch, lap)

    def sample(self, logits: list[list[int]], batch: StepPlan) -> list[int]:
        spans: Any = batch.spans
        self.device.work(4)
        spans.mark(SAMPLE)
        spans.end()
        return super().sample(logits, batch)


def served(lag: int, overlap: bool) -> tuple[list[StepRecord], FakeDevice]:
    clock = Clock(tick=10)
    device = FakeDevice(clock, lag)
    start = anchor(device, clock.now)
    device.waits = 0
    runner = DeviceRunner(device, Timeline(device, start))
    asked = [ask(i, 5 + i, 6, arrival_ns=i * 300) for i in range(4)]
    done = finish(build(asked, runner=runner, clock=clock, overlap=overlap))
    return [row for row in done.steps if row.num_decode_requests is not None], device


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("lag", [0, 1, 6, 13])
def test_spans_are_summed_by_kind_whenever_they_are_reached(lag: int, overlap: bool) -> None:
    rows, device = served(lag, overlap)
    assert {(r.dev_gather_ns, r.dev_forward_ns, r.dev_sample_ns) for r in rows} == {(3, 20, 4)}
    assert all((r.dev_end_ns or 0) - (r.dev_begin_ns or 0) == 27 for r in rows)
    ends = [r.dev_end_ns or 0 for r in rows]
    assert ends == sorted(ends)
    # The last step may be waited for when the run is over; before that nobody waits.
    assert device.waits == (1 if lag else 0)


def test_events_are_pooled() -> None:
    rows, device = served(0, False)
    assert len(rows) > 8 and device.made < 3 * 6 + 5


def test_times_are_on_the_hosts_clock() -> None:
    rows, _ = served(0, False)
    for row in rows:
        begin = row.dev_begin_ns or 0
        assert row.begin_ns - 20 <= begin <= row.end_ns + 20, "aligned within the anchor's error"


def test_rows_that_wait_for_the_device_are_not_drained() -> None:
    clock = Clock(tick=10)
    device = FakeDevice(clock, lag=1000)
    runner = DeviceRunner(device, Timeline(device, anchor(device, clock.now)))
    made = build([ask(0, 5, 30)], runner=runner, clock=clock)
    for _ in range(5):
        made.engine.step()
    rows, _, _ = made.engine.recorder.drain(final=False)
    assert rows == []
    device.lag = 0
    rows, _, _ = made.engine.recorder.drain(final=False)
    assert [row.step for row in rows] == [0, 1, 2, 3, 4]
    assert all(row.dev_end_ns is not None for row in rows)


def test_a_step_that_never_ended_has_no_device_times() -> None:
    clock = Clock(tick=10)
    device = FakeDevice(clock)
    timeline = Timeline(device, anchor(device, clock.now))
    spans = timeline.step()
    spans.begin()
    row = StepRecord(0, "decode", 0, 1)
    assert not spans.read(row, wait=True) and row.dev_begin_ns is None


def test_the_anchor_is_the_best_of_several() -> None:
    clock = Clock()
    device = FakeDevice(clock)
    waits = iter([50, 7, 90, 30, 8])
    wait = device.wait

    def slow(mark: Event) -> None:
        clock.ns += next(waits)
        wait(mark)

    device.wait = slow  # type: ignore[method-assign]
    found = anchor(device, clock.now)
    assert isinstance(found, Anchor) and found.uncertainty_ns == 4
    assert found.ns == 50 + 7 // 2


def test_drift_is_what_the_chain_is_ahead_of_the_clock() -> None:
    clock = Clock()
    device = FakeDevice(clock)
    timeline = Timeline(device, anchor(device, clock.now))
    clock.ns += 1000
    device.ahead += 25  # the device's clock has run fast
    assert timeline.drift_ns(clock.now) == 25
