"""What follows attention in a layer: one gated MLP (Shazeer, 2020), or several with a router.

The router (Shazeer et al., 2017; Mixtral: Jiang et al., 2024) sends each token to its k best of E
experts. Only the experts that some token of the step chose are read, so their number is what a
step's weight bytes depend on; `Reads` counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from stepscope.models.linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]
ACTIVATIONS: dict[str, Activation] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


@dataclass(slots=True)
class Reads:
    """(layer, expert) pairs whose weights the last forward read; None where nothing is routed."""

    count: int | None = None


@dataclass(slots=True)
class GatedMlp:
    """down(activate(gate) x up), for rows (T, hidden)."""

    gate_up: Linear | Any
    down: Linear | Any
    activate: Activation

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(self.activate(gate).mul_(up))


@dataclass(slots=True)
class RoutedExperts:
    """The sum of each token's chosen experts, weighted by the router's softmax over all of them.

    Experts are visited in the order of their numbers, so a token's sum does not depend on what
    else is in the step. Which experts are hit is read on the host: on a GPU that is one
    synchronisation per layer.
    """

    router: Linear | Any
    experts: list[GatedMlp]
    per_token: int
    renormalize: bool
    reads: Reads

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(T, hidden) -> (T, hidden)."""
        shares = torch.softmax(self.router(x), -1, dtype=torch.float32)
        best, chosen = shares.topk(self.per_token, -1)
        if self.renormalize:
            best = best / best.sum(-1, keepdim=True)
        weights = best.to(x.dtype).view(-1, 1)
        pairs = chosen.view(-1)
        order = pairs.argsort(stable=True)  # (token, choice) pairs, expert by expert
        counts = torch.bincount(pairs, minlength=len(self.experts)).tolist()
        rows, weights = order // self.per_token, weights.index_select(0, order)
        out = torch.zeros_like(x)
        first = 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count:
                own = rows[first : first + count]
                y = expert(x.index_select(0, own)).mul_(weights[first : first + count])
                out.index_add_(0, own, y)
                first += count
        self.reads.count = (self.reads.count or 0) + sum(c > 0 for c in counts)
        return out
