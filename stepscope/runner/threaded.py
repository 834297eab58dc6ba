"""Overlap on a CPU: one thread computes, while the engine's own schedules the next step.

The thread is the device of such a run: what it does and when is in the `dev_*` columns, by the same
clock. Both threads share the cores and the interpreter, so a gain is not to be taken for granted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from stepscope.device.timeline import Anchor, ClockMarks, Spans, Timeline
from stepscope.engine.plan import Lap, Move, Runner, StepPlan
from stepscope.engine.request import TokenLogprobs
from stepscope.records import FORWARD, SAMPLE


@dataclass(slots=True)
class Work:
    """A batch of the inner runner, and the record of its being computed."""

    batch: Any
    plan: StepPlan
    spans: Spans


class ThreadedRunner:
    """Hands the steps of another runner to one thread, in order. `now` is the run's clock."""

    def __init__(self, inner: Runner, now: Callable[[], int]) -> None:
        self.inner = inner
        self._timeline = Timeline(ClockMarks(now), Anchor(0, 0, 0))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stepscope-runner")
        self._moved: Future[None] | None = None

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def move(self, moves: Sequence[Move]) -> None:
        """Before the next forward, behind the last one."""
        self._moved = self._thread.submit(self.inner.move, list(moves))

    def prepare(self, plan: StepPlan) -> Work:
        batch = self.inner.prepare(plan)
        spans = self._timeline.step()
        plan.spans, plan.syncs = spans, 1
        return Work(batch, plan, spans)

    def forward(self, batch: Work, lap: Lap) -> Future[Any]:
        moved, self._moved = self._moved, None

        def work() -> Any:
            if moved is not None:
                moved.result()  # what went wrong there would go unseen otherwise
            batch.spans.begin()
            logits = self.inner.forward(batch.batch, batch.spans.mark)
            batch.spans.expert_reads = batch.plan.expert_reads
            return logits

        future = self._thread.submit(work)
        lap(FORWARD)
        return future

    def sample(self, logits: Future[Any], batch: Work) -> Future[Any]:
        def work() -> Any:
            sampled = self.inner.sample(logits.result(), batch.batch)
            batch.spans.mark(SAMPLE)
            batch.spans.end()
            return sampled

        return self._thread.submit(work)

    def fetch(self, sampled: Future[Any]) -> Sequence[int]:
        return self.inner.fetch(sampled.result())

    def logprobs(self, batch: Work) -> Sequence[TokenLogprobs]:
        return self.inner.logprobs(batch.batch)
