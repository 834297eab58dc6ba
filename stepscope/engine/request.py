"""A request inside the engine: its tokens, how far they are computed, and where they are kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stepscope.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep every token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output tokens of one request, and how many of them are in the KV cache.

    Policies read it through its properties; only the scheduler changes it.
    """

    record: RequestRecord
    tokens: list[int]  # prompt, then output
    sampling: Sampling
    computed: int = 0  # leading tokens whose K and V are in the cache
    high_water: int = 0  # most tokens ever computed: below it, computing is recomputing
    pages: array[int] = field(default_factory=lambda: array("q"))

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def arrival_ns(self) -> int:
        return self.record.arrival_ns

    @property
    def prompt_tokens(self) -> int:
        return self.record.prompt_tokens

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.record.prompt_tokens

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        return self.todo == 1 and self.output_tokens > 0

    @property
    def most_tokens(self) -> int:
        """The length it has if it stops at max_tokens (the last one is never computed)."""
        return self.prompt_tokens + self.sampling.max_tokens - 1
