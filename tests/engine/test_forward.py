"""One forward per step, exact bytes, and nothing read that is not the request's own."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.models.attention import order_decodes
from stepscope.models.decoder import Decoder
from stepscope.models.linear import Linear
from stepscope.records import FORWARD, GATHER
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import Batch, TorchRunner
from tests.engine.harness import (
    Observed,
    Outcome,
    ask,
    products_here,
    run,
    same_text,
    small_decoder,
)

# fp32 sums in another order: logits of about 5 differ by a few 1e-6.
CLOSE = 1e-4


@pytest.fixture(scope="module", params=products_here())
def decoder(request: pytest.FixtureRequest) -> Decoder:
    return small_decoder(products=request.param)


class Bench:
    """A runner whose requests lie on scattered pages, and plans made by hand."""

    def __init__(self, decoder: Decoder, page_size: int = 16, tokens: int = 8192) -> None:
        pages = tokens // page_size
        self.page_size = page_size
        self.runner = TorchRunner(decoder, pages, page_size)
        self.runner.cache.poison(list(range(pages)))  # rows never written must not be read
        self._free = np.random.default_rng(page_size).permutation(pages).tolist()

    def request(self, id: int, tokens: int, seed: int | None = None) -> Request:
        draw = np.random.default_rng(id if seed is None else seed)
        made = ask(id, [int(t) for t in draw.integers(0, 251, tokens)])
        count = -(-(tokens + 1) // self.page_size)
        made.pages = array("q", [self._free.pop() for _ in range(count)])
        return made

    def logits(self, *slices: Slice) -> torch.Tensor:
        """Rows in the order of the sampling slices as given, whatever the runner's own order."""
        plan = StepPlan(
            decodes=[s for s in slices if s.kind == "decode"],
            prefills=[s for s in slices if s.kind != "decode"],
        )
        batch = self.runner.prepare(plan)
        rows = self.runner.forward(batch, lambda phase: None).clone()
        order = [id(s) for s in plan.slices if s.samples]
        return rows[[order.index(id(s)) for s in slices if s.samples]]

    def prefill(self, *requests: Request) -> torch.Tensor:
        return self.logits(*(whole(r) for r in requests))


def whole(request: Request) -> Slice:
    return Slice(request, 0, len(request.tokens), "prefill", True)


def chunk(request: Request, start: int, count: int) -> Slice:
    return Slice(request, start, count, "prefill", start + count == len(request.tokens))


def last(request: Request) -> Slice:
    """The decode of its last token."""
    return Slice(request, len(request.tokens) - 1, 1, "decode", True)


def prefilled(bench: Bench, lengths: Sequence[int], first: int = 0) -> list[Request]:
    """Requests of these lengths, all but the last token in the cache."""
    made = [bench.request(first + i, n) for i, n in enumerate(lengths)]
    for request in made:
        if len(request.tokens) > 1:
            bench.logits(chunk(request, 0, len(request.tokens) - 1))
    return made


def prepared(bench: Bench, plan: StepPlan) -> Batch:
    return bench.runner.prepare(plan)


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.isfinite(a).all()) and torch.allclose(a, b, rtol=0, atol=CLOSE)


class Counted:
    """Calls of a torch function: the rows of their first argument."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.rows: list[int] = []
        self._inner = getattr(F, name)
        monkeypatch.setattr(F, name, self)

    def __call__(self, x: torch.Tensor, *args: Any, **options: Any) -> Any:
        self.rows.append(x.shape[0])
        return self._inner(x, *args, **options)


# ------------------------------------------------------------------ one forward


def test_a_mixed_step_is_one_forward_over_all_tokens(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four products a layer and one head, however many requests and kinds."""
    bench = Bench(decoder)
    running = prefilled(bench, [9, 30, 17])
    new = [bench.request(7, 21), bench.request(8, 5)]
    rows: list[int] = []
    multiply = Linear.__call__

    def counted(linear: Linear, x: torch.Tensor) -> torch.Tensor:
        rows.append(x.shape[0])
        return multiply(linear, x)

    monkeypatch.setattr(Linear, "__call__", counted)
    plain = Counted(monkeypatch, "linear")
    logits = bench.logits(*map(last, running), *map(whole, new))
    layers = decoder.spec.layers
    assert len(rows) == 4 * layers + 1
    assert rows == [3 + 21 + 5] * (4 * layers) + [5], "all tokens through the layers, B to the head"
    assert logits.shape == (5, decoder.spec.vocab)
    assert plain.rows == (rows if decoder.products == "plain" else [])


