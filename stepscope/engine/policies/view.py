"""What a policy may see and what it answers; the choices that policies share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Seen(Protocol):
    """A request as a policy sees it."""

    @property
    def id(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def todo(self) -> int: ...
    @property
    def decoding(self) -> bool: ...
    @property
    def most_tokens(self) -> int: ...


class Grant(NamedTuple):
    """This request computes so many tokens in this step."""

    request: Seen
    tokens: int


@dataclass(frozen=True, slots=True)
class View:
    """The queue at one moment. `growth` = pages that running decodes take for one more token."""

    waiting: Sequence[Seen]
    running: Sequence[Seen]
    free_pages: int
    total_pages: int
    page_size: int
    growth: int
    token_budget: int
    chunk: int
    max_seqs: int
    policy: Policy

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def admissible(self) -> Iterator[Seen]:
        """Waiting requests in the policy's order, as long as a slot and their pages are there."""
        slots = self.max_seqs - len(self.running)
        pages = self.free_pages - self.growth - self.policy.spare(self)
        for request in self.policy.order(self):
            pages -= self.policy.admit(self, request)
            if slots < 1 or pages < 0:
                return
            slots -= 1
            yield request


@dataclass(frozen=True, slots=True)
class Policy:
    name: str
    assign: Callable[[View], list[Grant]]
    order: Callable[[View], Sequence[Seen]]
    admit: Callable[[View, Seen], int]  # pages a request takes when it is admitted
    spare: Callable[[View], int]  # pages that an admission must leave free
    victim: Callable[[Sequence[Seen]], Seen]


def fcfs(view: View) -> Sequence[Seen]:
    """First come, first served; a preempted request has gone back to the head."""
    return view.waiting


def whole_prompt(view: View, request: Seen) -> int:
    """Everything it has to compute now; a prompt half in the cache helps nobody."""
    return view.pages_for(request.todo)


def reserve_max(view: View, request: Seen) -> int:
    """Its pages at max_tokens, so that nothing admitted is ever preempted."""
    return min(view.pages_for(request.most_tokens), view.total_pages)


def watermark(view: View) -> int:
    """1 % of the pool, so that decodes can grow; nothing when nobody runs."""
    return view.total_pages // 100 if view.running else 0


def nothing(view: View) -> int:
    return 0


def youngest(running: Sequence[Seen]) -> Seen:
    """The latest arrival. The oldest request is never chosen while another runs: progress."""
    return max(running, key=lambda r: (r.arrival_ns, r.id))
