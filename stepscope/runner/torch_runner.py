"""The runner that really computes: plan -> tensors -> logits -> token ids, with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stepscope.engine.plan import Lap, Move, Slice, StepPlan
from stepscope.engine.request import Request, TokenLogprobs
from stepscope.models.attention import AttentionBatch, BatchBuilder, order_decodes
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
    attention: AttentionBatch
    draw: Draw | None
    pending: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, and places in the last ids
    asked: Asked | None = None
    logprobs: torch.Tensor | None = None  # of the rows that asked, once sampled


class TorchRunner:
    """Owns the KV cache; page numbers come from the scheduler's pool."""

    def __init__(self, decoder: Decoder, pages: int, page_size: int) -> None:
        self.decoder = decoder
        weight = decoder.embed
        self.cache = kv_cache(decoder.spec, pages, page_size, weight.dtype, weight.device)
        self._local_layers = decoder.spec.local_layers
        window = decoder.spec.window if self._local_layers else None
        self._builder = BatchBuilder(page_size, weight.dtype, weight.device, window)
        self._places: dict[Request, int] = {}  # where the last step's ids are each request's
        self._ids = torch.empty(0, dtype=torch.int64, device=weight.device)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        self.cache.move(moves)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Batch:
        """Orders plan.decodes by context, so that ragged ones pad little."""
        plan.decodes, split = order_decodes(plan.decodes)
        slices = plan.slices
        positions = [p for s in slices for p in range(s.start, s.context)]
        tokens, pending = self._tokens(slices)
        sampled = [s for s in slices if s.samples]
        self._places = {s.request: i for i, s in enumerate(sampled)}
        settings = [s.request.sampling for s in sampled]
        spec, device = self.decoder.spec, self.decoder.embed.device
        edits = plan_edits([s.request for s in sampled], spec.vocab, spec.eos_ids, device)
        draw = plan_draw(settings, [s.context for s in sampled], spec.vocab, device, edits)
        attention = self._builder.build(plan, split)
        plan.graph, plan.gather_bytes = "eager", self._gather_bytes(attention)
        return Batch(
            plan,
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            attention,
            draw,
            pending,
            plan_logprobs(settings, spec.vocab, device),
        )

    def _tokens(
        self, slices: Sequence[Slice]
    ) -> tuple[list[int], tuple[torch.Tensor, torch.Tensor] | None]:
        """Ids as far as they are known; where one is pending, its row and its place."""
        tokens: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for piece in slices:
            tokens += piece.request.tokens[piece.start : piece.context]
            if piece.context > len(piece.request.tokens):
                rows.append(len(tokens))
                places.append(self._places[piece.request])
                tokens.append(0)
        if not rows:
            return tokens, None
        return tokens, (torch.tensor(rows), torch.tensor(places))

    def _gather_bytes(self, attention: AttentionBatch) -> int:
        """Context bytes to assemble, over all layers, padding not counted."""
        cache, local = self.cache, self._local_layers
        full = (len(cache.layers) - local) * attention.full.tokens
        return (full + local * attention.local.tokens) * cache.row_bytes

    @torch.inference_mode()
    def forward(self, batch: Batch, lap: Lap) -> torch.Tensor:
        if batch.pending is not None:  # a failed row's id is -1: whatever follows is not used
            rows, places = batch.pending
            batch.tokens[rows] = self._ids[places].clamp_min_(0)
        cache = self.cache
        logits = self.decoder.forward(batch.tokens, batch.positions, batch.attention, cache, lap)
        batch.plan.expert_reads = self.decoder.expert_reads.count
        return logits

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        ids = self._ids = sample(logits, batch.draw)
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
