"""Paged attention against a dense reference; run by test_paged.py in a process of its own.

On a CPU that process has Triton's interpreter switched on, which must happen before triton is first
imported; on a CUDA device the same cases run as compiled kernels.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.scheduler import Limits
from stepscope.models.backends import GatherAttention, attention_for
from stepscope.models.dummy import GENERIC_SPEC
from stepscope.models.kv_cache import KvCache, kv_cache
from stepscope.models.paged import FURTHER, PagedAttention, split_count
from stepscope.runner.torch_runner import TorchRunner
from stepscope.spec import ModelSpec
from tests.engine.harness import Observed, Outcome, ask, run, same_text, small_decoder

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
CLOSE = 1e-5 if INTERPRETED else 1e-4
# K, V, queries and results with 8 bits of mantissa; values of about 1.
CLOSE_BF16 = 0.03


def shape(**changes: Any) -> ModelSpec:
    """One layer; a window makes it a local one."""
    base = replace(GENERIC_SPEC.resized(layers=1), heads=4, kv_heads=2, head_dim=16)
    pattern = {"layer_pattern": "s"} if "window" in changes else {}
    return replace(base, **pattern, **changes)


@dataclass
class Scene:
    """Sequences of (cached, new) tokens on scattered pages, with NaN in everything else."""

    spec: ModelSpec
    lengths: list[tuple[int, int]]
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    max_context: int = 256

    def __post_init__(self) -> None:
        draw = np.random.default_rng(3)
        torch.manual_seed(3)
        counts = [-(-(old + new) // self.page_size) for old, new in self.lengths]
        self.pages = sum(counts) + 3
        self.cache = kv_cache(self.spec, self.pages + 1, self.page_size, self.dtype, DEVICE)
        self.cache.poison(range(self.pages + 1))
        free = draw.permutation(self.pages).tolist()
        plan = StepPlan()
        for i, (old, new) in enumerate(self.lengths):
            request = ask(i, old + new)
            request.pages = array("q", [free.pop() for _ in range(counts[i])])
            kind = "decode" if new == 1 and old else "prefill"
            piece = Slice(request, old, new, kind, True)
            (plan.decodes if kind == "decode" else plan.prefills).append(piece)
        self.plan = plan
        heads, kv, dim = self.spec.heads, self.spec.kv_heads, self.spec.head_dim
        # Rows of q, K and V of every token of every sequence; the step's own are the last.
        self.rows = [
            torch.randn(s.context, (heads + 2 * kv) * dim, dtype=self.dtype, device=DEVICE)
            for s in plan.slices
        ]
        for piece, rows in zip(plan.slices, self.rows, strict=True):
            if piece.start:
                slots = torch.tensor([self.slot(piece, p) for p in range(piece.start)])
                self.cache.write(0, slots.to(DEVICE), rows[: piece.start, heads * dim :])

    def slot(self, piece: Slice, position: int) -> int:
        page = piece.request.pages[position // self.page_size]
        return page * self.page_size + position % self.page_size

    @property
    def qkv(self) -> torch.Tensor:
        pairs = zip(self.plan.slices, self.rows, strict=True)
        return torch.cat([rows[piece.start :] for piece, rows in pairs])

    def backend(self, name: str = "paged", cache: KvCache | None = None) -> Any:
        return attention_for(name, self.spec, cache or self.cache, self.pages, self.max_context)

    def run(self, splits: int | None = None, pad_to: int | None = None) -> torch.Tensor:
        backend = self.backend()
        batch = backend.build(self.plan, 0, pad_to)
        batch.splits = splits or batch.splits
        qkv = self.qkv
        missing = batch.write_slots.shape[0] - qkv.shape[0]
        qkv = torch.cat([qkv, qkv[:1].expand(missing, -1)]) if missing else qkv
        out: torch.Tensor = backend(0, self.spec.is_local(0), qkv, batch, lambda phase: None)
        return out.float().cpu()

    def expected(self) -> torch.Tensor:
        """Every score written out, in fp32."""
        spec = self.spec
        heads, kv, dim = spec.heads, spec.kv_heads, spec.head_dim
        scale = dim**-0.5 if spec.query_scale is None else spec.query_scale
        outs = []
        for piece, rows in zip(self.plan.slices, self.rows, strict=True):
            values = rows.float().cpu().view(piece.context, heads + 2 * kv, dim)
            q, k, v = values.split([heads, kv, kv], 1)
            k, v = (x.repeat_interleave(heads // kv, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q[piece.start :], k) * scale
            if spec.attn_softcap is not None:
                scores = spec.attn_softcap * torch.tanh(scores / spec.attn_softcap)
            query = torch.arange(piece.start, piece.context)[:, None]
            key = torch.arange(piece.context)
            hidden = (key > query) | (key <= query - (spec.window or FURTHER))
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
        return torch.cat(outs)


def error(scene: Scene, **options: Any) -> float:
    return (scene.run(**options) - scene.expected()).abs().max().item()


DECODES = [(1, 1), (6, 1), (69, 1), (149, 1)]
CHUNKS = [(0, 1), (0, 7), (30, 11), (70, 40)]
MIXED = [*DECODES, *CHUNKS]


@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_ragged_decodes_and_chunks_at_any_page_size(page_size: int) -> None:
    assert error(Scene(shape(), MIXED, page_size)) < CLOSE


@pytest.mark.parametrize("heads,kv_heads", [(2, 2), (3, 1), (8, 2), (8, 1), (17, 1)])
def test_heads_that_share_keys(heads: int, kv_heads: int) -> None:
    assert error(Scene(shape(heads=heads, kv_heads=kv_heads), MIXED[2:6])) < CLOSE


@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 256])
def test_any_width_of_a_head(head_dim: int) -> None:
    assert error(Scene(shape(head_dim=head_dim), MIXED[2:6])) < CLOSE


@pytest.mark.parametrize("window", [1, 13, 64, 1000])
def test_a_sliding_window(window: int) -> None:
    scene = Scene(shape(window=window), MIXED, 5)
    assert error(scene) < CLOSE
    full = replace(scene, spec=shape())
    assert ((scene.expected() - full.expected()).abs().max() > 0.1) == (window < 100)


def test_a_row_that_sees_nothing_of_the_first_block_of_keys() -> None:
    """64 tokens of a wide head share a program, which takes fewer keys at a time."""
    spec = shape(heads=1, kv_heads=1, head_dim=256, window=2)
    assert error(Scene(spec, [(0, 70)], dtype=torch.bfloat16)) < CLOSE_BF16


def test_a_cap_and_a_scale_of_its_own() -> None:
    """Scores beyond the cap on both sides, and small ones, where tanh is the identity."""
    capped = Scene(shape(attn_softcap=2.0, query_scale=1.5), MIXED)
    assert error(capped) < CLOSE
    plain = replace(capped, spec=shape(query_scale=1.5))
    assert (capped.expected() - plain.expected()).abs().max() > 0.1
    assert error(Scene(shape(attn_softcap=50.0, query_scale=0.01), MIXED[:5])) < CLOSE


@pytest.mark.parametrize("window", [None, 13])
def test_decodes_split_into_any_number_of_parts(window: int | None) -> None:
    """Short contexts leave most parts with nothing, which must not show, least of all as NaN."""
    spec = shape() if window is None else shape(window=window)
    scene = Scene(spec, DECODES)
    for splits in (1, 2, 3, 8):
        assert error(scene, splits=splits) < CLOSE, splits


def test_values_stored_in_other_types() -> None:
    """Against what `gather` computes of the same stored rows."""
    for kv_dtype in ("bf16", "int8"):
        scene = Scene(shape(kv_dtype=kv_dtype), MIXED)
        ours = scene.run()
        gather = scene.backend("gather")
        assert isinstance(gather, GatherAttention)
        plan = replace(scene.plan, decodes=list(scene.plan.decodes))
        plan.decodes.sort(key=lambda s: -s.context)
        order = [scene.plan.decodes.index(s) for s in plan.decodes]
        order += range(len(order), scene.qkv.shape[0])
        batch = gather.build(plan, 0)
        theirs = gather(0, False, scene.qkv[order], batch, lambda phase: None).float().cpu()
        assert (ours[order] - theirs).abs().max() < CLOSE, kv_dtype
        rounding = (ours - scene.expected()).abs().max()
        assert 1e-4 < rounding < CLOSE_BF16, "and they are rounded"


def test_a_model_in_bf16() -> None:
    scene = Scene(shape(), MIXED, dtype=torch.bfloat16)
    assert 0 < error(scene) < CLOSE_BF16


# ------------------------------------------------------------------ padded steps


def test_padded_rows_change_nothing_and_touch_the_trash_page_alone() -> None:
    plain = Scene(shape(), DECODES)
    padded = Scene(shape(), DECODES)  # its trash page holds NaN
    before = padded.cache.layers[0].clone()
    out = padded.run(splits=3, pad_to=7)
    assert torch.equal(out[:4], plain.run(splits=3))
    assert torch.isfinite(out).all() and out.shape[0] == 7
    changed = (padded.cache.layers[0] != before) & ~(
        padded.cache.layers[0].isnan() & before.isnan()
    )
    rows = set(changed.any(1).nonzero().flatten().tolist())
    own = {padded.slot(s, s.start) for s in padded.plan.decodes}
    assert rows == own | {padded.pages * padded.page_size}


def test_a_padded_step_depends_on_the_bucket_alone() -> None:
    """So the tensors of a captured step can be filled with those of another and it be replayed."""
    scenes = [Scene(shape(), lengths) for lengths in (DECODES[:1], DECODES[1:], [(240, 1)])]
    batches = [s.backend().build(s.plan, 0, 3) for s in scenes]
    for name in ("write_slots", "page_table", "context_lens", "query_starts"):
        assert len({getattr(b, name).shape for b in batches}) == 1, name
    assert len({(b.decodes, b.longest, b.splits) for b in batches}) == 1
    assert all(b.sampled_rows is None for b in batches)
    assert batches[0].context_lens.tolist() == [2, 1, 1]
    assert batches[0].query_starts.tolist() == [0, 1, 2, 3]
    captured, other, scene = batches[0], batches[1], scenes[1]
    for name in ("write_slots", "page_table", "context_lens", "query_starts"):
        getattr(captured, name).copy_(getattr(other, name))
    out = scene.backend()(0, False, scene.qkv, captured, lambda phase: None)
    assert (out.float().cpu() - scene.expected()).abs().max() < CLOSE


def test_how_many_parts() -> None:
    assert split_count(8 * 8, 100_000, 132) == 5
    assert split_count(1 * 3, 100_000, 132) == 32, "never more than the second kernel takes"
    assert split_count(1 * 3, 300, 132) == 3, "not below so many tokens each"
    assert split_count(128 * 8, 100_000, 132) == 1
    assert split_count(0, 16, 4) == 1


# ------------------------------------------------------------------ seen by torch


def test_torch_sees_one_opaque_operator() -> None:
    scene = Scene(shape(), MIXED[2:6])
    backend = scene.backend()
    batch = backend.build(scene.plan, 0)
    assert isinstance(backend, PagedAttention) and backend.gather_bytes(batch) is None

    def step(qkv: torch.Tensor) -> torch.Tensor:
        return backend(0, False, qkv * 1.0, batch, lambda phase: None) + 0.0

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.inference_mode():
        out = compiled(scene.qkv)
    assert (out.float().cpu() - scene.expected()).abs().max() < CLOSE
    torch.library.opcheck(
        torch.ops.stepscope.paged_attention.default,
        (
            scene.qkv, scene.cache.layers[0], None, batch.page_table, batch.context_lens,
            batch.query_starts, [4, 2, 16, 16], [batch.decodes, batch.longest, batch.splits],
            FURTHER, 0.25, 0.0,
        ),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


# ------------------------------------------------------------------ in the engine


def served(attention: str, bucket: int | None) -> tuple[Outcome, Observed]:
    """Ragged prompts in chunks, and too few pages, so that some are computed again."""
    decoder = small_decoder()
    if DEVICE.type == "cuda":
        pytest.skip("the decoder of the tests lives on the CPU")
    runner = TorchRunner(decoder, 8, 8, attention)
    runner.bucket = lambda n: bucket
    observed = Observed(runner)
    asked = [ask(i, n, m, ignore_eos=True) for i, (n, m) in enumerate([(19, 6), (5, 8), (28, 4)])]
    limits = Limits(max_seqs=3, token_budget=24, chunk=16)
    done = run(asked, pages=8, page_size=8, limits=limits, runner=observed)
    assert runner.attention.name == attention
    return done, observed


@pytest.mark.parametrize("bucket", [None, 3])
def test_the_same_text_as_with_gather(bucket: int | None) -> None:
    expected, seen = served("gather", None)
    done, _ = served("paged", bucket)
    assert same_text(expected.outputs, seen.gaps, done.outputs) == []
    assert done.trace == expected.trace and done.preemptions > 0
    assert any("p" in step and "d" in step for step in done.trace), "a mixed step was among them"
    assert {row.kv_gather_bytes for row in done.work} == {None}
    assert None not in {row.kv_gather_bytes for row in expected.work}
