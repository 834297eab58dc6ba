"""The runner that really computes: plan -> tensors -> logits -> token ids, with torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stepscope.engine.plan import Lap, StepPlan
from stepscope.models.attention import AttentionBatch, BatchBuilder, order_decodes
from stepscope.models.decoder import Decoder
from stepscope.models.kv_cache import KvCache
from stepscope.models.sampling import Draw, plan_draw, sample


@dataclass(slots=True)
class Batch:
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    draw: Draw | None
    context_tokens: int


class TorchRunner:
    """Owns the KV cache; page numbers come from the scheduler's pool."""

    def __init__(self, decoder: Decoder, pages: int, page_size: int) -> None:
        self.decoder = decoder
        weight = decoder.embed
        self.cache = KvCache(decoder.spec, pages, page_size, weight.dtype, weight.device)
        self._builder = BatchBuilder(page_size, weight.dtype, weight.device)
        self._gather_bytes: int | None = None

    @property
    def gather_bytes(self) -> int | None:
        """Context bytes assembled by the last forward, over all layers, padding not counted."""
        return self._gather_bytes

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Batch:
        """Orders plan.decodes by context, so that ragged ones pad little."""
        plan.decodes, split = order_decodes(plan.decodes)
        slices = plan.slices
        tokens = [t for s in slices for t in s.request.tokens[s.start : s.context]]
        positions = [p for s in slices for p in range(s.start, s.context)]
        sampled = [s for s in slices if s.samples]
        device = self.decoder.embed.device
        draw = plan_draw(
            [s.request.sampling for s in sampled],
            [s.context for s in sampled],
            self.decoder.spec.vocab,
            device,
        )
        return Batch(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            self._builder.build(plan, split),
            draw,
            sum(s.context for s in slices),
        )

    @torch.inference_mode()
    def forward(self, batch: Batch, lap: Lap) -> torch.Tensor:
        cache = self.cache
        row_bytes = cache.row * cache.layers[0].element_size()
        self._gather_bytes = batch.context_tokens * row_bytes * len(cache.layers)
        return self.decoder.forward(batch.tokens, batch.positions, batch.attention, cache, lap)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return sample(logits, batch.draw)

    def fetch(self, sampled: torch.Tensor) -> list[int]:
        ids: list[int] = sampled.tolist()
        return ids
