"""The runner that really computes: plan -> tensors -> logits -> token ids, with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.engine.plan import Lap, Move, StepPlan
from stepscope.engine.request import TokenLogprobs
from stepscope.models.attention import order_decodes
from stepscope.models.backends import attention_for
from stepscope.models.decoder import Decoder
from stepscope.models.kv_cache import kv_cache
from stepscope.models.logit_edits import plan_edits
from stepscope.models.logprobs import Asked, logprobs_of, plan_logprobs, unpack_logprobs
from stepscope.models.sampling import Draw, plan_draw, sample


@dataclass(slots=True)
class Batch:
    plan: StepPlan
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: Any  # what the attention backend made of the plan
    draw: Draw | None
    asked: Asked | None = None
    logprobs: torch.Tensor | None = None  # of the rows that asked, once sampled


class TorchRunner:
    """Owns the KV cache; page numbers come from the scheduler's pool.

    The cache has one page more than the pool: what padded rows write goes there.
    bucket(n): to how many rows a step of n decodes and nothing else is padded; None = not at all.
    """

    def __init__(
        self,
        decoder: Decoder,
        pages: int,
        page_size: int,
        attention: str = "auto",
        max_context: int | None = None,
    ) -> None:
        """attention: auto, gather or paged. max_context: tokens of the longest request at most.

        Raises UsageError for a backend that cannot run on the device of the decoder's weights.
        """
        self.decoder = decoder
        spec, weight = decoder.spec, decoder.embed
        self.cache = kv_cache(spec, pages + 1, page_size, weight.dtype, weight.device)
        longest = min(max_context or spec.max_context, pages * page_size)
        self.attention = attention_for(attention, spec, self.cache, pages, longest)
        self.bucket: Callable[[int], int | None] = lambda n: None
        self._gather_bytes: int | None = None

    @property
    def gather_bytes(self) -> int | None:
        """Context bytes assembled by the last forward, over all layers, padding not counted."""
        return self._gather_bytes

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        self.cache.move(moves)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Batch:
        """Orders plan.decodes by context, so that ragged ones pad little."""
        plan.decodes, split = order_decodes(plan.decodes)
        pad_to = self.bucket(len(plan.decodes)) if plan.decodes and not plan.prefills else None
        slices = plan.slices
        padding = [0] * ((pad_to or len(slices)) - len(slices))
        tokens = [t for s in slices for t in s.request.tokens[s.start : s.context]]
        positions = [p for s in slices for p in range(s.start, s.context)]
        sampled = [s for s in slices if s.samples]
        settings = [s.request.sampling for s in sampled]
        spec, device = self.decoder.spec, self.decoder.embed.device
        edits = plan_edits([s.request for s in sampled], spec.vocab, spec.eos_ids, device)
        draw = plan_draw(settings, [s.context for s in sampled], spec.vocab, device, edits)
        return Batch(
            plan,
            torch.tensor(tokens + padding, device=device),
            torch.tensor(positions + padding, device=device),
            self.attention.build(plan, split, pad_to),
            draw,
            plan_logprobs(settings, spec.vocab, device),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, lap: Lap) -> torch.Tensor:
        self._gather_bytes = self.attention.gather_bytes(batch.attention)
        logits = self.decoder.forward(
            batch.tokens, batch.positions, batch.attention, self.attention, lap
        )
        batch.plan.expert_reads = self.decoder.expert_reads.count
        return logits if batch.plan.prefills else logits[: len(batch.plan.decodes)]

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        ids = sample(logits, batch.draw)
        if batch.asked is not None:
            batch.logprobs = logprobs_of(logits, ids, batch.asked)
        return ids

    def fetch(self, sampled: torch.Tensor) -> list[int]:
        ids: list[int] = sampled.tolist()
        return ids

    def logprobs(self, batch: Batch) -> list[TokenLogprobs]:
        if batch.asked is None or batch.logprobs is None:
            return []
        return unpack_logprobs(batch.logprobs, batch.asked)
