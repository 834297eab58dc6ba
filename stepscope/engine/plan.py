"""What one step computes, and the two protocols that let one loop serve every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from stepscope.engine.request import Request, TokenLogprobs
from stepscope.records import PartKind, StepKind, StepRecord

Lap = Callable[[int], None]  # give the time since the last mark to this phase


@dataclass(frozen=True, slots=True)
class Move:
    """KV rows to bring elsewhere before a step writes any.

    copy: the first `rows` rows of page `source` to page `target`. out: page `source` to place
    `target` in host memory. in: place `source` to page `target`.
    """

    kind: Literal["copy", "out", "in"]
    source: int
    target: int
    rows: int = 0


@dataclass(slots=True)
class Slice:
    """`count` tokens of one request, from position `start`; samples if they are the last ones."""

    request: Request
    start: int
    count: int
    kind: PartKind
    samples: bool
    recomputed: int = 0
    cached: int = 0  # tokens before `start` that the prefix cache gave it in this step
    extra: bool = False  # its request had ended before its result came: computed for nothing

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
    evicted_pages: int | None = None  # which the prefix cache gave up; None without one
    prefix_hit_tokens: int | None = None
    swapped_pages: int | None = None  # to host memory and back; None without swapping
    swap_ns: int | None = None
    expert_reads: int | None = None  # told by the runner; None without experts
    moves: list[Move] = field(default_factory=list)  # in order; earlier ones may feed later ones
    # Told by the runner: how the step was launched, and when the device did it.
    gather_bytes: int | None = None  # K and V of context assembled; None where read in place
    graph: str | None = None
    graph_hit: int | None = None
    padded_batch: int | None = None
    launches: int | None = None
    syncs: int | None = None
    spans: DeviceSpans | None = None

    @property
    def slices(self) -> list[Slice]:
        return self.decodes + self.prefills

    @property
    def kind(self) -> StepKind:
        if not self.prefills:
            return "decode" if self.decodes else "idle"
        return "mixed" if self.decodes else "prefill"

    @property
    def extra_tokens(self) -> int:
        """Computed for requests that have ended since the step was scheduled."""
        return sum(s.count for s in self.slices if s.request.record.finish_reason is not None)

    def drop(self, request: Request) -> None:
        self.decodes = [s for s in self.decodes if s.request is not request]
        self.prefills = [s for s in self.prefills if s.request is not request]


@dataclass(slots=True)
class Flight:
    """A step that was launched and whose tokens the host does not have yet."""

    step: int
    plan: StepPlan
    batch: Any
    sampled: Any
    emitted_ns: int = 0  # when its tokens had reached the client


class DeviceSpans(Protocol):
    """When a device that works by itself did one step."""

    def read(self, row: StepRecord, wait: bool) -> bool:
        """Write the device columns, if they are known by now (wait: as soon as they are)."""


class Runner(Protocol):
    """Turns a plan into token ids. B = sampled slices of the plan, in its order."""

    def move(self, moves: Sequence[Move]) -> None:
        """Bring KV rows elsewhere, one move after the other."""

    def prepare(self, plan: StepPlan) -> Any:
        """Index tensors. A token that is pending is put in its place by `forward`."""

    def forward(self, batch: Any, lap: Lap) -> Any:
        """Logits (B, vocab). Laps GATHER and FORWARD itself, since they alternate per layer."""

    def sample(self, logits: Any, batch: Any) -> Any: ...

    def fetch(self, sampled: Any) -> Sequence[int]:
        """Token ids on the host: the synchronisation point of a step.

        -1 for a row whose logits are not finite: that request alone fails.
        """

    def logprobs(self, batch: Any) -> Sequence[TokenLogprobs]:
        """Of the sampled slices that asked for them, in order; called after fetch, if any did."""


class Clock(Protocol):
    """Nanoseconds from run start."""

    def now(self) -> int: ...

    def sleep_until(self, ns: int) -> None: ...
