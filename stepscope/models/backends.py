"""How a layer's queries meet the context: one interface, and who implements it.

`gather` assembles the scattered pages and hands them to torch's attention, so that the assembly is
seen as time of its own. `paged` (models/paged.py) reads K and V where they lie.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any, Protocol

import torch

from stepscope.engine.plan import Lap, StepPlan
from stepscope.errors import UsageError
from stepscope.models.attention import AttentionBatch, BatchBuilder, attend, attention_product
from stepscope.models.kv_cache import KvCache
from stepscope.records import FORWARD, GATHER
from stepscope.spec import ModelSpec


class StepBatch(Protocol):
    """What the decoder itself reads of a step's tensors; the rest is between build and call."""

    sampled_rows: torch.Tensor | None  # None = every row


class Attention(Protocol):
    """T = tokens of the step. Nothing here depends on values on the device, only on shapes."""

    name: str

    def build(self, plan: StepPlan, split: int, pad_to: int | None = None) -> Any:
        """The step's StepBatch; plan and split are what `order_decodes` made of the decodes.

        pad_to: for a step of at most so many decodes and nothing else, as if so many decoded; the
        rows added write to and read from the trash page.
        """

    def __call__(
        self, layer: int, local: bool, qkv: torch.Tensor, batch: Any, lap: Lap
    ) -> torch.Tensor:
        """Store K and V of qkv (T, (heads + 2 kv_heads) x head_dim), rotated, then attend.

        Returns (T, heads x head_dim). local: the layer sees no further than the window.
        """

    def gather_bytes(self, batch: Any) -> int | None:
        """Bytes of context assembled over all layers, without padding; None = read in place."""


class GatherAttention:
    """Rows of all contexts by one index_select per layer, then scaled dot products over them."""

    name = "gather"

    def __init__(self, spec: ModelSpec, cache: KvCache, trash_page: int) -> None:
        self._spec, self._cache = spec, cache
        self._width = spec.heads * spec.head_dim
        self._product = attention_product(spec)
        if cache.layers[0].device.type == "cuda":
            # It plans anew for each length, which takes longer than many steps.
            torch.backends.cuda.enable_cudnn_sdp(False)
        self._builder = BatchBuilder(
            cache.page_size,
            trash_page,
            cache.computed,
            cache.layers[0].device,
            spec.window if spec.local_layers else None,
        )

    def build(self, plan: StepPlan, split: int, pad_to: int | None = None) -> AttentionBatch:
        return self._builder.build(plan, split, pad_to)

    def __call__(
        self, layer: int, local: bool, qkv: torch.Tensor, batch: AttentionBatch, lap: Lap
    ) -> torch.Tensor:
        view = batch.local if local else batch.full
        self._cache.write(layer, batch.write_slots, qkv[:, self._width :])
        lap(FORWARD)
        context = self._cache.gather(layer, view.reads, view.rows_each)
        if view.stale is not None:
            context.index_fill_(0, view.stale, 0)
        lap(GATHER)
        return attend(self._spec, qkv[:, : self._width], context, view, self._product)

    def gather_bytes(self, batch: AttentionBatch) -> int | None:
        local = self._spec.local_layers
        rows = (self._spec.layers - local) * batch.full.tokens + local * batch.local.tokens
        return rows * self._cache.row_bytes


def choose_attention(name: str, device: str) -> str:
    """The backend that `name` (auto, gather or paged) means on this kind of device (cpu, cuda).

    Raises UsageError where it cannot run there.
    """
    if name == "auto":
        name = "paged" if device == "cuda" else "gather"
    if name != "paged":
        return name
    if device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise UsageError(
            f"attention = paged is a Triton kernel and does not run on {device}; "
            "use --attention gather"
        )
    if find_spec("triton") is None:
        raise UsageError(
            "attention = paged needs triton, which is not installed; "
            "use pip install 'stepscope[triton]' or --attention gather"
        )
    return name


def attention_for(
    name: str, spec: ModelSpec, cache: KvCache, trash_page: int, max_context: int
) -> Attention:
    """name: auto, gather or paged. max_context: tokens of the longest context there can be.

    Raises UsageError where the backend cannot run on the cache's device.
    """
    if choose_attention(name, cache.layers[0].device.type) == "gather":
        return GatherAttention(spec, cache, trash_page)
    from stepscope.models.paged import PagedAttention

    return PagedAttention(spec, cache, trash_page, max_context)
