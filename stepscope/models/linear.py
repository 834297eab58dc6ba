"""Matrix products y = x W^T, by whichever of torch's kernels is faster on this CPU.

`plain` is F.linear (MKL or the platform's BLAS). `onednn` goes to oneDNN directly, with weights
reordered once into its blocked layout, which streams them far better at a few rows; on other CPUs
it is the other way round, so `choose_products` measures rather than assumes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

PRODUCTS = ("plain", "onednn")
# Rows for which oneDNN lays the weights out: good from 1 to 32 in every case that was measured.
LAYOUT_ROWS = 16
TRIED_ROWS = (1, 4, 16)
TRIED_BYTES = 96 << 20  # more than a last-level cache holds, so that the weights are streamed
ROUNDS = 4


class Linear:
    """One weight (out, in) and how it is multiplied. Holds it once, in the layout it needs."""

    __slots__ = ("_onednn", "_weight")

    def __init__(self, weight: torch.Tensor, products: str, reorder: bool = True) -> None:
        """reorder=False keeps the plain layout, for a weight that is read in other ways too."""
        self._onednn = products == "onednn"
        self._weight = _reordered(weight) if self._onednn and reorder else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, in) -> (T, out)."""
        if self._onednn:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, None, "none", [], ""
            )
            return y
        return F.linear(x, self._weight)


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, LAYOUT_ROWS)
    return packed


@torch.inference_mode()
def choose_products(weights: Sequence[torch.Tensor]) -> str:
    """The product with the least time summed over TRIED_ROWS, each relative to the better one.

    Tries a sample of the given weights (out, in) large enough to be streamed from memory.
    """
    if weights[0].device.type != "cpu" or not torch._C._has_mkldnn:
        return "plain"
    sample = _sample(weights)
    layers = {p: [Linear(w, p) for w in sample] for p in PRODUCTS}
    scores = dict.fromkeys(PRODUCTS, 0.0)
    for rows in TRIED_ROWS:
        inputs = [torch.ones(rows, w.shape[1], dtype=w.dtype) for w in sample]
        times = _best_times({p: _pass(layers[p], inputs) for p in PRODUCTS})
        for product in PRODUCTS:
            scores[product] += times[product] / min(times.values())
    return min(PRODUCTS, key=lambda p: scores[p])


def _sample(weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    taken: list[torch.Tensor] = []
    size = 0
    for weight in weights:
        if size >= TRIED_BYTES:
            break
        taken.append(weight)
        size += weight.numel() * weight.element_size()
    return taken


def _pass(layers: list[Linear], inputs: list[torch.Tensor]) -> Callable[[], None]:
    def run() -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return run


def _best_times(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds; in turns, and the best of each, since a disturbance only ever adds."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best
