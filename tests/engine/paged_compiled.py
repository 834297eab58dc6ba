"""The paged kernels compiled for real GPUs, of which none is needed; run by test_paged.py.

What the interpreter accepts a GPU may not. The launches are recorded from the operator itself, so
that what is compiled is what it would start.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from stepscope.models import fp8_kernel, paged_kernel
from stepscope.models.paged import FURTHER

A100, H100 = 80, 90
SHARED = {A100: 163 << 10, H100: 227 << 10}  # bytes a block may have (CUDA C Programming Guide)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.int8: "*i8",
    torch.int32: "*i32",
    int: "i32",
    float: "fp32",
}


class Recorded:
    """In place of a kernel: keeps what it was started with."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.launches: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(isinstance(n, int) and n > 0 for n in grid)
        return lambda *args, **options: self.launches.append((args, options))

    def compile(self, arch: int) -> list[Any]:
        return [self._compile(arch, *launch) for launch in self.launches]

    def _compile(self, arch: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        names = self.kernel.arg_names
        given = {k: options.pop(k) for k in list(options) if k in names}
        assert [*names[: len(args)], *given] and len(args) + len(given) == len(names)
        kinds = [TYPES[a.dtype if isinstance(a, torch.Tensor) else type(a)] for a in args]
        signature = dict(zip(names, kinds, strict=False)) | dict.fromkeys(given, "constexpr")
        source = ASTSource(
            self.kernel,
            signature={name: signature[name] for name in names},
            constexprs={(names.index(k),): v for k, v in given.items()},
            attrs={  # as at a launch: torch's memory begins at multiples of 16
                (i,): [["tt.divisibility", 16]]
                for i, a in enumerate(args)
                if isinstance(a, torch.Tensor)
            },
        )
        return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


@pytest.mark.parametrize(
    "arch,dtype,stored,heads,kv_heads,head_dim,cap",
    [
        (H100, torch.bfloat16, torch.bfloat16, 9, 3, 64, 0.0),
        (H100, torch.bfloat16, torch.bfloat16, 32, 8, 128, 0.0),
        (A100, torch.float16, torch.int8, 32, 8, 128, 0.0),
        (A100, torch.float32, torch.float32, 8, 4, 256, 50.0),
    ],
)
def test_a_mixed_step_compiles(
    monkeypatch: pytest.MonkeyPatch,
    arch: int,
    dtype: torch.dtype,
    stored: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    cap: float,
) -> None:
    kernels = {name: Recorded(getattr(paged_kernel, name)) for name in ("_attend", "_combine")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(paged_kernel, name, kernel)
    out = paged_kernel.attend(
        torch.zeros(7, (heads + 2 * kv_heads) * head_dim, dtype=dtype),
        torch.zeros(64, 2 * kv_heads * head_dim, dtype=stored),
        torch.zeros(64, 2 * kv_heads) if stored == torch.int8 else None,
        torch.zeros(3, 16, dtype=torch.int32),
        torch.tensor([9, 3, 5], dtype=torch.int32),
        torch.tensor([0, 1, 2, 7], dtype=torch.int32),
        [heads, kv_heads, head_dim, 16],
        [2, 5, 4],
        FURTHER,
        head_dim**-0.5,
        cap,
    )
    assert out.shape == (7, heads * head_dim) and out.dtype == dtype
    assert [len(k.launches) for k in kernels.values()] == [2, 1], "decodes, their parts, the rest"
    for kernel in kernels.values():
        for compiled in kernel.compile(arch):
            assert len(compiled.asm["cubin"]) > 1000
            assert compiled.metadata.shared <= SHARED[arch]
            if "SPLIT" in kernel.kernel.arg_names:
                assert "cp.async" in compiled.asm["ptx"], "K and V come ahead of their use"


@pytest.mark.parametrize("columns", [16, 4096, 14336])
def test_rows_to_fp8_compile(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    kernel = Recorded(fp8_kernel._quantize)
    monkeypatch.setattr(fp8_kernel, "_quantize", kernel)
    fp8_kernel.rows_to_fp8(torch.zeros(3, columns, dtype=torch.bfloat16))
    assert len(kernel.launches) == 1
    for compiled in kernel.compile(H100):
        assert "cvt.rn.satfinite.e4m3x2" in compiled.asm["ptx"]
