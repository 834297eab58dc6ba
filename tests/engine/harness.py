"""One way to run the engine in tests: requests in, everything that can be observed out.

Nothing here imports torch at the top, since the unit tests use it too.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any, cast

from stepscope.engine.kv import PagePool
from stepscope.engine.loop import Engine, Output
from stepscope.engine.plan import Lap, Move, Runner, Slice, StepPlan
from stepscope.engine.policies import Policy, policy_named
from stepscope.engine.prefix import prefix_cache
from stepscope.engine.recorder import Recorder
from stepscope.engine.request import Request, Sampling, TokenLogprobs
from stepscope.engine.scheduler import Limits, Scheduler
from stepscope.records import FORWARD, GATHER, Event, Part, RequestRecord, StepRecord

if TYPE_CHECKING:
    from stepscope.models.decoder import Decoder

VOCAB = 251  # of the content runner
UNLIMITED = 100_000
TIE = 2e-3  # two best logits this close in fp32 may swap when sums are taken in another order
MOST_TIES = 1 / 1000


class Clock:
    """Moves when told, and by `tick` at every reading."""

    def __init__(self, tick: int = 0) -> None:
        self.ns, self.tick = 0, tick
        self.sleeps: list[int] = []

    def now(self) -> int:
        self.ns += self.tick
        return self.ns

    def sleep_until(self, ns: int) -> None:
        self.sleeps.append(ns)
        self.ns = max(self.ns, ns)


class Arrivals:
    """The inbox: requests in order of arrival."""

    def __init__(self, requests: Iterable[Request]) -> None:
        self.left = deque(sorted(requests, key=lambda r: (r.arrival_ns, r.id)))

    def poll(self, now_ns: int) -> list[Request]:
        arrived = []
        while self.left and self.left[0].arrival_ns <= now_ns:
            arrived.append(self.left.popleft())
        return arrived

    def next_arrival(self) -> int | None:
        return self.left[0].arrival_ns if self.left else None


class IdText:
    """Text = the ids; the last piece ends with a full stop, so that flush is seen."""

    def push(self, request: int, token: int) -> str:
        return f" {token}"

    def flush(self, request: int) -> str:
        return "."


class WatchedPool(PagePool):
    """Tells which pages become free."""

    def __init__(self, total: int, page_size: int) -> None:
        super().__init__(total, page_size)
        self.on_free: Callable[[int], None] = lambda page: None

    def _become_free(self, page: int) -> None:
        super()._become_free(page)
        self.on_free(page)


@dataclass(frozen=True, slots=True)
class Forget:
    """Among the moves of a step: here the page became free, and what it held is gone."""

    source: int
    kind: str = "forget"


class WatchedScheduler(Scheduler):
    """Keeps what every step did, and checks after each that the pages add up."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.trace: list[str] = []
        self.slices: list[list[tuple[int, str, int, int]]] = []  # request, kind, start, count

    def schedule(self) -> StepPlan:
        plan = super().schedule()
        self.check_pages()
        if plan.slices:
            self.trace.append(describe(plan))
            self.slices.append([(s.request.id, s.kind, s.start, s.count) for s in plan.slices])
        return plan

    def check_pages(self) -> None:
        """Every page is free, idle or held, and where one may write nobody else is."""
        pool = self.pool
        held = Counter(page for r in self.running for page in r.pages)
        if any(r.pages for r in self.waiting):
            raise AssertionError("a waiting request holds pages")
        if held != Counter({p: n for p, n in enumerate(pool.refs) if n}):
            raise AssertionError("references are lost or counted twice")
        if (pool.used, pool.used + pool.free + pool.idle) != (len(held), pool.total):
            raise AssertionError("pages are lost or counted twice")
        if self.memory.host.used != sum(len(r.host_pages) for r in self.waiting):
            raise AssertionError("pages of the host are lost or counted twice")
        for request in self.running:
            if any(held[p] > 1 for p in request.pages[request.computed // pool.page_size :]):
                raise AssertionError("a page is writable by one and held by another")


def describe(plan: StepPlan) -> str:
    """'d0 p1:4 r2:7': a decode of 0, 4 prefill tokens of 1, 7 tokens of 2 computed again."""
    return " ".join(_word(s) for s in plan.slices)


def _word(piece: Slice) -> str:
    count = "" if piece.kind == "decode" else f":{piece.count}"
    return f"{piece.kind[0]}{piece.request.id}{count}"


class ContentRunner:
    """A token that depends on the request's tokens alone, over a cache that knows its owners.

    Every row written to a slot names its position and all tokens up to it, as K and V depend on
    them. Reading a row that is of another text, stale or freed fails the test.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.rows: dict[int, tuple[int, int]] = {}
        self._host: dict[int, tuple[int, int] | None] = {}
        self._texts: dict[Request, list[int]] = {}  # hash of each beginning of its tokens
        self._sampled: dict[Request, int] = {}  # its latest token, which may still be pending

    def move(self, moves: Sequence[Move | Forget]) -> None:
        size = self.page_size
        for m in moves:
            begin = m.source * size
            if isinstance(m, Forget):
                self.forget([m.source])
            elif m.kind == "copy":
                for i in range(m.rows):
                    self.rows[m.target * size + i] = self.rows[begin + i]
            else:
                store, other = (
                    (self.rows, self._host) if m.kind == "out" else (self._host, self.rows)
                )
                for i in range(size):
                    other[m.target * size + i] = store.get(begin + i)  # type: ignore[assignment]

    def prepare(self, plan: StepPlan) -> StepPlan:
        for piece in plan.slices:
            for position in range(piece.start, piece.context):
                self.rows[self._slot(piece, position)] = self._row(piece, position)
        for piece in plan.slices:
            for position in range(piece.context):
                if self.rows.get(self._slot(piece, position)) != self._row(piece, position):
                    raise AssertionError(
                        f"request {piece.request.id} reads a wrong row at position {position}"
                    )
        return plan

    def forward(self, batch: StepPlan, lap: Lap) -> list[list[int]]:
        lap(GATHER)
        lap(FORWARD)
        return [self._tokens(s) for s in batch.slices if s.samples]

    def sample(self, logits: list[list[int]], batch: StepPlan) -> list[int]:
        ids = [next_token(tokens) for tokens in logits]
        sampled = [s.request for s in batch.slices if s.samples]
        self._sampled.update(zip(sampled, ids, strict=True))
        return ids

    def fetch(self, sampled: list[int]) -> list[int]:
        return sampled

    def logprobs(self, batch: StepPlan) -> list[TokenLogprobs]:
        raise AssertionError("nobody asks the content runner for log-probabilities")

    def forget(self, pages: Iterable[int]) -> None:
        for page in pages:
            for slot in range(page * self.page_size, (page + 1) * self.page_size):
                self.rows.pop(slot, None)

    def _slot(self, piece: Slice, position: int) -> int:
        page = piece.request.pages[position // self.page_size]
        return page * self.page_size + position % self.page_size

    def _tokens(self, piece: Slice) -> list[int]:
        """The request's tokens up to the slice's end, also the one the engine does not know yet."""
        tokens = piece.request.tokens[: piece.context]
        missing = piece.context - len(tokens)
        if missing > piece.request.pending:
            raise AssertionError(f"request {piece.request.id} is granted tokens it does not have")
        return [*tokens, self._sampled[piece.request]] if missing else tokens

    def _row(self, piece: Slice, position: int) -> tuple[int, int]:
        known, tokens = self._texts.setdefault(piece.request, []), self._tokens(piece)
        for i in range(len(known), position + 1):
            known.append(hash((known[-1] if known else 0, tokens[i])))
        return position, known[position]


def next_token(tokens: Sequence[int]) -> int:
    return zlib.crc32(bytes(tokens)) % VOCAB


def alone(prompt: Sequence[int], max_tokens: int, eos: Sequence[int] = ()) -> list[int]:
    """What the content runner gives this request by itself, with pages and context for all."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def ask(
    id: int,
    prompt: int | Sequence[int],
    max_tokens: int = 8,
    arrival_ns: int = 0,
    error: str | None = None,
    **sampling: Any,
) -> Request:
    """A request; an int as prompt gives so many tokens, different for each id."""
    if isinstance(prompt, int):
        prompt = [(31 * id + 7 * i + 1) % VOCAB for i in range(prompt)]
    record = RequestRecord(id, arrival_ns, len(prompt), error=error)
    return Request(record, list(prompt), Sampling(max_tokens=max_tokens, **sampling))


@dataclass
class Outcome:
    """All that came of a run, and the engine to look into."""

    engine: Engine
    scheduler: WatchedScheduler
    requests: dict[int, Request]
    steps: list[StepRecord] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    emitted: list[list[Output]] = field(default_factory=list)
    complete: bool = False

    @property
    def records(self) -> dict[int, RequestRecord]:
        return {i: r.record for i, r in self.requests.items()}

    @property
    def outputs(self) -> dict[int, list[int]]:
        return {i: r.tokens[r.prompt_tokens :] for i, r in self.requests.items()}

    @property
    def trace(self) -> list[str]:
        return self.scheduler.trace

    @property
    def work(self) -> list[StepRecord]:
        return [row for row in self.steps if row.kind != "idle"]

    @property
    def preemptions(self) -> int:
        return sum(record.preemptions for record in self.records.values())


def build(
    requests: Iterable[Request],
    policy: str | Policy = "chunked",
    *,
    pages: int = 1000,
    page_size: int = 16,
    limits: Limits | None = None,
    eos: Sequence[int] = (),
    runner: Runner | None = None,
    clock: Clock | None = None,
    forget: bool = True,
    prefix: str = "off",
    swap: bool = False,
    overlap: bool = False,
    swap_pages: int | None = None,
) -> Outcome:
    """An engine ready to run. `forget`: pages lose their contents when they are freed."""
    clock = clock or Clock(tick=1)
    pool = WatchedPool(pages, page_size)
    runner = runner or ContentRunner(page_size)
    if forget and hasattr(runner, "decoder"):
        runner = Observed(runner)  # a real runner has no move that forgets
    chosen = policy_named(policy) if isinstance(policy, str) else policy
    cache = prefix_cache(prefix, pool)
    scheduler = WatchedScheduler(chosen, pool, limits or Limits(), eos, cache, swap, swap_pages)
    if forget:
        # In its place among the moves: what was copied before may be freed, not the reverse.
        pool.on_free = lambda page: scheduler.memory.moves.append(cast(Any, Forget(page)))
    asked = list(requests)
    recorder = Recorder(clock.now)
    emitted: list[list[Output]] = []

    def emit(outputs: Sequence[Output]) -> None:
        emitted.append(list(outputs))

    engine = Engine(
        Arrivals(asked), scheduler, runner, recorder, clock, IdText(), emit, overlap=overlap
    )
    return Outcome(engine, scheduler, {r.id: r for r in asked}, emitted=emitted)


def run(
    requests: Iterable[Request], *args: Any, most_steps: int = 20_000, **options: Any
) -> Outcome:
    """Build and run to the end; fails if it takes more iterations than any sane engine needs."""
    return finish(build(requests, *args, **options), most_steps)


def finish(outcome: Outcome, most_steps: int = 20_000) -> Outcome:
    engine = outcome.engine
    follow = engine.on_step

    def on_step(row: StepRecord) -> None:
        if row.step > most_steps:
            raise AssertionError(f"the engine does not come to an end: {outcome.trace[-5:]}")
        follow(row)

    engine.on_step = on_step
    outcome.complete = engine.run()
    outcome.steps, outcome.parts, outcome.events = engine.recorder.drain()
    return outcome


# ------------------------------------------------------------------ with torch

SMALL = {
    "layers": 2,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 96,
    "vocab": 251,
    "max_context": 8192,
}
LOUDER = 8.0  # dummy weights are so small that text would hardly depend on the context


def small_decoder(dtype: str = "fp32", products: str = "plain", **overrides: int) -> Decoder:
    """Two layers, grouped heads, random weights large enough that every token matters."""
    from stepscope.models.decoder import Decoder
    from stepscope.models.load import load_model

    model = load_model("dummy:llama", dtype, overrides={**SMALL, **overrides})
    weights = {
        name: tensor if name.endswith("_norm") else tensor * LOUDER
        for name, tensor in model.weights.items()
    }
    return Decoder(model.spec, weights, products)


def products_here() -> list[str]:
    """The kernels that can multiply on this machine."""
    import torch

    from stepscope.models.linear import PRODUCTS

    return [p for p in PRODUCTS if p == "plain" or torch._C._has_mkldnn]


class Observed:
    """A runner, and for every sampled token what its logits looked like."""

    def __init__(self, runner: Any, keep_logits: bool = False) -> None:
        self.inner, self.keep = runner, keep_logits
        self.cache = runner.cache
        self.gaps: dict[int, list[float]] = {}
        self.logits: dict[int, list[Any]] = {}

    def move(self, moves: Sequence[Move | Forget]) -> None:
        for forget, same in groupby(moves, key=lambda m: isinstance(m, Forget)):
            if forget:
                self.cache.poison([m.source for m in same])
            else:
                self.inner.move(list(same))

    def prepare(self, plan: StepPlan) -> Any:
        return self.inner.prepare(plan)

    def forward(self, batch: Any, lap: Lap) -> Any:
        logits = self.inner.forward(batch, lap)
        sampled = [s.request.id for s in batch.plan.slices if s.samples]
        if sampled:
            for who, (first, second) in zip(sampled, logits.topk(2).values.tolist(), strict=True):
                self.gaps.setdefault(who, []).append(first - second)
        if self.keep:
            for who, row in zip(sampled, logits, strict=True):
                self.logits.setdefault(who, []).append(row.clone())
        return logits

    def sample(self, logits: Any, batch: Any) -> Any:
        return self.inner.sample(logits, batch)

    def fetch(self, sampled: Any) -> Sequence[int]:
        ids: Sequence[int] = self.inner.fetch(sampled)
        return ids

    def logprobs(self, batch: Any) -> Sequence[TokenLogprobs]:
        values: Sequence[TokenLogprobs] = self.inner.logprobs(batch)
        return values


def same_text(
    expected: dict[int, list[int]],
    gaps: dict[int, list[float]],
    got: dict[int, list[int]],
    allowed: float = MOST_TIES,
) -> list[str]:
    """The ties met on the way; AssertionError where ids differ and the gap was no tie."""
    ties, compared = [], 0
    if expected.keys() != got.keys():
        raise AssertionError(f"requests {sorted(expected)} expected, {sorted(got)} got")
    for request, ids in expected.items():
        if len(ids) != len(got[request]):
            raise AssertionError(f"request {request}: {len(got[request])} tokens, not {len(ids)}")
        for position, (want, have) in enumerate(zip(ids, got[request], strict=True)):
            compared += 1
            if want == have:
                continue
            gap = gaps[request][position]
            if gap > TIE:
                raise AssertionError(
                    f"request {request}, output {position}: {have} and not {want}, "
                    f"which leads by {gap:.4f}"
                )
            ties.append(f"request {request}, output {position}, gap {gap:.5f}")
            break  # after a tie the two texts are two different texts
    if len(ties) > allowed * compared:
        raise AssertionError(f"{len(ties)} ties in {compared} tokens: {'; '.join(ties)}")
    return ties
