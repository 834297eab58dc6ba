"""Attention over gathered context: decodes in one ragged batch, each prefill chunk by itself.

Decodes are padded to the longest context of their group; the padding repeats the request's own
first row and is masked. A group is split in two where padding would dominate (one long context
among short ones), so at most two attention calls serve all decodes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn import functional as F

from stepscope.engine.plan import Slice, StepPlan
from stepscope.spec import ModelSpec

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
    mask: torch.Tensor | None  # (count, length) additive; None = plain causal


@dataclass(slots=True)
class AttentionBatch:
    """Index tensors of one step. read_slots: decode groups, then chunks, in order."""

    write_slots: torch.Tensor  # (T,)
    read_slots: torch.Tensor
    sampled_rows: torch.Tensor | None  # None = every row
    groups: list[DecodeGroup] = field(default_factory=list)
    chunks: list[PrefillChunk] = field(default_factory=list)


def attend(
    spec: ModelSpec, q: torch.Tensor, context: torch.Tensor, batch: AttentionBatch
) -> torch.Tensor:
    """(T, heads x head_dim) for q of that shape and gathered rows (R, 2 x kv_heads x head_dim)."""
    kv, group, dim = spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim
    outputs: list[torch.Tensor] = []
    row = 0
    for part in batch.groups:
        n = part.last - part.first
        rows = context[row : row + n * part.length].view(n, part.length, 2, kv, dim)
        row += n * part.length
        keys, values = rows.permute(2, 0, 3, 1, 4).unbind(0)  # (n, kv, length, dim)
        queries = q[part.first : part.last].view(n, kv, group, dim)
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=part.mask)
        outputs.append(out.reshape(n, -1))
    for chunk in batch.chunks:
        count = chunk.last - chunk.first
        rows = context[row : row + chunk.length].view(chunk.length, 2, kv, 1, dim)
        row += chunk.length
        keys, values = rows.permute(1, 2, 3, 0, 4).expand(-1, -1, group, -1, -1).unbind(0)
        queries = q[chunk.first : chunk.last].view(count, kv, group, dim).permute(1, 2, 0, 3)
        out = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=chunk.mask, is_causal=chunk.mask is None
        )
        outputs.append(out.permute(2, 0, 1, 3).reshape(count, -1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


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
    """Builds the index tensors of a plan whose decodes are ordered as `order_decodes` left them."""

    def __init__(self, page_size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size = page_size
        self.dtype = dtype
        self.device = device

    def build(self, plan: StepPlan, split: int) -> AttentionBatch:
        writes = [self._slots(s, s.start, s.context) for s in plan.slices]
        reads: list[np.ndarray] = []
        count = len(plan.decodes)
        bounds = [(0, split), (split, count)] if split else [(0, count)] if count else []
        groups = [self._group(plan.decodes[a:b], a, b, reads) for a, b in bounds]
        chunks: list[PrefillChunk] = []
        row = count
        for piece in plan.prefills:
            reads.append(self._slots(piece, 0, piece.context))
            chunks.append(
                PrefillChunk(row, row + piece.count, piece.context, self._chunk_mask(piece))
            )
            row += piece.count
        return AttentionBatch(
            self._index(np.concatenate(writes)),
            self._index(np.concatenate(reads)),
            self._sampled_rows(plan),
            groups,
            chunks,
        )

    def _group(
        self, decodes: list[Slice], first: int, last: int, reads: list[np.ndarray]
    ) -> DecodeGroup:
        lengths = [s.context for s in decodes]
        longest = lengths[0]
        slots = np.empty((len(decodes), longest), dtype=np.int64)
        for row, piece in enumerate(decodes):
            own = self._slots(piece, 0, piece.context)
            slots[row, : piece.context] = own
            slots[row, piece.context :] = own[0]
        reads.append(slots.reshape(-1))
        return DecodeGroup(first, last, longest, self._pad_mask(lengths))

    def _pad_mask(self, lengths: list[int]) -> torch.Tensor | None:
        if lengths[-1] == lengths[0]:
            return None
        beyond = np.arange(lengths[0]) >= np.array(lengths)[:, None]
        return self._additive(beyond)[:, None, None, :]

    def _chunk_mask(self, piece: Slice) -> torch.Tensor | None:
        if piece.start == 0:
            return None
        ahead = np.arange(piece.context) > np.arange(piece.start, piece.context)[:, None]
        return self._additive(ahead)

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
