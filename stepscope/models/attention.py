"""Attention over gathered context: decodes in one ragged batch, each prefill chunk by itself.

Decodes are padded to the longest context of their group; the padding repeats the request's own
first row and is masked. A group is split in two where padding would dominate (one long context
among short ones), so at most two attention calls serve all decodes.

Layers with a sliding window have a view of their own, which gathers no more than their window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch.nn import functional as F

from stepscope.engine.plan import Slice, StepPlan
from stepscope.spec import ModelSpec

Product = Callable[..., torch.Tensor]
# Padded rows that must be saved before a second attention call pays for its dispatch.
SPLIT_GAIN_ROWS = 1024


@dataclass(slots=True)
class DecodeGroup:
    """Decodes `rows` (first, last + 1) with contexts padded to `length`."""

    first: int
    last: int
    length: int
    mask: torch.Tensor | None  # (n, 1, 1, length) additive; None when nothing is padded


@dataclass(slots=True)
class PrefillChunk:
    first: int  # token rows
    last: int
    length: int
    mask: torch.Tensor | None  # (count, length) additive; None = plain causal, from position 0


@dataclass(slots=True)
class ContextView:
    """What one kind of layer reads. read_slots: decode groups, then chunks, in order."""

    read_slots: torch.Tensor
    tokens: int  # of context, without the padding
    groups: list[DecodeGroup] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)


@dataclass(slots=True)
class AttentionBatch:
    """Index tensors of one step. Without a window `local` is `full` itself."""

    write_slots: torch.Tensor  # (T,)
    sampled_rows: torch.Tensor | None  # None = every row
    full: ContextView
    local: ContextView


def attention_product(spec: ModelSpec) -> Product | None:
    """softmax(q k^T x scale + mask) v with the family's own scale or cap; None = torch's own."""
    if spec.attn_softcap is not None:
        scale = spec.head_dim**-0.5 if spec.query_scale is None else spec.query_scale
        return partial(_capped_attention, scale=scale, cap=spec.attn_softcap)
    if spec.query_scale is not None:
        return partial(F.scaled_dot_product_attention, scale=spec.query_scale)
    return None


def _capped_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    *,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """Scores squeezed into (-cap, cap) by tanh before the mask (Gemma 2 report, section 2)."""
    scores = cap * torch.tanh(q @ k.mT * (scale / cap))
    if is_causal:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(ahead, float("-inf"))
    if attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype) @ v


def attend(
    spec: ModelSpec,
    q: torch.Tensor,
    context: torch.Tensor,
    view: ContextView,
    product: Product | None = None,
) -> torch.Tensor:
    """(T, heads x head_dim) for q of that shape and gathered rows (R, 2 x kv_heads x head_dim)."""
    product = product or F.scaled_dot_product_attention
    kv, group, dim = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
    outputs: list[torch.Tensor] = []
    row = 0
    for part in view.groups:
        n = part.last - part.first
        rows = context[row : row + n * part.length].view(n, part.length, 2, kv, dim)
        row += n * part.length
        keys, values = rows.permute(2, 0, 3, 1, 4).unbind(0)  # (n, kv, length, dim)
        queries = q[part.first : part.last].view(n, kv, group, dim)
        out = product(queries, keys, values, attn_mask=part.mask)
        outputs.append(out.reshape(n, -1))
    for chunk in view.chunks:
        count = chunk.last - chunk.first
        rows = context[row : row + chunk.length].view(chunk.length, 2, kv, 1, dim)
        row += chunk.length
        keys, values = rows.permute(1, 2, 3, 0, 4).expand(-1, -1, group, -1, -1).unbind(0)
        queries = q[chunk.first : chunk.last].view(count, kv, group, dim).permute(1, 2, 0, 3)
        out = product(queries, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None)
        outputs.append(out.permute(2, 0, 1, 3).reshape(count, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _first_seen(piece: Slice, window: int | None) -> int:
    """The first position that any query of the slice attends to."""
    return 0 if window is None else max(0, piece.start - window + 1)


def order_decodes(decodes: list[Slice]) -> tuple[list[Slice], int]:
    """Decodes by context, longest first, and where to split them (0 = one group)."""
    ordered = sorted(decodes, key=lambda s: -s.context)
    lengths = np.array([s.context for s in ordered])
    if len(ordered) < 2:
        return ordered, 0
    whole = lengths[0] * len(ordered)
    cuts = np.arange(1, len(ordered))
    split = cuts * lengths[0] + (len(ordered) - cuts) * lengths[1:]
    best = int(split.argmin())
    worthwhile = whole - split[best] > max(SPLIT_GAIN_ROWS, whole // 4)
    return ordered, int(cuts[best]) if worthwhile else 0


class BatchBuilder:
    """Builds the index tensors of a plan whose decodes are ordered as `order_decodes` left them.

    window: of the model's local layers, None if it has none.
    """

    def __init__(
        self, page_size: int, dtype: torch.dtype, device: torch.device, window: int | None = None
    ) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.device = device
        self.window = window

    def build(self, plan: StepPlan, split: int) -> AttentionBatch:
        writes = [self._slots(s, s.start, s.context) for s in plan.slices]
        full = self._view(plan, split, None)
        return AttentionBatch(
            self._index(np.concatenate(writes)),
            self._sampled_rows(plan),
            full,
            full if self.window is None else self._view(plan, split, self.window),
        )

    def _view(self, plan: StepPlan, split: int, window: int | None) -> ContextView:
        reads: list[np.ndarray] = []
        count = len(plan.decodes)
        bounds = [(0, split), (split, count)] if split else [(0, count)] if count else []
        groups = [self._group(plan.decodes[a:b], a, b, reads, window) for a, b in bounds]
        tokens = sum(s.context - _first_seen(s, window) for s in plan.slices)
        chunks: list[PrefillChunk] = []
        row = count
        for piece in plan.prefills:
            first = _first_seen(piece, window)
            reads.append(self._slots(piece, first, piece.context))
            mask = self._chunk_mask(piece, first, window)
            chunks.append(PrefillChunk(row, row + piece.count, piece.context - first, mask))
            row += piece.count
        return ContextView(self._index(np.concatenate(reads)), tokens, groups, chunks)

    def _group(
        self,
        decodes: list[Slice],
        first: int,
        last: int,
        reads: list[np.ndarray],
        window: int | None,
    ) -> DecodeGroup:
        begins = [_first_seen(s, window) for s in decodes]
        lengths = [s.context - begin for s, begin in zip(decodes, begins, strict=True)]
        longest = lengths[0]
        slots = np.empty((len(decodes), longest), dtype=np.int64)
        for row, piece in enumerate(decodes):
            own = self._slots(piece, begins[row], piece.context)
            slots[row, : lengths[row]] = own
            slots[row, lengths[row] :] = own[0]
        reads.append(slots.reshape(-1))
        return DecodeGroup(first, last, longest, self._pad_mask(lengths))

    def _pad_mask(self, lengths: list[int]) -> torch.Tensor | None:
        if lengths[-1] == lengths[0]:
            return None
        beyond = np.arange(lengths[0]) >= np.array(lengths)[:, None]
        return self._additive(beyond)[:, None, None, :]

    def _chunk_mask(self, piece: Slice, first: int, window: int | None) -> torch.Tensor | None:
        passed = window is not None and piece.context > window
        if piece.start == 0 and not passed:
            return None
        keys = np.arange(first, piece.context)
        queries = np.arange(piece.start, piece.context)[:, None]
        hidden = keys > queries
        if passed:
            hidden |= keys <= queries - (window or 0)
        return self._additive(hidden)

    def _additive(self, masked: np.ndarray) -> torch.Tensor:
        mask = torch.zeros(masked.shape, dtype=self.dtype)
        mask.masked_fill_(torch.from_numpy(masked), float("-inf"))
        return mask.to(self.device)

    def _slots(self, piece: Slice, begin: int, end: int) -> np.ndarray:
        """Slots of positions begin..end-1 of the request."""
        size = self.page_size
        pages = np.frombuffer(piece.request.pages, dtype=np.int64)[begin // size : -(-end // size)]
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        skip = begin % size
        return slots[skip : skip + end - begin]

    def _sampled_rows(self, plan: StepPlan) -> torch.Tensor | None:
        if not plan.prefills:
            return None
        rows = list(range(len(plan.decodes)))
        row = len(plan.decodes)
        for piece in plan.prefills:
            row += piece.count
            if piece.samples:
                rows.append(row - 1)
        return self._index(np.array(rows, dtype=np.int64))

    def _index(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
