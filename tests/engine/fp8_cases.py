"""Rows to fp8 by the kernel against torch; run by test_paged.py in a process of its own.

On a CPU that process has Triton's interpreter switched on; on a CUDA device the kernel is compiled.
"""

from __future__ import annotations

import os

import pytest
import torch

from stepscope.models import fp8_kernel, quantize

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
SIZES = [1.0, 1e-3, 100.0, 0.0, 1e4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [16, 96, 4096, 14336])
def test_the_codes_are_those_of_torch(dtype: torch.dtype, columns: int) -> None:
    torch.manual_seed(columns)
    rows = torch.randn(len(SIZES), columns, device=DEVICE)
    rows = (rows * torch.tensor(SIZES, device=DEVICE)[:, None]).to(dtype)
    codes, scales = fp8_kernel.rows_to_fp8(rows)
    expected, wanted = quantize.rows_to_fp8(rows)
    assert scales.shape == wanted.shape and torch.equal(scales, wanted)
    assert codes.dtype == expected.dtype and codes.is_contiguous()
    ours, theirs = codes.float(), expected.float()
    if INTERPRETED:  # its conversion rounds ties up, and loses a carry into the exponent
        lost = (ours == theirs / 2) & (theirs.abs().log2() % 1 == 0)
        neighbours = (ours - theirs).abs() <= (theirs.abs() / 8).clamp_min(2**-9)
        assert (ours != theirs).float().mean() < 0.05
        ours = torch.where(lost | neighbours, theirs, ours)
    assert torch.equal(ours, theirs)


def test_rows_of_a_wider_tensor_and_no_rows() -> None:
    wide = torch.randn(3, 64, device=DEVICE)
    part = wide[:, 16:48]
    assert torch.equal(fp8_kernel.rows_to_fp8(part)[1], quantize.rows_to_fp8(part)[1])
    codes, scales = fp8_kernel.rows_to_fp8(wide[:0])
    assert codes.shape == (0, 64) and scales.shape == (0, 1)
