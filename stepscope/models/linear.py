"""Matrix products y = x W^T, by whichever of torch's kernels is faster on this CPU.

`plain` is F.linear (MKL or the platform's BLAS). `onednn` goes to oneDNN directly, with weights
reordered once into its blocked layout, which streams them far better at a few rows; on other CPUs
it is the other way round, so `choose_products` measures rather than assumes.

Quantized weights (models/packed.py) are multiplied from their codes up to some number of rows and
turned into bf16 above; `packed int8=4 int4=64` says up to how many for each format. With `plain`
they are always turned into bf16. Those in fp8 have one product, whatever is said here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from stepscope.errors import UsageError
from stepscope.models.packed import QuantizedWeight, is_quantized
from stepscope.spec import FP8

PRODUCTS = ("plain", "onednn")
# Rows for which oneDNN lays the weights out: good from 1 to 32 in every case that was measured.
LAYOUT_ROWS = 16
TRIED_ROWS = (1, 4, 16)
TRIED_BYTES = 96 << 20  # more than a last-level cache holds, so that the weights are streamed
ROUNDS = 4
PACKED = "packed"
PACKED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
PACKED_ROUNDS = 3
PACKED_BYTES = 4 << 20  # of codes: their products are bound by arithmetic, not by memory


class Linear:
    """One weight (out, in) and how it is multiplied. Holds it once, in the layout it needs."""

    __slots__ = ("_onednn", "_packed_rows", "_quantized", "_weight")

    def __init__(
        self, weight: torch.Tensor | QuantizedWeight, products: str, reorder: bool = True
    ) -> None:
        """reorder=False keeps the plain layout, for a weight that is read in other ways too.

        Raises UsageError for a quantized weight and oneDNN, which reorders only floats, and for
        fp16 where oneDNN has no product for it.
        """
        self._quantized: QuantizedWeight | None = None
        if not isinstance(weight, torch.Tensor):
            self._quantized, self._packed_rows = weight, packed_rows(products, weight.form)
            return
        if products == "onednn" and weight.dtype == torch.float16:
            _require_half_products()
        self._onednn = products == "onednn"
        self._weight = _reordered(weight) if self._onednn and reorder else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, in) -> (T, out)."""
        if self._quantized is not None:
            return self._quantized.multiply(x, self._packed_rows)
        if self._onednn:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, None, "none", [], ""
            )
            return y
        return F.linear(x, self._weight)

    def plain(self) -> torch.Tensor:
        """The weight (out, in) in the plain layout: itself, or a copy. UsageError if quantized."""
        if self._quantized is not None:
            raise UsageError(f"{self._quantized.form} weights have no plain layout.")
        return self._weight.to_dense() if self._weight.is_mkldnn else self._weight


def _require_half_products() -> None:
    if not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        raise UsageError(
            "products = onednn multiplies fp16 on CPUs with instructions for it, which this one"
            " lacks; choose auto or plain."
        )


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
    return packed


def packed_rows(products: str, form: str) -> int:
    """Up to how many rows a weight of this form is multiplied from its codes; 0 = never."""
    if products == "onednn":
        raise UsageError(
            f"products = onednn reorders float weights and these are {form}; choose auto or plain."
        )
    limits = dict(word.split("=") for word in products.split()[1:])
    return int(limits.get(form, 0))


@torch.inference_mode()
def choose_products(weights: Sequence[Any]) -> str:
    """The product with the least time summed over TRIED_ROWS, each relative to the better one.

    Tries a sample of the given weights (out, in) large enough to be streamed from memory. Of
    quantized ones, for each format: up to how many rows the product from codes is the faster one.
    """
    packed = [w for w in weights if is_quantized(w)]
    if any(w.form == FP8 for w in packed):
        return "plain"  # there is one product only
    if packed:
        forms = sorted({w.form for w in packed})
        limits = {f: _packed_limit([w for w in packed if w.form == f]) for f in forms}
        return " ".join([PACKED, *(f"{form}={rows}" for form, rows in limits.items())])
    if weights[0].device.type != "cpu" or not torch._C._has_mkldnn:
        return "plain"
    if weights[0].dtype == torch.float16:
        return "plain"  # most CPUs have no other, and none has a fast one
    sample = _sample(weights)
    layers = {p: [Linear(w, p) for w in sample] for p in PRODUCTS}
    scores = dict.fromkeys(PRODUCTS, 0.0)
    for rows in TRIED_ROWS:
        inputs = [torch.ones(rows, w.shape[1], dtype=w.dtype) for w in sample]
        times = _best_times({p: _pass(layers[p], inputs) for p in PRODUCTS})
        for product in PRODUCTS:
            scores[product] += times[product] / min(times.values())
    return min(PRODUCTS, key=lambda p: scores[p])


def _packed_limit(weights: Sequence[QuantizedWeight]) -> int:
    """The last of PACKED_ROWS before the product from codes loses for the first time."""
    sample = _sample(sorted(weights, key=lambda w: w.nbytes), PACKED_BYTES)
    limit = 0
    for rows in PACKED_ROWS:
        inputs = [torch.ones(rows, w.shape[1], dtype=w.dtype) for w in sample]
        times = _best_times(
            {str(r): _quantized_pass(sample, inputs, r) for r in (rows, 0)}, PACKED_ROUNDS
        )
        if times[str(rows)] > times["0"]:
            break
        limit = rows
    return limit


def _quantized_pass(
    weights: Sequence[QuantizedWeight], inputs: list[torch.Tensor], rows: int
) -> Callable[[], None]:
    def run() -> None:
        for weight, x in zip(weights, inputs, strict=True):
            weight.multiply(x, rows)

    return run


def _sample(weights: Sequence[Any], most: int = TRIED_BYTES) -> list[Any]:
    taken: list[Any] = []
    size = 0
    for weight in weights:
        if size >= most:
            break
        taken.append(weight)
        size += weight.nbytes
    return taken


def _pass(layers: list[Linear], inputs: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return run


def _best_times(calls: dict[str, Callable[[], None]], rounds: int = ROUNDS) -> dict[str, float]:
    """Seconds; in turns, and the best of each, since a disturbance only ever adds."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best
