"""Products with quantized weights, which are held once, as codes.

For few rows torch multiplies straight from the codes; for many that is slower than turning them
into bf16 and multiplying, matrix by matrix, in memory that is given back at once and mostly stays
in a cache. From how many rows is measured (models/linear.py), since it depends on the CPU.

fp8 is for CUDA devices (torch._scaled_mm with a scale per row on both sides); int8 and int4 are for
CPUs, since torch's products for CUDA take other layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Protocol, Self

import torch
from torch.nn import functional as F

from stepscope.errors import UsageError
from stepscope.models.quantize import (
    MIDDLE,
    Codes4,
    Codes8,
    Codes8Float,
    group_of,
    quantize4,
    quantize8,
    quantize_fp8,
    rows_to_fp8,
)
from stepscope.spec import FP8, QUANTIZED

FP8_CAPABILITY = (8, 9)  # the first that multiplies fp8: Ada, then Hopper
INT8_INPUTS = 16  # torch's int8 product reads past the end of rows that are no multiple of this
UNPACKED_ELEMENTS = 1 << 21  # bf16 values made at a time: 4 MiB
# Rows per block of the packed int4 layout, and whether a byte's two rows are half a block apart or
# neighbours: what torch's CPU builds use (AVX-512; AVX2; others).
LAYOUTS = ((64, True), (32, True), (64, False), (32, False), (16, False))


class QuantizedWeight(Protocol):
    """What a decoder asks of a weight that is no tensor. Activations are bf16."""

    form: str
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """Codes, scales and zeros: what a product reads."""

    def dim(self) -> int: ...

    def multiply(self, x: torch.Tensor, packed_rows: int) -> torch.Tensor:
        """(T, in) -> (T, out), from the codes directly up to so many rows."""

    def to(self, device: torch.device | str) -> QuantizedWeight: ...


def check_device(dtype: str, device: torch.device) -> None:
    """UsageError if weights in this dtype cannot be multiplied on this device."""
    if dtype != FP8:
        if dtype in QUANTIZED and device.type != "cpu":
            raise UsageError(
                f"{dtype} weights are for the CPU only; choose bf16 on {device.type}, or fp8 on a"
                " GPU that multiplies it (compute capability 8.9 or higher)."
            )
        return
    if device.type != "cuda":
        raise UsageError(
            f"fp8 weights are for CUDA GPUs and not for {device.type}; choose int8 or int4 here."
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < FP8_CAPABILITY:
        raise UsageError(
            f"fp8 products need a GPU of compute capability 8.9 or higher and this one has"
            f" {capability[0]}.{capability[1]}; choose bf16."
        )


class _OnCpu:
    """What int8 and int4 share."""

    form: str
    shape: torch.Size
    dtype = torch.bfloat16
    device = torch.device("cpu")

    def dim(self) -> int:
        return len(self.shape)

    def to(self, device: torch.device | str) -> Self:
        """Raises UsageError for anything but the CPU."""
        check_device(self.form, torch.device(device))
        return self


class Int8Weight(_OnCpu):
    """[out, in]; rows can be looked up, so a tied embedding is held once as well."""

    form = "int8"
    __slots__ = ("codes", "packable", "scales", "shape")

    def __init__(self, stored: Codes8) -> None:
        self.codes, self.scales = stored.codes, stored.scales
        self.shape = stored.codes.shape
        self.packable = self.shape[1] % INT8_INPUTS == 0

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    def index_select(self, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows in bf16 (n, in); dim is 0, as there is no other lookup."""
        codes = self.codes.index_select(dim, rows).to(self.dtype)
        return codes.mul_(self.scales.index_select(dim, rows)[:, None])

    def multiply(self, x: torch.Tensor, packed_rows: int) -> torch.Tensor:
        if x.shape[0] <= packed_rows and self.packable:
            packed: torch.Tensor = torch.ops.aten._weight_int8pack_mm(
                x.contiguous(), self.codes, self.scales
            )
            return packed
        # int8 codes are exact in bf16, so only the scaled result is rounded.
        step = max(1, UNPACKED_ELEMENTS // self.shape[1])
        pieces = [F.linear(x, codes.to(self.dtype)) for codes in torch.split(self.codes, step)]
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).mul_(self.scales)


