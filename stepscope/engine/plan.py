"""What one step computes, and the two protocols that let one loop serve every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from stepscope.engine.request import Request
from stepscope.records import PartKind

Lap = Callable[[int], None]  # give the time since the last mark to this phase


@dataclass(slots=True)
class Slice:
    """`count` tokens of one request, from position `start`; samples if they are the last ones."""

    request: Request
    start: int
    count: int
    kind: PartKind
    samples: bool
    recomputed: int = 0

    @property
    def context(self) -> int:
        """Tokens its queries attend to, its own included."""
        return self.start + self.count


@dataclass(slots=True)
class StepPlan:
    """Decodes first, then prefills: the order in which their tokens are concatenated."""

    decodes: list[Slice] = field(default_factory=list)
    prefills: list[Slice] = field(default_factory=list)
    admitted: int = 0
    preempted: int = 0
    blocked_decodes: int = 0
    running: int = 0  # after admission and preemption: what the step runs with
    waiting: int = 0
    used_pages: int = 0

    @property
    def slices(self) -> list[Slice]:
        return self.decodes + self.prefills

    def drop(self, request: Request) -> None:
        self.decodes = [s for s in self.decodes if s.request is not request]
        self.prefills = [s for s in self.prefills if s.request is not request]


class Runner(Protocol):
    """Turns a plan into token ids. B = sampled slices of the plan, in its order."""

    @property
    def gather_bytes(self) -> int | None:
        """K and V bytes of context assembled by the last forward; None where read in place."""

    def prepare(self, plan: StepPlan) -> Any: ...

    def forward(self, batch: Any, lap: Lap) -> Any:
        """Logits (B, vocab). Laps GATHER and FORWARD itself, since they alternate per layer."""

    def sample(self, logits: Any, batch: Any) -> Any: ...

    def fetch(self, sampled: Any) -> Sequence[int]:
        """Token ids on the host: the synchronisation point of a step."""


class Clock(Protocol):
    """Nanoseconds from run start."""

    def now(self) -> int: ...

    def sleep_until(self, ns: int) -> None: ...
