"""Overlap on a CPU: one thread computes, while the engine's own schedules the next step.

The thread is the device of such a run: what it does and when goes into the `dev_*` columns, by the
same clock. Both share the cores and the interpreter, so a gain is not to be taken for granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from stepscope.engine.plan import Lap, Move, Runner, StepPlan
from stepscope.engine.request import TokenLogprobs
from stepscope.records import FORWARD


class ThreadedRunner:
    """Hands the steps of another runner to one thread, in order."""

    def __init__(self, inner: Runner) -> None:
        self.inner = inner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stepscope-runner")
        self._moved: Future[None] | None = None

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    def move(self, moves: Sequence[Move]) -> None:
        """Before the next forward, behind the last one."""
        self._moved = self._thread.submit(self.inner.move, list(moves))

    def prepare(self, plan: StepPlan) -> Any:
        return self.inner.prepare(plan)

    def forward(self, batch: Any, lap: Lap) -> Future[Any]:
        moved, self._moved = self._moved, None

        def work() -> Any:
            if moved is not None:
                moved.result()  # what went wrong there would go unseen otherwise
            return self.inner.forward(batch, _no_lap)

        future = self._thread.submit(work)
        lap(FORWARD)
        return future

    def sample(self, logits: Future[Any], batch: Any) -> Future[Any]:
        return self._thread.submit(lambda: self.inner.sample(logits.result(), batch))

    def fetch(self, sampled: Future[Any]) -> Sequence[int]:
        return self.inner.fetch(sampled.result())

    def logprobs(self, batch: Any) -> Sequence[TokenLogprobs]:
        return self.inner.logprobs(batch)


def _no_lap(phase: int) -> None:
    """The phases of the engine's thread are not those of this one."""
