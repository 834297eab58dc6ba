"""Decode steps compiled by torch.compile, for a GPU: fewer kernels, still one launch for each.

What is compiled is the same graph as on a CPU (`traced.py`), with attention left outside, so the
number of rows may vary and nothing is padded. Weights are not frozen into it: they are held once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from stepscope.engine.plan import Lap, StepPlan
from stepscope.errors import UsageError
from stepscope.models.backends import Attention
from stepscope.models.decoder import Decoder
from stepscope.runner.traced import Step, trace, under_way
from stepscope.spec import QUANTIZED

TRACED_ROWS = 4  # any number that is not 0 or 1, which torch takes for constants


class CompiledOnGpu:
    """Compiles when it is made, for one row and for more. Raises UsageError for what it cannot."""

    kind = "compile"
    pads = False

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        buckets: Sequence[int],
        told: Callable[[str], None] = lambda text: None,
        backend: str = "inductor",
    ) -> None:
        if decoder.spec.experts or decoder.spec.dtype in QUANTIZED:
            raise UsageError(
                "graphs = compile takes float weights and no routed experts; use --graphs eager"
            )
        self._decoder, self._attention = decoder, attention
        self._local = [layer.local for layer in decoder.layers]
        self.buckets = tuple(sorted(buckets))
        traced = trace(decoder.spec, dict(decoder.plain_weights()), TRACED_ROWS)
        self._program: Any = torch.compile(
            traced.module(), dynamic=True, fullgraph=True, backend=backend
        )
        for rows in sorted({1, self.buckets[-1]}):
            told(f"compiling a step of {rows} rows")
            self._warm_up(rows)

    def bucket(self, n: int) -> int | None:
        """n itself, since the program takes any number."""
        return n if n <= self.buckets[-1] else None

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Any, lap: Lap
    ) -> torch.Tensor:
        with under_way(Step(self._attention, self._local, attention, lap)):
            # A copy of its own: where it lies in a larger upload would be another program's.
            x, at = self._decoder.embedded(tokens), positions.clone()
            logits: torch.Tensor = self._program(x, at)
        return logits

    @torch.inference_mode()
    def _warm_up(self, rows: int) -> None:
        """Nobody decodes: every row is a padded one, on the trash page.

        In inference mode and each tensor for itself, as in the steps to come: how tensors lie and
        were made is part of what torch compiles for.
        """
        device = self._decoder.embed.device
        tokens, positions = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in "tp")
        self.run(tokens, positions, self._attention.build(StepPlan(), 0, rows), _no_lap)


def _no_lap(phase: int) -> None:
    """Before the run there is nobody to tell."""
