"""What a policy may see and what it answers.

A policy is pure functions over a `View`: the order of the waiting queue, admission, tokens per
request in this step, the victim when pages run out, and (for preemptive ones) whom to put back.
What it has to remember of a run is one value, folded: memory = remember(memory, view), once per
step, starting from None; the other functions read it as `view.memory`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol


class Seen(Protocol):
    """A request as a policy sees it."""

    @property
    def id(self) -> int: ...
    @property
    def arrival_ns(self) -> int: ...
    @property
    def client(self) -> str: ...
    @property
    def priority(self) -> int: ...  # a smaller number goes first
    @property
    def tokens(self) -> Sequence[int]: ...  # prompt, then output; under overlap the last is missing
    @property
    def length(self) -> int: ...  # tokens it has, also one whose id is not known yet
    @property
    def pages(self) -> Sequence[int]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def output_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...  # the output it asked for at most
    @property
    def most_tokens(self) -> int: ...  # tokens in the cache if it gets all of them
    @property
    def computed(self) -> int: ...
    @property
    def todo(self) -> int: ...  # tokens to compute before the next one is sampled
    @property
    def cached_prefix(self) -> int: ...  # while it waits: leading tokens a prefix cache holds
    @property
    def shared_pages(self) -> int: ...  # of them: pages that running requests hold
    @property
    def decoding(self) -> bool: ...


class Ran(Protocol):
    """What the last step did for one request."""

    @property
    def request(self) -> Seen: ...
    @property
    def count(self) -> int: ...
    @property
    def recomputed(self) -> int: ...
    @property
    def samples(self) -> bool: ...


class Grant(NamedTuple):
    """This request computes so many tokens in this step."""

    request: Seen
    tokens: int


class Knob(NamedTuple):
    """A setting of a policy. A default that is an int takes whole numbers only."""

    default: int | float | str
    about: str
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = 1e9


@dataclass(frozen=True, slots=True)
class View:
    """The queue at one moment. `growth` = pages that running decodes take for one more token.

    now_ns is when this step began, last what the step before did (empty if it was idle).
    """

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
    now_ns: int = 0
    last: Sequence[Ran] = ()
    memory: Any = None

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def number(self, knob: str) -> float:
        return float(self.policy.value(knob))

    def admissible(self) -> Iterator[Seen]:
        """Waiting requests in the policy's order, as long as a slot and their pages are there."""
        rule, slots = self.policy.admission, self.max_seqs - len(self.running)
        admitted: list[Seen] = []
        pages = self.free_pages - self.growth
        for request in self.policy.order(self):
            admitted.append(request)
            pages -= rule.hold(self, request) - request.shared_pages
            # The first into an empty engine has nobody to leave pages to.
            spare = rule.spare(self, admitted) if self.running or len(admitted) > 1 else 0
            if len(admitted) > slots or pages < spare:
                return
            yield request

    def without(self, gone: Sequence[Seen]) -> View:
        """The same moment if these had been preempted."""
        stay = [r for r in self.running if all(r is not g for g in gone)]
        growth = sum(r.decoding and self.pages_for(r.computed + 1) > len(r.pages) for r in stay)
        free = self.free_pages + sum(len(g.pages) for g in gone)
        return replace(self, running=stay, free_pages=free, growth=growth)


@dataclass(frozen=True, slots=True)
class Admission:
    """A request may enter if the pages it takes (`hold`) leave `spare` pages free.

    spare gets all that would be admitted in this step, the one in question last.
    """

    name: str
    about: str
    hold: Callable[[View, Seen], int]
    spare: Callable[[View, Sequence[Seen]], int]


Victim = Callable[[View, Sequence[Seen]], Seen]

COMMON = {
    "watermark": Knob(0.01, "share of the pages that admission=watermark leaves free", most=1),
    "ratio": Knob(0.5, "share of the output that admission=optimistic expects", most=1),
}


def fcfs(view: View) -> Iterable[Seen]:
    """First come, first served; a preempted request has gone back to the head."""
    return view.waiting


def nobody(view: View) -> Sequence[Seen]:
    """Not preemptive: only a lack of pages puts a running request back."""
    return ()


def nothing(memory: Any, view: View) -> Any:
    """Has nothing to remember."""
    return None


@dataclass(frozen=True, slots=True)
class Policy:
    """One choice for each plug-point. `evict` is asked before `assign`, which sees them gone."""

    name: str
    about: str
    assign: Callable[[View], list[Grant]]
    admission: Admission
    victim: Victim
    order: Callable[[View], Iterable[Seen]] = fcfs
    evict: Callable[[View], Sequence[Seen]] = nobody
    remember: Callable[[Any, View], Any] = nothing
    knobs: Mapping[str, Knob] = field(default_factory=dict)
    given: Mapping[str, int | float | str] = field(default_factory=dict)

    def admit(self, view: View, request: Seen) -> int:
        """Pages the request takes when it is admitted."""
        return self.admission.hold(view, request)

    def value(self, knob: str) -> int | float | str:
        """As given in the policy's text, or its default."""
        default = (self.knobs.get(knob) or COMMON[knob]).default
        return self.given.get(knob, default)
