"""Attention over gathered context: decodes in one ragged batch, each prefill chunk by itself.

Whole pages are gathered, which takes a third of the time that their rows take one by one. What a
last page holds behind its context is not read, or cleared and masked: it may be anything, NaN too.

Decodes are padded to the longest context of their group; the padding repeats the request's own
first page and is masked. A group is split in two where padding would dominate (one long context
among short ones), so at most two attention calls serve all decodes.

Layers with a sliding window have a view of their own, which gathers no more than their window, row
by row, since a window begins anywhere in a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from torch.nn import functional as F

from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.request import Request, Sampling
from stepscope.models.transfer import moved, to_device
from stepscope.records import RequestRecord
from stepscope.spec import ModelSpec

Product = Callable[..., torch.Tensor]
# Padded rows that must be saved before a second attention call pays for its dispatch.
SPLIT_GAIN_ROWS = 1024


@dataclass(slots=True)
class DecodeGroup:
    """Decodes `rows` (first, last + 1) with contexts padded to `length`, gathered as `stride`."""

    first: int
    last: int
    length: int
    stride: int
    mask: torch.Tensor | None  # (n, 1, 1, length) additive; None when nothing is padded


@dataclass(slots=True)
class PrefillChunk:
    first: int  # token rows
    last: int
    length: int
    stride: int
    mask: torch.Tensor | None  # (count, length) additive; None = plain causal, from position 0


@dataclass(slots=True)
class ContextView:
    """What one kind of layer reads. reads: decode groups, then chunks, in order."""

    reads: torch.Tensor  # pages, or slots
    rows_each: int  # the page size, or 1
    stale: torch.Tensor | None  # gathered rows that nobody wrote; None where none is attended to
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
        return partial(_capped_attention, scale=score_scale(spec), cap=spec.attn_softcap)
    if spec.query_scale is not None:
        return partial(F.scaled_dot_product_attention, scale=spec.query_scale)
    return None


def score_scale(spec: ModelSpec) -> float:
    """What q k^T is multiplied by."""
    return spec.head_dim**-0.5 if spec.query_scale is None else spec.query_scale


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
        rows = context[row : row + n * part.stride].view(n, part.stride, 2, kv, dim)
        rows = rows[:, : part.length]
        row += n * part.stride
        keys, values = rows.permute(2, 0, 3, 1, 4).unbind(0)  # (n, kv, length, dim)
        queries = q[part.first : part.last].view(n, kv, group, dim)
        out = product(queries, keys, values, attn_mask=part.mask)
        outputs.append(out.reshape(n, -1))
    for chunk in view.chunks:
        count = chunk.last - chunk.first
        rows = context[row : row + chunk.length].view(chunk.length, 2, kv, 1, dim)
        row += chunk.stride
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


def padded(decodes: list[Slice], pad_to: int | None, trash_page: int) -> list[Slice]:
    """pad_to decodes: those missing are of one token each, on the trash page."""
    if pad_to is None or pad_to == len(decodes):
        return decodes
    nobody = Request(RequestRecord(id=-1, arrival_ns=0, prompt_tokens=1), [0], Sampling())
    nobody.pages = array("q", [trash_page])
    return decodes + [Slice(nobody, 0, 1, "decode", samples=True)] * (pad_to - len(decodes))


def slots_of(piece: Slice, begin: int, end: int, page_size: int) -> np.ndarray:
    """Slots of positions begin..end-1 of the request."""
    pages = np.frombuffer(piece.request.pages, dtype=np.int64)
    pages = pages[begin // page_size : -(-end // page_size)]
    slots = (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)
    skip = begin % page_size
    return slots[skip : skip + end - begin]


def write_slots(decodes: list[Slice], prefills: list[Slice], page_size: int) -> np.ndarray:
    """Where K and V of the step's tokens go."""
    # A hundred decodes are a hundred numbers, for each of which numpy's calls would take longer.
    ones = [
        s.request.pages[s.start // page_size] * page_size + s.start % page_size for s in decodes
    ]
    rest = [slots_of(s, s.start, s.context, page_size) for s in prefills]
    return np.concatenate([np.array(ones, dtype=np.int64), *rest])


def sampled_rows(plan: StepPlan) -> np.ndarray | None:
    """Token rows whose logits are wanted; None = every row."""
    if not plan.prefills:
        return None
    rows = list(range(len(plan.decodes)))
    row = len(plan.decodes)
    for piece in plan.prefills:
        row += piece.count
        if piece.samples:
            rows.append(row - 1)
    return np.array(rows, dtype=np.int64)


@dataclass(slots=True)
class _Gathered:
    """What a view reads, as it is collected."""

    rows_each: int
    reads: list[np.ndarray] = field(default_factory=list)
    rows: int = 0
    stale: list[np.ndarray] = field(default_factory=list)

    def add(self, own: list[np.ndarray], lengths: list[int], longest: int) -> int:
        """Contexts of these lengths, each padded with its first read; the rows that each takes."""
        reads = np.empty((len(own), -(-longest // self.rows_each)), dtype=np.int64)
        stride = reads.shape[1] * self.rows_each
        for i, (read, length) in enumerate(zip(own, lengths, strict=True)):
            reads[i, : len(read)] = read
            reads[i, len(read) :] = read[0]
            written_first = length >= self.rows_each  # or every repetition has what nobody wrote
            end = min(len(read) * self.rows_each, longest) if written_first else longest
            self.stale.append(np.arange(length, end) + self.rows + i * stride)
        self.reads.append(reads.reshape(-1))
        self.rows += len(own) * stride
        return stride


class BatchBuilder:
    """Builds the index tensors of a plan whose decodes are ordered as `order_decodes` left them.

    window: of the model's local layers, None if it has none.
    """

    def __init__(
        self,
        page_size: int,
        trash_page: int,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.trash_page = trash_page
        self.dtype = dtype
        self.device = device
        self.window = window

    def build(self, plan: StepPlan, split: int, pad_to: int | None = None) -> AttentionBatch:
        """pad_to: one group of so many decodes, masked whether or not anything is padded."""
        decodes = padded(plan.decodes, pad_to, self.trash_page)
        cuts = [split] if split and pad_to is None else []
        groups = [decodes[a:b] for a, b in pairwise([0, *cuts, len(decodes)]) if b > a]
        full = self._view(plan, groups, pad_to is not None, None)
        local = full
        if self.window is not None:
            local = self._view(plan, groups, pad_to is not None, self.window)
        slots = to_device(write_slots(decodes, plan.prefills, self.page_size), self.device)
        rows = sampled_rows(plan)
        sampled = None if rows is None else to_device(rows, self.device)
        return AttentionBatch(slots, sampled, full, local)

    def _view(
        self, plan: StepPlan, decodes: list[list[Slice]], masked: bool, window: int | None
    ) -> ContextView:
        gathered = _Gathered(self.page_size if window is None else 1)
        groups: list[DecodeGroup] = []
        row = 0
        for same in decodes:
            groups.append(self._group(same, row, gathered, masked, window))
            row += len(same)
        tokens = sum(s.context - _first_seen(s, window) for s in plan.slices)
        chunks: list[PrefillChunk] = []
        for piece in plan.prefills:
            first = _first_seen(piece, window)
            length = piece.context - first
            stride = gathered.add([self._read(piece, first, gathered)], [length], length)
            mask = self._chunk_mask(piece, first, window)
            chunks.append(PrefillChunk(row, row + piece.count, length, stride, mask))
            row += piece.count
        unwritten = np.concatenate(gathered.stale)
        stale = to_device(unwritten, self.device) if len(unwritten) else None
        reads = to_device(np.concatenate(gathered.reads), self.device)
        return ContextView(reads, gathered.rows_each, stale, tokens, groups, chunks)

    def _group(
        self,
        decodes: list[Slice],
        first: int,
        gathered: _Gathered,
        masked: bool,
        window: int | None,
    ) -> DecodeGroup:
        begins = [_first_seen(s, window) for s in decodes]
        lengths = [s.context - begin for s, begin in zip(decodes, begins, strict=True)]
        longest = lengths[0]
        own = [self._read(s, begin, gathered) for s, begin in zip(decodes, begins, strict=True)]
        stride = gathered.add(own, lengths, longest)
        mask = self._pad_mask(lengths) if masked or lengths[-1] < longest else None
        return DecodeGroup(first, first + len(decodes), longest, stride, mask)

    def _read(self, piece: Slice, begin: int, gathered: _Gathered) -> np.ndarray:
        """Pages of the request, or its slots from position `begin` on."""
        if gathered.rows_each == 1:
            return slots_of(piece, begin, piece.context, self.page_size)
        pages = np.frombuffer(piece.request.pages, dtype=np.int64)
        return pages[: -(-piece.context // self.page_size)]

    def _pad_mask(self, lengths: list[int]) -> torch.Tensor:
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
        return moved(mask, self.device)
