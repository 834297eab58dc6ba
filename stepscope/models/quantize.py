"""Weight-only formats: which matrix is held how, and the arithmetic from floats to codes.

int8: a row's largest magnitude over 127 is its scale, w ~ code x scale, code in -127..127.
int4: groups of 32 (or more) inputs of a row, w ~ (code - 8) x scale + zero, code in 0..15, the
range from the least to the largest of the group in 15 steps (as GGUF's Q4_1).

fp8: e4m3 (Micikevicius et al., 2022), w ~ code x scale, the row's largest magnitude at 448, which
is the format's. Activations are turned into it row by row as well, at each product.

The scales and zeros of int8 and int4 are bf16, since torch's products take no others. Codes are
chosen after the scale was rounded, so that its rounding costs nothing; the zero's shows where a
group lies far from 0. Codes carried over from a file keep the file's scale, rounded: values move by
at most 8 x 2^-8 = 1/32 of a step, and by 2^-8 of the group's zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from stepscope.spec import ELEMENT_BYTES, FP8, INT4_GROUPS, QUANTIZED, compute_dtype

Shape = tuple[int, ...]
MIDDLE = 8  # the int4 code that means `zero`
SMALLEST_GROUP = INT4_GROUPS["int4"]
INT4_ROWS = 16  # the packed layout works in blocks of so many rows
CHUNK_ELEMENTS = 1 << 20  # quantized at a time: bounds what is held beside the codes
LOOKED_UP = ("embed", "head")
FP8_LARGEST = 448.0
FP8_MULTIPLE = 16  # torch's fp8 product takes rows and inputs in 16s
FP8_SMALLEST_SCALE = 1e-30  # so that a row of zeros can be divided


@dataclass(frozen=True, slots=True)
class Codes8:
    """[out, in] int8 and a scale per row."""

    codes: torch.Tensor
    scales: torch.Tensor  # (out,) bf16

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.codes.float() * self.scales.float()[:, None]


@dataclass(frozen=True, slots=True)
class Codes4:
    """[out, in] uint8 codes 0..15, one a byte; a scale and a zero per row and group of inputs."""

    codes: torch.Tensor
    scales: torch.Tensor  # (out, in / group) bf16
    zeros: torch.Tensor  # (out, in / group) bf16: what code 8 stands for

    @property
    def group(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        scales = self.scales.float().repeat_interleave(self.group, 1)
        zeros = self.zeros.float().repeat_interleave(self.group, 1)
        return (self.codes.float() - MIDDLE) * scales + zeros


@dataclass(frozen=True, slots=True)
class Codes8Float:
    """[out, in] float8_e4m3fn and a scale per row."""

    codes: torch.Tensor
    scales: torch.Tensor  # (out,) float32

    def values(self) -> torch.Tensor:
        """float32 [out, in]."""
        return self.codes.float() * self.scales[:, None]


def weight_format(name: str, shape: Shape, dtype: str) -> str:
    """How the canonical tensor `name` of a model in `dtype` is held.

    Vectors and the router stay bf16. Embedding and head are int8 in int8 and int4 models, so that
    rows can be looked up. int4 needs rows in 16s and inputs in 32s; a matrix without is held int8.
    fp8 models keep embedding and head in bf16, and each matrix without rows and inputs in 16s.
    """
    if dtype not in QUANTIZED:
        return dtype
    if len(shape) == 1 or name.endswith(".router"):
        return compute_dtype(dtype)
    if dtype == FP8:
        return FP8 if name not in LOOKED_UP and fits_fp8(shape) else compute_dtype(dtype)
    if dtype == "int8" or name in LOOKED_UP or not fits_int4(shape):
        return "int8"
    return dtype


def fits_int4(shape: Shape) -> bool:
    return shape[0] % INT4_ROWS == 0 and shape[1] % SMALLEST_GROUP == 0


def fits_fp8(shape: Shape) -> bool:
    return shape[0] % FP8_MULTIPLE == 0 and shape[1] % FP8_MULTIPLE == 0


def group_of(columns: int, dtype: str) -> int:
    """The format's group, or the widest smaller one that divides the inputs."""
    fitting = [g for g in INT4_GROUPS.values() if columns % g == 0 and g <= INT4_GROUPS[dtype]]
    return max(fitting)