class Int4Weight(_OnCpu):
    """[out, in], two codes a byte, in the order torch's product wants them."""

    __slots__ = ("form", "group", "packed", "scales_and_zeros", "shape")

    def __init__(self, stored: Codes4, form: str = "int4") -> None:
        self.form = form
        self.shape = stored.codes.shape
        self.group = stored.group
        self.packed = _pack(stored.codes)
        pairs = torch.stack((stored.scales, stored.zeros), -1)
        self.scales_and_zeros = pairs.transpose(0, 1).contiguous()  # (in / group, out, 2)

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes + self.scales_and_zeros.nbytes

    def multiply(self, x: torch.Tensor, packed_rows: int) -> torch.Tensor:
        if x.shape[0] <= packed_rows or not self.unpackable:
            packed: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(
                x.contiguous(), self.packed, self.group, self.scales_and_zeros
            )
            return packed
        return x @ self._values()

    @property
    def unpackable(self) -> bool:
        block, _ = _layout()
        return block > 0 and self.shape[0] % block == 0

    def _values(self) -> torch.Tensor:
        """bf16 [in, out]."""
        out, columns = self.shape
        scales, zeros = self.scales_and_zeros.unbind(-1)
        codes = torch.empty(columns, out, dtype=self.dtype)
        blocks = _unpack(self.packed, *_layout()).transpose(0, 1)
        codes.view(blocks.shape).copy_(blocks)
        grouped = codes.view(-1, self.group, out)
        torch.addcmul(
            zeros.contiguous().unsqueeze(1), grouped, scales.contiguous().unsqueeze(1), out=grouped
        )
        return codes


class Fp8Weight:
    """[out, in] in e4m3; an activation's rows get scales of their own at each product."""

    form = FP8
    dtype = torch.bfloat16
    __slots__ = ("codes", "scales", "shape")

    def __init__(self, stored: Codes8Float) -> None:
        self.codes, self.scales = stored.codes, stored.scales
        self.shape = stored.codes.shape

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def dim(self) -> int:
        return len(self.shape)

    def to(self, device: torch.device | str) -> Fp8Weight:
        return Fp8Weight(Codes8Float(self.codes.to(device), self.scales.to(device)))

    def multiply(self, x: torch.Tensor, packed_rows: int) -> torch.Tensor:
        """By the same product for any number of rows."""
        to_fp8 = rows_to_fp8 if torch.compiler.is_compiling() else _row_codes(x.device.type)
        codes, scales = to_fp8(x.contiguous())
        return torch._scaled_mm(
            codes, self.codes.t(), scale_a=scales, scale_b=self.scales[None], out_dtype=self.dtype
        )


@cache
def _row_codes(device: str) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """`rows_to_fp8`, in one kernel where there is one."""
    if device != "cuda" or find_spec("triton") is None:
        return rows_to_fp8
    from stepscope.models import fp8_kernel  # imports triton

    return fp8_kernel.rows_to_fp8


def quantized(weight: torch.Tensor, form: str) -> Int8Weight | Int4Weight | Fp8Weight:
    """A float matrix in one of the quantized forms."""
    if form == FP8:
        return Fp8Weight(quantize_fp8(weight))
    if form == "int8":
        return Int8Weight(quantize8(weight))
    return Int4Weight(quantize4(weight, group_of(weight.shape[1], form)), form)


def is_quantized(weight: object) -> bool:
    return isinstance(weight, Int8Weight | Int4Weight | Fp8Weight)


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [out, in / 2] of codes [out, in]; in blocks of rows, as torch wants int32 codes."""
    block = math.lcm(*(rows for rows, _ in LAYOUTS))
    step = max(1, UNPACKED_ELEMENTS // codes.shape[1] // block) * block
    pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu
    return torch.cat([pack(rows.int(), 1) for rows in torch.split(codes, step)])


def _unpack(packed: torch.Tensor, block: int, halves: bool) -> torch.Tensor:
    """int8 codes - 8 as [out / block, in, block]."""
    columns = packed.shape[1] * 2
    pairs = packed.view(-1, columns, block // 2)
    codes = torch.stack((pairs & 15, pairs >> 4), 2 if halves else 3)
    return codes.view(torch.int8).view(-1, columns, block).sub_(MIDDLE)


@cache
def _layout() -> tuple[int, bool]:
    """The layout that gives back what was packed, found by trying; (0, False) if none does."""
    codes = torch.randint(0, 16, (128, 32), generator=torch.Generator().manual_seed(0))
    packed = _pack(codes.to(torch.uint8))
    for block, halves in LAYOUTS:
        found = _unpack(packed, block, halves).transpose(1, 2).reshape(codes.shape)
        if torch.equal(found.int() + MIDDLE, codes.int()):
            return block, halves
    return 0, False
