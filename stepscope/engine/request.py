"""A request inside the engine: its tokens, how far they are computed, and where they are kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from stepscope.engine.prefix import MISS, Hit, PrefixCache
from stepscope.engine.stops import StopText
from stepscope.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn, and when to stop.

    temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 keep every token; a repetition penalty of
    1, a presence or frequency penalty of 0 is none (definitions: `stepscope.models.logit_edits`).
    logprobs: of each token and of the n likeliest; None for none. Before min_tokens neither EOS
    nor a stop id nor a stop string ends the request.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 16
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()

    @property
    def penalizes(self) -> bool:
        """The next draw depends on which tokens there were, not only on how many."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the raw logits: of the token taken, of the n likeliest."""

    logprob: float
    top_ids: list[int]
    top: list[float]


@dataclass(slots=True, eq=False)
class Request:
    """Prompt and output tokens of one request, and how many of them are in the KV cache.

    Policies read it through its properties; only the scheduler changes it.
    """

    record: RequestRecord
    tokens: list[int]  # prompt, then output, as far as the host knows it
    sampling: Sampling
    computed: int = 0  # leading tokens whose K and V are in the cache, or will be after this step
    pending: int = 0  # 1 while a token of it is sampled but not on the host yet
    high_water: int = 0  # most tokens ever computed: below it, computing is recomputing
    pages: array[int] = field(default_factory=lambda: array("q"))
    stop_text: StopText | None = field(init=False)
    logprobs: TokenLogprobs | None = None  # of its latest token, where it asked for them
    prefix: PrefixCache | None = None  # set where the engine has one
    digests: list[bytes] = field(default_factory=list)  # of its first pages, for the prefix cache
    host_pages: list[int] = field(default_factory=list)  # while it is swapped out
    _hit: Hit = MISS
    _hit_version: int = -1  # of the prefix cache, when _hit was looked up

    def __post_init__(self) -> None:
        self.stop_text = StopText(self.sampling.stop) if self.sampling.stop else None

    @property
    def id(self) -> int:
        return self.record.id

    @property
    def arrival_ns(self) -> int:
        return self.record.arrival_ns

    @property
    def client(self) -> str:
        return self.record.client

    @property
    def priority(self) -> int:
        return self.record.priority

    @property
    def prompt_tokens(self) -> int:
        return self.record.prompt_tokens

    @property
    def length(self) -> int:
        """Tokens it has, one that is pending included."""
        return len(self.tokens) + self.pending

    @property
    def output_tokens(self) -> int:
        return self.length - self.record.prompt_tokens

    @property
    def todo(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.computed - self.cached_prefix

    @property
    def cached_prefix(self) -> int:
        """Tokens of a waiting request that admission would take from the prefix cache now."""
        return self._look().tokens

    @property
    def shared_pages(self) -> int:
        """Pages of its cached prefix that running requests hold: admission takes none for them."""
        hit = self._look()
        return self.prefix.in_use(hit) if self.prefix is not None and hit.tokens else 0

    def _look(self) -> Hit:
        if self.prefix is None or self.computed or self.pages:
            return MISS
        if self._hit_version != self.prefix.version:
            self._hit, self._hit_version = self.prefix.look(self), self.prefix.version
        return self._hit

    @property
    def decoding(self) -> bool:
        return self.todo == 1 and self.output_tokens > 0

    @property
    def max_tokens(self) -> int:
        return self.sampling.max_tokens

    @property
    def most_tokens(self) -> int:
        """The length it has if it stops at max_tokens (the last one is never computed)."""
        return self.prompt_tokens + self.sampling.max_tokens - 1