def stored_bytes(shape: Shape, form: str) -> int:
    """Bytes of codes, scales and zeros of a tensor held in this form."""
    elements = shape[0] * shape[1] if len(shape) == 2 else shape[0]
    if form == "int8":
        return elements + 2 * shape[0]
    if form == FP8:
        return elements + 4 * shape[0]
    if form in INT4_GROUPS:
        return elements // 2 + 4 * elements // group_of(shape[1], form)
    return elements * ELEMENT_BYTES[form]


def quantize8(weight: torch.Tensor) -> Codes8:
    """A float matrix [out, in], row by row, to the nearest code. A row of zeros has scale 0."""
    scales = torch.empty(weight.shape[0], dtype=torch.bfloat16)
    codes = torch.empty(weight.shape, dtype=torch.int8)

    def chunk(first: int, last: int) -> None:
        rows = weight[first:last].float()
        scales[first:last] = _not_below(rows.abs().amax(1) / 127)
        codes[first:last] = _nearest(rows, scales[first:last, None].float()).clamp_(-127, 127)

    _by_rows(weight, chunk)
    return Codes8(codes, scales)


def quantize4(weight: torch.Tensor, group: int) -> Codes4:
    """A float matrix [out, in], group by group of a row, to the nearest code."""
    out, columns = weight.shape
    scales = torch.empty(out, columns // group, dtype=torch.bfloat16)
    zeros = torch.empty_like(scales)
    codes = torch.empty(weight.shape, dtype=torch.uint8)

    def chunk(first: int, last: int) -> None:
        rows = weight[first:last].float().view(last - first, -1, group)
        least, largest = rows.aminmax(dim=2)
        scales[first:last] = scale = _not_below((largest - least) / 15)
        zeros[first:last] = least + MIDDLE * scale.float()
        above = rows - zeros[first:last, :, None].float()
        steps = _nearest(above, scale[:, :, None].float()).add_(MIDDLE)
        codes[first:last] = steps.clamp_(0, 15).view(last - first, -1)

    _by_rows(weight, chunk)
    return Codes4(codes, scales, zeros)


def quantize_fp8(weight: torch.Tensor) -> Codes8Float:
    """A float matrix [out, in] on any device, row by row, to the nearest e4m3 number."""
    codes = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, device=weight.device)

    def chunk(first: int, last: int) -> None:
        codes[first:last], scales[first:last] = rows_to_fp8(weight[first:last])

    _by_rows(weight, chunk)
    return Codes8Float(codes, scales[:, 0])


def rows_to_fp8(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn rows (n, in) and the float32 scales (n, 1) that they are to be multiplied by.

    Few operations, as it runs before each product. Nothing has to be clamped: no quotient is beyond
    448 by more than its own rounding, and up to 464 e4m3 rounds down to 448.
    """
    largest = torch.linalg.vector_norm(rows, torch.inf, 1, keepdim=True, dtype=torch.float32)
    scales = largest.mul_(1 / FP8_LARGEST).clamp_(min=FP8_SMALLEST_SCALE)
    return (rows / scales).to(torch.float8_e4m3fn), scales


def _by_rows(weight: torch.Tensor, chunk: Callable[[int, int], None]) -> None:
    step = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for first in range(0, weight.shape[0], step):
        chunk(first, min(first + step, weight.shape[0]))


def _not_below(scales: torch.Tensor) -> torch.Tensor:
    """The next bf16 that is not smaller, so that the extremes of a row still have a code."""
    rounded = scales.to(torch.bfloat16)
    short = rounded.float() < scales
    above = (rounded.view(torch.int16) + 1).view(torch.bfloat16)  # the next one of a positive
    return torch.where(short, above, rounded)


def _nearest(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, values / scale, 0.0).round_()
