"""Rows to fp8 in one kernel; torch's own operations for it are five. Importing this imports triton.

An activation is turned into codes before each of a layer's four products, so in a decode step these
launches are more than all others together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from stepscope.models.quantize import FP8_LARGEST, FP8_SMALLEST_SCALE


@triton.jit  # type: ignore[untyped-decorator]
def _quantize(  # type: ignore[no-untyped-def]
    rows,
    codes,
    scales,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHRINK: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    """Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    values = tl.load(rows + row * COLUMNS + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(values), 0) * SHRINK, SMALLEST)
    tl.store(scales + row, scale)
    quotients = tl.div_rn(values, tl.zeros_like(values) + scale)
    tl.store(codes + row * COLUMNS + column, quotients.to(tl.float8e4nv), mask=inside)


def rows_to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `quantize.rows_to_fp8`: float8_e4m3fn (n, in) and the float32 scales (n, 1)."""
    count, columns = rows.shape
    codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
    scales = torch.empty(count, 1, device=rows.device)
    if count:
        block = triton.next_power_of_2(columns)
        _quantize[(count,)](
            rows.contiguous(),
            codes,
            scales,
            COLUMNS=columns,
            BLOCK=block,
            SHRINK=1 / FP8_LARGEST,
            SMALLEST=FP8_SMALLEST_SCALE,
            num_warps=4 if block <= 4096 else 8,
        )
    return codes, scales
