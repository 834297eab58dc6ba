"""Attention that reads K and V in place through a page table: nothing is gathered.

What changes from step to step is in tensors. Of a step of decodes alone, padded to B requests, the
shapes, the grid and every number on the host depend on B alone, so a CUDA graph captured for B can
be replayed after new contents were copied into the batch's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from stepscope.engine.plan import Lap, Slice, StepPlan
from stepscope.models.attention import padded, sampled_rows, score_scale, write_slots
from stepscope.models.kv_cache import KvCache
from stepscope.models.transfer import upload
from stepscope.spec import ModelSpec

# Parts into which the context of a decode is split, so that few requests still fill the device:
# about this many programs per processor, each of them over this many tokens or more.
MOST_SPLITS = 32
PROGRAMS_PER_PROCESSOR = 2
SPLIT_TOKENS = 128
# Rows of the page table are padded to a multiple of it: one width, and one compiled kernel, for
# many lengths.
TABLE_GRAIN = 16
INTERPRETED_PROCESSORS = 4
FURTHER = 1 << 30  # a window that no context reaches


@dataclass(slots=True)
class PagedBatch:
    """Index tensors of one step: S sequences, the first `decodes` of which have one query each."""

    write_slots: torch.Tensor  # (T,) int64
    sampled_rows: torch.Tensor | None  # int64; None = every row
    page_table: torch.Tensor  # (S, pages) int32
    context_lens: torch.Tensor  # (S,) int32: tokens attended to, the new ones included
    query_starts: torch.Tensor  # (S + 1,) int32: token rows of each sequence
    decodes: int
    longest: int  # most queries of one of the other sequences; 0 without any
    splits: int  # of the decodes' contexts


class PagedAttention:
    """One Triton kernel for decodes and prefill chunks alike (`models/paged_kernel.py`)."""

    name = "paged"

    def __init__(self, spec: ModelSpec, cache: KvCache, trash_page: int, max_context: int) -> None:
        """max_context: tokens of the longest context; page tables of padded steps hold it."""
        from stepscope.models import paged_kernel  # registers the operator

        self._attend, self._operator = paged_kernel.attend, paged_kernel.paged_attention
        self._spec, self._cache, self._trash_page = spec, cache, trash_page
        self._device = cache.layers[0].device
        self._most_pages = _table_width(max_context, cache.page_size)
        self._processors = INTERPRETED_PROCESSORS
        if self._device.type == "cuda":
            found = torch.cuda.get_device_properties(self._device)
            self._processors = found.multi_processor_count
        self._scale, self._cap = score_scale(spec), spec.attn_softcap or 0.0
        self._width = spec.heads * spec.head_dim

    def build(self, plan: StepPlan, split: int, pad_to: int | None = None) -> PagedBatch:
        decodes = padded(plan.decodes, pad_to, self._trash_page)
        slices, page_size = decodes + plan.prefills, self._cache.page_size
        width = _table_width(max(s.context for s in slices), page_size)
        arrays = [
            write_slots(decodes, plan.prefills, page_size),
            _page_table(slices, width, page_size),
            np.array([s.context for s in slices], dtype=np.int32),
            np.cumsum([0, *(s.count for s in slices)], dtype=np.int32),
        ]
        rows = sampled_rows(plan)
        slots, table, lens, starts, *sampled = upload(
            arrays if rows is None else [*arrays, rows], self._device
        )
        if pad_to is not None:
            table, width = self._widened(table), self._most_pages
        return PagedBatch(
            slots,
            sampled[0] if sampled else None,
            table,
            lens,
            starts,
            len(decodes),
            max((s.count for s in plan.prefills), default=0),
            split_count(len(decodes) * self._spec.kv_heads, width * page_size, self._processors),
        )

    def _widened(self, table: torch.Tensor) -> torch.Tensor:
        """The width of the longest context there can be, which megabytes need not be sent for.

        Nobody reads what lies behind a context's own pages, so that may hold anything.
        """
        whole = table.new_empty(table.shape[0], self._most_pages)
        whole[:, : table.shape[1]] = table
        return whole

    def __call__(
        self, layer: int, local: bool, qkv: torch.Tensor, batch: PagedBatch, lap: Lap
    ) -> torch.Tensor:
        spec, cache = self._spec, self._cache
        cache.write(layer, batch.write_slots, qkv[:, self._width :])
        attend = self._operator if torch.compiler.is_compiling() else self._attend
        out: torch.Tensor = attend(
            qkv,
            cache.layers[layer],
            cache.scales[layer] if cache.scales else None,
            batch.page_table,
            batch.context_lens,
            batch.query_starts,
            [spec.heads, spec.kv_heads, spec.head_dim, cache.page_size],
            [batch.decodes, batch.longest, batch.splits],
            spec.window if local and spec.window is not None else FURTHER,
            self._scale,
            self._cap,
        )
        return out

    def gather_bytes(self, batch: PagedBatch) -> int | None:
        return None


def split_count(pairs: int, most_tokens: int, processors: int) -> int:
    """Parts of each context, for so many (request, kv head) pairs and no longer contexts."""
    wanted = -(-PROGRAMS_PER_PROCESSOR * processors // max(pairs, 1))
    return max(1, min(wanted, MOST_SPLITS, -(-most_tokens // SPLIT_TOKENS)))


def _table_width(tokens: int, page_size: int) -> int:
    pages = -(-tokens // page_size)
    return -(-pages // TABLE_GRAIN) * TABLE_GRAIN


def _page_table(slices: list[Slice], width: int, page_size: int) -> np.ndarray:
    table = np.zeros((len(slices), width), dtype=np.int32)
    for row, piece in enumerate(slices):
        count = -(-piece.context // page_size)
        table[row, :count] = np.frombuffer(piece.request.pages, dtype=np.int64)[:count]
    return table
