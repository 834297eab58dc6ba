"""GGUF blocks of four-bit codes, taken over as they are instead of through floats."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from stepscope.models.quantize import MIDDLE, Codes4

# Kind -> float16 numbers before a block's 16 bytes of codes: the step, and in Q4_1 a least value.
FOUR_BIT = {"Q4_0": 1, "Q4_1": 2}
CODE_BYTES = 16


def four_bit(stored: npt.NDArray[Any], kind: str) -> Codes4:
    """Codes in groups of 32 of rows of Q4_0 or Q4_1 blocks [out, bytes].

    The low halves of a block's bytes are its values 0 to 15, the high halves 16 to 31; a value is
    step x code + least in Q4_1 and step x (code - 8) in Q4_0 (ggml-quants.c). Only the step and
    the value of code 8 are rounded, to bf16.
    """
    head = 2 * FOUR_BIT[kind]
    blocks = np.ascontiguousarray(stored).reshape(len(stored), -1, head + CODE_BYTES)
    halves = blocks[:, :, head:]
    codes = np.concatenate((halves & 15, halves >> 4), axis=2).reshape(len(stored), -1)
    numbers = np.ascontiguousarray(blocks[:, :, :head]).view(np.float16).astype(np.float32)
    step = torch.from_numpy(numbers[:, :, 0].copy())
    zero = torch.zeros_like(step)
    if kind == "Q4_1":
        zero = torch.from_numpy(numbers[:, :, 1].copy()) + MIDDLE * step
    return Codes4(torch.from_numpy(codes), step.to(torch.bfloat16), zero.to(torch.bfloat16))
