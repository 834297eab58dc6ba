"""Paged attention in Triton, and the operator that torch sees. Importing this imports triton.

A program takes a block of query rows of one kv head, a row being one query token of one of the
heads that share it, and walks over the context in blocks of tokens, each found through the page
table. Softmax is taken online (Milakov & Gimelshein, 2018; FlashAttention, Dao et al., 2022). The
contexts of decodes are split over several programs whose partial results a second kernel puts
together (flash-decoding, Dao et al., 2023).
"""

from __future__ import annotations

import os
from typing import Any

import torch
import triton
import triton.language as tl

from stepscope.models.paged import MOST_SPLITS

LEAST_ROWS = 16  # of a matrix that tl.dot takes
MOST_ROWS = 64
BLOCK_BYTES = 16 << 10  # of K, and of V: with two in flight of each, a small GPU has room
STATIC = ["first", "splits", "table_stride", "window"]  # one kernel whatever their values are


@triton.jit(do_not_specialize=STATIC)  # type: ignore[untyped-decorator]
def _attend(  # type: ignore[no-untyped-def]
    qkv,
    cache,
    scales,
    page_table,
    context_lens,
    query_starts,
    out,
    maxima,
    sums,
    first,
    splits,
    table_stride,
    window,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    WIDTH: tl.constexpr,
    COMPUTE: tl.constexpr,
    CODES: tl.constexpr,
    CAPPED: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Grid: (sequences from `first`, blocks of rows, kv heads x splits).

    SPLIT: `out` is (sequences, heads, splits, HEAD) of sums that are not yet divided, beside their
    `maxima` and `sums`; otherwise (T, heads, HEAD).
    """
    number = tl.program_id(0)
    sequence = number + first
    kv = tl.program_id(2) // splits
    part = tl.program_id(2) % splits
    begin = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - begin
    length = tl.load(context_lens + sequence)
    row0 = tl.program_id(1) * ROWS
    if row0 >= count * GROUP:
        return

    row = row0 + tl.arange(0, ROWS)
    token = row // GROUP
    head = kv * GROUP + row % GROUP
    valid = row < count * GROUP
    position = length - count + token
    dim = tl.arange(0, WIDTH)
    inside = dim < HEAD
    stride = (GROUP + 2) * KV_HEADS * HEAD
    q_at = (begin + token).to(tl.int64) * stride + head * HEAD
    q_mask = valid[:, None] & inside[None, :]
    q = tl.load(qkv + q_at[:, None] + dim[None, :], mask=q_mask, other=0.0).to(COMPUTE)

    # What the first row of the block sees first and the last one last; then this split's part.
    last_token = tl.minimum(count - 1, (row0 + ROWS - 1) // GROUP)
    end = length - count + last_token + 1
    seen = tl.maximum(0, length - count + row0 // GROUP - window + 1)
    share = tl.cdiv(tl.cdiv(end - seen, splits), TOKENS) * TOKENS
    from_ = seen + part * share
    to = tl.minimum(end, from_ + share)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(from_, to, TOKENS):
        key = at + tl.arange(0, TOKENS)
        here = key < to
        page = tl.load(page_table + sequence * table_stride + key // PAGE, mask=here, other=0)
        slot = page.to(tl.int64) * PAGE + key % PAGE
        # Rows beyond the part are not read: what a freed page holds, be it NaN, goes nowhere.
        kv_mask = here[:, None] & inside[None, :]
        k_at = slot * (2 * KV_HEADS * HEAD) + kv * HEAD
        v_at = k_at + KV_HEADS * HEAD
        k = tl.load(cache + k_at[:, None] + dim[None, :], mask=kv_mask, other=0)
        v = tl.load(cache + v_at[:, None] + dim[None, :], mask=kv_mask, other=0)
        if CODES:
            s_at = slot * (2 * KV_HEADS) + kv
            k = k.to(tl.float32) * tl.load(scales + s_at, mask=here, other=0.0)[:, None]
            v = v.to(tl.float32) * tl.load(scales + s_at + KV_HEADS, mask=here, other=0.0)[:, None]
        k = k.to(COMPUTE)
        v = v.to(COMPUTE)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if CAPPED:  # cap x tanh(scores / cap), by exp alone
            scores = cap * (1.0 - 2.0 / (1.0 + tl.exp(2.0 / cap * scores)))
        visible = (key[None, :] <= position[:, None]) & here[None, :]
        visible = visible & (key[None, :] > position[:, None] - window)
        scores = tl.where(visible, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet keeps weights of 0: -inf less -inf would be NaN.
        base = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp(scores - base[:, None])
        keep = tl.exp(best - base)
        total = total * keep + tl.sum(weights, 1)
        acc = acc * keep[:, None] + tl.dot(weights.to(COMPUTE), v, input_precision="ieee")
        best = new

    if SPLIT:
        place = ((number * KV_HEADS * GROUP + head) * splits + part).to(tl.int64)
        tl.store(maxima + place, best, mask=valid)
        tl.store(sums + place, total, mask=valid)
        tl.store(out + (place * HEAD)[:, None] + dim[None, :], acc, mask=q_mask)
    else:
        o_at = (begin + token).to(tl.int64) * (GROUP * KV_HEADS * HEAD) + head * HEAD
        acc = acc / tl.where(valid, total, 1.0)[:, None]
        tl.store(out + o_at[:, None] + dim[None, :], acc.to(out.dtype.element_ty), mask=q_mask)


@triton.jit(do_not_specialize=["splits"])  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    parts,
    maxima,
    sums,
    out,
    splits,
    HEAD: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Grid: (sequences x heads,). parts (.., splits, HEAD), maxima and sums (.., splits)."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, SPLITS)
    there = part < splits
    dim = tl.arange(0, WIDTH)
    inside = dim < HEAD
    best = tl.load(maxima + row * splits + part, mask=there, other=float("-inf"))
    # At least the new token itself was seen, so the largest is finite; empty parts weigh 0.
    weight = tl.exp(best - tl.max(best, 0))
    total = tl.sum(weight * tl.load(sums + row * splits + part, mask=there, other=0.0), 0)
    at = ((row * splits + part) * HEAD)[:, None] + dim[None, :]
    acc = tl.load(parts + at, mask=there[:, None] & inside[None, :], other=0.0)
    acc = tl.sum(acc * weight[:, None], 0) / total
    tl.store(out + row * HEAD + dim, acc.to(out.dtype.element_ty), mask=inside)


def attend(
    qkv: torch.Tensor,
    cache: torch.Tensor,
    scales: torch.Tensor | None,
    page_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    shape: list[int],
    step: list[int],
    window: int,
    scale: float,
    cap: float,
) -> torch.Tensor:
    """(T, heads x head_dim) for the rows of qkv, whose K and V the cache already holds.

    cache: (slots, 2 x kv_heads x head_dim), any dtype; int8 codes come with scales (slots,
    2 x kv_heads). shape: heads, kv_heads, head_dim, page_size. step: see PagedBatch's decodes,
    longest and splits. window: tokens a query sees, itself included. cap: of the scores; 0 = none.
    """
    qkv = qkv.contiguous()
    heads, kv_heads, head_dim, page_size = shape
    decodes, longest, splits = step
    group = heads // kv_heads
    out = qkv.new_empty(qkv.shape[0], heads * head_dim)
    width = max(LEAST_ROWS, triton.next_power_of_2(head_dim))
    codes = scales is not None
    tensors = (qkv, cache, scales if codes else cache, page_table, context_lens, query_starts)
    options: dict[str, Any] = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD": head_dim,
        "PAGE": page_size,
        "TOKENS": min(64, max(LEAST_ROWS, BLOCK_BYTES // (width * qkv.element_size()))),
        "WIDTH": width,
        "COMPUTE": _compute_type(qkv.dtype),
        "CODES": codes,
        "CAPPED": cap > 0,
        "num_stages": 2,
    }
    if decodes:
        rows = min(MOST_ROWS, max(LEAST_ROWS, triton.next_power_of_2(group)))
        parts = qkv.new_empty(decodes, heads, splits, head_dim, dtype=torch.float32)
        maxima, sums = parts.new_empty(parts.shape[:3]), parts.new_empty(parts.shape[:3])
        grid = (decodes, triton.cdiv(group, rows), kv_heads * splits)
        fixed = (0, splits, page_table.stride(0), window, scale, cap)
        _attend[grid](
            *tensors, parts, maxima, sums, *fixed, ROWS=rows, SPLIT=True, num_warps=4, **options
        )
        _combine[(decodes * heads,)](
            parts, maxima, sums, out, splits, HEAD=head_dim, WIDTH=width, SPLITS=MOST_SPLITS
        )
    if longest:
        rows = MOST_ROWS if qkv.element_size() == 2 else MOST_ROWS // 2
        others = context_lens.shape[0] - decodes
        grid = (others, triton.cdiv(longest * group, rows), kv_heads)
        fixed = (decodes, 1, page_table.stride(0), window, scale, cap)
        warps = 4 if width <= 64 else 8
        _attend[grid](
            *tensors, out, out, out, *fixed, ROWS=rows, SPLIT=False, num_warps=warps, **options
        )
    return out


SCHEMA = (
    "(Tensor qkv, Tensor cache, Tensor? scales, Tensor page_table, Tensor context_lens, "
    "Tensor query_starts, int[] shape, int[] step, int window, float scale, float cap) -> Tensor"
)
# What torch.compile and fake tensors see. Eager steps go around it, as it costs the host time.
paged_attention = torch.library.custom_op(
    "stepscope::paged_attention", attend, mutates_args=(), schema=SCHEMA
)


@paged_attention.register_fake
def _(
    qkv: torch.Tensor, cache: Any, scales: Any, page_table: Any, lens: Any, starts: Any,
    shape: list[int], step: Any, window: Any, scale: Any, cap: Any,
) -> torch.Tensor:  # fmt: skip
    return qkv.new_empty(qkv.shape[0], shape[0] * shape[2])


def _compute_type(dtype: torch.dtype) -> Any:
    """What products are taken in; the interpreter has no bf16 of its own."""
    if dtype == torch.float32 or os.environ.get("TRITON_INTERPRET") == "1":
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