def test_at_most_two_attention_calls_serve_all_decodes(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(decoder)
    running = prefilled(bench, [5, 40, 9, 2000])
    attention = Counted(monkeypatch, "scaled_dot_product_attention")
    bench.logits(*map(last, running))
    assert attention.rows == [1, 3] * decoder.spec.layers
    attention.rows.clear()
    bench.logits(*map(last, running[:3]))
    assert attention.rows == [3] * decoder.spec.layers


# ------------------------------------------------------------------ bytes and time of gather


@pytest.mark.parametrize("dtype,element", [("fp32", 4), ("bf16", 2)])
def test_gather_bytes_are_the_context_of_the_step(dtype: str, element: int) -> None:
    bench = Bench(small_decoder(dtype))
    running = prefilled(bench, [5, 40, 9])
    bench.prefill(bench.request(7, 12))
    half = bench.request(8, 50)
    bench.logits(chunk(half, 0, 20))
    plan = StepPlan(
        decodes=[last(r) for r in running],
        prefills=[chunk(half, 20, 10), whole(bench.request(9, 13))],
    )
    batch = prepared(bench, plan)
    bench.runner.forward(batch, lambda phase: None)
    spec = bench.runner.decoder.spec
    contexts = 5 + 40 + 9 + 30 + 13
    expected = 2 * spec.layers * spec.kv_heads * spec.head_dim * contexts * element
    assert plan.gather_bytes == expected
    assert expected == spec.kv_bytes_per_token * contexts
    view = batch.attention.full
    read = view.reads.tolist()
    assert len(read) * view.rows_each > contexts, "decodes of 5, 40 and 9 tokens are padded"
    assert len(set(read)) == 1 + 3 + 1 + 2 + 1, "padding repeats a page, and none is shared"


def test_reads_are_the_pages_of_each_request_in_order(decoder: Decoder) -> None:
    """Read off the page tables by hand: longest decode first, others padded with their own."""
    bench = Bench(decoder, page_size=4)
    a, b = prefilled(bench, [6, 9])
    c = bench.request(7, 3)
    plan = StepPlan(decodes=[last(a), last(b)], prefills=[whole(c)])
    batch = prepared(bench, plan)

    def slots(request: Request, count: int) -> list[int]:
        return [request.pages[p // 4] * 4 + p % 4 for p in range(count)]

    own, view = slots(a, 6), batch.attention.full
    assert view.rows_each == 4
    assert view.reads.tolist() == [*b.pages[:3], *a.pages[:2], a.pages[0], c.pages[0]]
    assert view.stale is not None
    assert view.stale.tolist() == [18, 19], "behind the 6 tokens of a, where b has some"
    [group], [prompt] = view.groups, view.chunks
    assert (group.length, group.stride, prompt.length, prompt.stride) == (9, 12, 3, 4)
    assert batch.attention.write_slots.tolist() == [slots(b, 9)[8], own[5], *slots(c, 3)]
    assert batch.positions.tolist() == [8, 5, 0, 1, 2]


def test_gather_and_forward_are_lapped_layer_by_layer(decoder: Decoder) -> None:
    bench = Bench(decoder)
    laps: list[int] = []
    batch = prepared(bench, StepPlan(prefills=[whole(bench.request(0, 9))]))
    bench.runner.forward(batch, laps.append)
    assert laps == [FORWARD, GATHER] * decoder.spec.layers + [FORWARD]


def test_gather_grows_with_the_context() -> None:
    """125 x the rows, 8 requests each: 20 times the time would be little, 2 times is asked for."""
    decoder = small_decoder(kv_heads=4, head_dim=64)
    runner = TorchRunner(decoder, 8 * 250, 16)

    def median_gather(context: int) -> float:
        rows = steps(runner, decode_plan(8, context, 16), 9)
        return statistics.median(row.gather_ns or 0 for row in rows[2:])

    ratios = []
    for _ in range(3):  # a busy machine may spoil one try
        ratios.append(median_gather(4000) / median_gather(32))
        if ratios[-1] > 2:
            return
    pytest.fail(f"gather at 4,000 tokens took {ratios} times the one at 32")


# ------------------------------------------------------------------ the same numbers


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_a_ragged_batch_equals_one_by_one(decoder: Decoder, page_size: int) -> None:
    bench = Bench(decoder, page_size, tokens=16384)
    running = prefilled(bench, [1, 2, 16, 17, 63, 64, 65, 255, 256, 257, 30])
    single = torch.cat([bench.logits(last(r)) for r in running])
    assert close(bench.logits(*map(last, running)), single)
    assert close(bench.logits(*map(last, reversed(running))), single.flip(0))


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("pieces", [[97], [1, 96], [96, 1], [16, 16, 16, 16, 16, 17], [50, 47]])
def test_a_prefill_in_chunks_equals_a_whole_one(
    decoder: Decoder, page_size: int, pieces: list[int]
) -> None:
    bench = Bench(decoder, page_size)
    expected = bench.prefill(bench.request(0, 97, seed=5))
    again = bench.request(1, 97, seed=5)
    start = 0
    for count in pieces[:-1]:
        # A neighbour in every step: chunks must not see it.
        bench.logits(chunk(again, start, count), whole(bench.request(90 + start, 7)))
        start += count
    assert close(bench.logits(chunk(again, start, pieces[-1])), expected)


def test_a_decode_equals_the_prefill_of_the_longer_prompt(decoder: Decoder) -> None:
    bench = Bench(decoder)
    expected = bench.prefill(bench.request(0, 40, seed=3))
    again = bench.request(1, 40, seed=3)
    bench.logits(chunk(again, 0, 39))
    assert close(bench.logits(last(again)), expected)


def test_prefills_in_one_step_do_not_see_each_other(decoder: Decoder) -> None:
    bench = Bench(decoder)
    single = torch.cat([bench.prefill(bench.request(i, 9 + 20 * i)) for i in range(4)])
    together = bench.prefill(*(bench.request(i, 9 + 20 * i) for i in range(4)))
    assert close(together, single)
    assert (single[0] - single[1]).abs().max() > 1, "and they are different"


def test_a_mixed_step_equals_its_parts(decoder: Decoder) -> None:
    bench = Bench(decoder)
    running = prefilled(bench, [9, 130, 17])
    half = bench.request(7, 60)
    bench.logits(chunk(half, 0, 33))
    single = torch.cat([bench.logits(last(r)) for r in running])
    single = torch.cat(
        [single, bench.logits(chunk(half, 33, 27)), bench.prefill(bench.request(8, 5))]
    )
    mixed = bench.logits(*map(last, running), chunk(half, 33, 27), whole(bench.request(8, 5)))
    assert close(mixed, single)


def test_every_token_of_the_context_matters(decoder: Decoder) -> None:
    """Otherwise equal logits would prove nothing: change one early token, on another page."""
    bench = Bench(decoder)
    plain, changed = bench.request(0, 90, seed=1), bench.request(1, 90, seed=1)
    for position in (0, 15, 16, 60):
        changed.tokens[position] = (changed.tokens[position] + 1) % 251
        difference = bench.prefill(changed) - bench.prefill(plain)
        assert difference.abs().max() > 20 * CLOSE


def test_a_split_of_the_decodes_changes_nothing(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(decoder)
    running = prefilled(bench, [3000, *range(5, 19)])
    assert order_decodes([last(r) for r in running])[1] == 1
    split = bench.logits(*map(last, running))
    monkeypatch.setattr("stepscope.models.attention.SPLIT_GAIN_ROWS", 10**9)
    assert order_decodes([last(r) for r in running])[1] == 0
    assert close(bench.logits(*map(last, running)), split)
    single = torch.cat([bench.logits(last(r)) for r in running])
    assert close(single, split)


@pytest.mark.parametrize(
    "lengths,split",
    [
        ([4000, 10, 10], 1),
        ([4000, 3900, 10, 10, 10], 2),
        ([100, 90, 80], 0),  # little to gain
        ([4000], 0),
        ([4000, 4000], 0),
        ([10] * 30 + [900], 1),
    ],
)
def test_where_decodes_are_split(lengths: list[int], split: int) -> None:
    decodes = [Slice(ask(i, n), n - 1, 1, "decode", True) for i, n in enumerate(lengths)]
    ordered, at = order_decodes(decodes)
    assert [s.context for s in ordered] == sorted(lengths, reverse=True)
    assert at == split


# ------------------------------------------------------------------ poisoned pages


def workload() -> list[Request]:
    draw = np.random.default_rng(11)
    sizes = [(40, 30), (25, 40), (60, 20), (9, 45), (33, 33), (1, 25), (70, 12)]
    return [
        ask(i, [int(t) for t in draw.integers(0, 251, p)], m, ignore_eos=True)
        for i, (p, m) in enumerate(sizes)
    ]


def outcome(decoder: Decoder, policy: str, pages: int, forget: bool) -> tuple[Outcome, Observed]:
    observed = Observed(TorchRunner(decoder, pages, 8), keep_logits=True)
    limits = Limits(max_seqs=5, token_budget=64, chunk=24)
    done = run(
        workload(), policy, pages=pages, page_size=8, limits=limits, runner=observed, forget=forget
    )
    return done, observed


@pytest.mark.parametrize("policy", ["static", "prefill-first", "chunked"])
def test_freed_pages_are_never_read(decoder: Decoder, policy: str) -> None:
    """NaN in a freed page would show in every logit that came near it."""
    plain, plain_seen = outcome(decoder, policy, pages=22, forget=False)
    poisoned, seen = outcome(decoder, policy, pages=22, forget=True)
    assert (policy == "static") == (plain.preemptions == 0)
    assert poisoned.trace == plain.trace and poisoned.outputs == plain.outputs
    for request, rows in seen.logits.items():
        assert torch.equal(torch.stack(rows), torch.stack(plain_seen.logits[request])), request
    roomy, roomy_seen = outcome(decoder, policy, pages=400, forget=True)
    assert roomy.preemptions == 0
    assert same_text(roomy.outputs, roomy_seen.gaps, poisoned.outputs) == []


def test_poison_would_show(decoder: Decoder) -> None:
    """The test above can fail: one page of a running request, poisoned, ruins its logits only."""
    bench = Bench(decoder)
    a, b = prefilled(bench, [40, 30])
    bench.runner.cache.poison([a.pages[1]])
    logits = bench.logits(last(a), last(b))
    assert torch.isnan(logits[0]).all() and torch.isfinite(logits[1]).all()


def test_the_text_is_not_constant(decoder: Decoder) -> None:
    """Equal texts prove little if every text is one token repeated."""
    done, _ = outcome(decoder, "chunked", pages=400, forget=False)
    for ids in done.outputs.values():
        assert len(set(ids)) > len(ids) // 3
