"""Graphs over padded buckets, on a CPU: a fake capture replays the call on the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from stepscope.engine.scheduler import Limits
from stepscope.errors import UsageError
from stepscope.models.decoder import Decoder
from stepscope.models.paged import PagedBatch
from stepscope.runner.graphs import CudaGraphs, bucket_of, default_buckets
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import Observed, ask, run, same_text, small_decoder

pytest.importorskip("triton", reason="the paged batch needs triton, which is not installed")

PAGES, PAGE = 40, 16


@pytest.mark.parametrize(
    "most,expected",
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, (1, 2, 4, 8)),
        (32, (1, 2, 4, 8, 16, 24, 32)),
        (50, (1, 2, 4, 8, 16, 24, 32, 48, 50)),
    ],
)
def test_default_buckets(most: int, expected: tuple[int, ...]) -> None:
    assert default_buckets(most) == expected


def test_the_bucket_is_the_smallest_that_holds() -> None:
    assert [bucket_of((1, 4, 16), n) for n in (1, 2, 4, 5, 16, 17)] == [1, 4, 4, 16, 16, None]


def dense(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    shape: list[int],
    counts: list[int],
    window: int,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """What the kernel computes, sequence by sequence."""
    heads, kv_heads, dim, page = shape
    out = torch.empty(qkv.shape[0], heads * dim, dtype=qkv.dtype)
    for i, length in enumerate(context_lens.tolist()):
        begin, end = query_starts[i : i + 2].tolist()
        at = torch.arange(length)
        slots = page_table[i, at // page].long() * page + at % page
        k, v = cache[slots].view(length, 2, kv_heads, dim).unbind(1)
        q = qkv[begin:end, : heads * dim].view(end - begin, kv_heads, -1, dim)
        scores = torch.einsum("tkgd,lkd->tkgl", q, k) * scale
        late = at > torch.arange(length - (end - begin), length)[:, None]
        weights = scores.masked_fill(late[:, None, None], float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("tkgl,lkd->tkgd", weights, v).reshape(end - begin, -1)
    return out


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> Callable[[Decoder], TorchRunner]:
    def make(decoder: Decoder) -> TorchRunner:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        runner = TorchRunner(decoder, PAGES, PAGE, "paged")
        runner.attention._attend = dense  # type: ignore[attr-defined]
        return runner

    return make


class FakeCapture:
    """Keeps the call; replaying makes it again and leaves its result where the first one was."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.replays = 0

    def __call__(self, forward: Callable[[], torch.Tensor]) -> tuple[Any, torch.Tensor]:
        static = forward()
        self.rows.append(static.shape[0])

        def replay() -> None:
            self.replays += 1
            static.copy_(forward())

        return replay, static


def served(runner: Any, **options: Any) -> Any:
    sizes = [(9, 20), (30, 12), (3, 25), (17, 8), (22, 15)]
    asked = [ask(i, p, m) for i, (p, m) in enumerate(sizes)]
    limits = Limits(max_seqs=5, token_budget=64, chunk=16)
    return run(asked, runner=runner, pages=PAGES, page_size=PAGE, limits=limits, **options)


@pytest.mark.parametrize("buckets", [(1, 2, 4, 8), (3,), (16,)])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_text_is_the_same_and_hits_are_told(
    paged: Callable[[Decoder], TorchRunner], buckets: tuple[int, ...], overlap: bool
) -> None:
    plain = Observed(TorchRunner(small_decoder(), PAGES, PAGE))
    expected = served(plain)
    runner, capture = paged(small_decoder()), FakeCapture()
    graphs = runner.graphs = CudaGraphs(runner.decoder, runner.attention, buckets, capture)
    graphs.prepare()
    assert capture.rows == sorted(buckets, reverse=True)
    runner.cache.poison([PAGES])  # the trash page: what padded rows read must reach nobody
    done = served(Observed(runner), overlap=overlap)
    same_text(expected.outputs, plain.gaps, done.outputs)
    rows = [row for row in done.steps if row.num_decode_requests is not None]
    for row in rows:
        fits = row.kind == "decode" and bucket_of(buckets, row.num_decode_requests)
        hit = int(bool(fits)) if row.kind == "decode" else None
        assert (row.graph_hit, row.padded_batch) == (hit, fits or None)
        assert row.graph == ("cuda" if fits else "eager")
    assert capture.replays == sum(row.graph_hit or 0 for row in rows) > 0
    if buckets == (3,):
        assert any(row.graph_hit == 0 for row in rows), "a miss"


def test_padded_rows_change_no_page_but_the_trash_page(
    paged: Callable[[Decoder], TorchRunner],
) -> None:
    runner = paged(small_decoder())
    graphs = CudaGraphs(runner.decoder, runner.attention, (4,), FakeCapture())
    before = [layer.clone() for layer in runner.cache.layers]
    graphs.prepare()
    batch = graphs._captured[4]
    assert len(batch.inputs) == 2 + 4, "tokens, positions and the tensors of the batch"
    for layer, was in zip(runner.cache.layers, before, strict=True):
        assert torch.equal(layer[: PAGES * PAGE], was[: PAGES * PAGE])
        assert not torch.equal(layer[PAGES * PAGE :], was[PAGES * PAGE :])


def test_what_cannot_be_a_graph_says_so(paged: Callable[[Decoder], TorchRunner]) -> None:
    gather = TorchRunner(small_decoder(), PAGES, PAGE)
    with pytest.raises(UsageError, match="--attention paged"):
        CudaGraphs(gather.decoder, gather.attention, (1,), FakeCapture())
    runner = paged(small_decoder())
    object.__setattr__(runner.decoder.spec, "experts", 4)
    with pytest.raises(UsageError, match="routed experts"):
        CudaGraphs(runner.decoder, runner.attention, (1,), FakeCapture())


def test_the_batch_has_only_tensors_that_a_replay_needs(
    paged: Callable[[Decoder], TorchRunner],
) -> None:
    """A host number that differs from step to step would be frozen by the capture."""
    from stepscope.engine.plan import StepPlan
    from stepscope.runner.probe import decode_plan

    runner = paged(small_decoder())
    built: list[PagedBatch] = [
        runner.attention.build(StepPlan(), 0, 8),
        runner.attention.build(decode_plan(3, 40, PAGE), 0, 8),
        runner.attention.build(decode_plan(8, 5, PAGE), 0, 8),
    ]
    for name in ("decodes", "longest", "splits"):
        assert len({getattr(batch, name) for batch in built}) == 1
    for name in ("page_table", "context_lens", "query_starts", "write_slots"):
        assert len({getattr(batch, name).shape for batch in built}) == 1
