"""Decode steps as CUDA graphs: captured once per batch bucket, then replayed with one launch.

A graph repeats the same kernels on the same memory. So a step is padded to the next bucket, its
index tensors are copied over those of the captured step, and the logits appear where the captured
ones were. Buckets are captured largest first, so that the smaller ones reuse its memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch

from stepscope.device import cuda
from stepscope.engine.plan import Lap, StepPlan
from stepscope.errors import UsageError
from stepscope.models.backends import Attention
from stepscope.models.decoder import Decoder

Forward = Callable[[], torch.Tensor]
Capture = Callable[[Forward], tuple[Callable[[], None], torch.Tensor]]
NOT_PAGED = (
    "graphs = cuda needs attention that reads pages in place, as gathered contexts change their "
    "shape; use --attention paged or --graphs eager"
)


@dataclass(slots=True)
class _Captured:
    inputs: list[torch.Tensor]  # tokens, positions, then the tensors of the attention batch
    replay: Callable[[], None]
    logits: torch.Tensor


def default_buckets(max_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 up to 32 and every 16 beyond, and max_seqs itself."""
    steps = [1, 2, 4, *range(8, 32, 8), *range(32, max_seqs, 16)]
    return (*(b for b in steps if b < max_seqs), max_seqs)


def bucket_of(buckets: Sequence[int], n: int) -> int | None:
    """The smallest that holds n; None if none does. buckets ascend."""
    at = bisect_left(buckets, n)
    return buckets[at] if at < len(buckets) else None


class CudaGraphs:
    """Raises UsageError where a step cannot be a graph."""

    kind = "cuda"
    pads = True

    def __init__(
        self,
        decoder: Decoder,
        attention: Attention,
        buckets: Sequence[int],
        capture: Capture | None = None,
    ) -> None:
        """capture: turns a call into (replay, its static result); None = CUDA's own."""
        if decoder.spec.experts:
            raise UsageError(
                "graphs = cuda needs a step without routed experts, whose number the host reads in "
                "every layer; use --graphs eager"
            )
        if attention.name != "paged":
            raise UsageError(NOT_PAGED)
        self._decoder, self._attention = decoder, attention
        self.buckets = tuple(sorted(buckets))
        self._capture = capture or partial(cuda.capture, pool=cuda.graph_pool())
        self._captured: dict[int, _Captured] = {}

    def prepare(self, told: Callable[[int], None] = lambda bucket: None) -> None:
        """Capture every bucket; told of each before. Raises torch's error if memory runs out."""
        for bucket in reversed(self.buckets):
            told(bucket)
            self._captured[bucket] = self._capture_one(bucket)

    def bucket(self, n: int) -> int | None:
        return bucket_of(self.buckets, n)

    @torch.inference_mode()
    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Any, lap: Lap
    ) -> torch.Tensor:
        """Logits of a padded step (bucket, vocab); they stay valid until the next one."""
        captured = self._captured[tokens.shape[0]]
        for held, new in zip(captured.inputs, _tensors(tokens, positions, attention), strict=True):
            held.copy_(new)
        captured.replay()
        return captured.logits

    @torch.inference_mode()
    def _capture_one(self, bucket: int) -> _Captured:
        """Nobody decodes: every row is a padded one."""
        device = self._decoder.embed.device
        tokens, positions = torch.zeros(2, bucket, dtype=torch.int64, device=device).unbind(0)
        batch = self._attention.build(StepPlan(), 0, bucket)

        def forward() -> torch.Tensor:
            return self._decoder.forward(tokens, positions, batch, self._attention, _no_lap)

        replay, logits = self._capture(forward)
        return _Captured(_tensors(tokens, positions, batch), replay, logits)


def _no_lap(phase: int) -> None:
    """Inside a graph there is nothing to tell apart."""


def _tensors(tokens: torch.Tensor, positions: torch.Tensor, batch: Any) -> list[torch.Tensor]:
    values = [getattr(batch, f.name) for f in fields(batch)]
    return [tokens, positions, *(v for v in values if isinstance(v, torch.Tensor))]
