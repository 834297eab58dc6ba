"""The runner that really computes: plan -> tensors -> logits -> token ids, with torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stepscope.engine.plan import Lap, Move, Slice, StepPlan
from stepscope.engine.request import Request, TokenLogprobs
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
    pending: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, and places in the last ids
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
        self._places: dict[Request, int] = {}  # where the last step's ids are each request's
        self._ids = torch.empty(0, dtype=torch.int64, device=weight.device)

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
        positions = [p for s in slices for p in range(s.start, s.context)]
        tokens, pending = self._tokens(slices)
        sampled = [s for s in slices if s.samples]
        self._places = {s.request: i for i, s in enumerate(sampled)}
        settings = [s.request.sampling for s in sampled]
        spec, device = self.decoder.spec, self.decoder.embed.device
        edits = plan_edits([s.request for s in sampled], spec.vocab, spec.eos_ids, device)
        draw = plan_draw(settings, [s.context for s in sampled], spec.vocab, device, edits)
        attention = self.attention.build(plan, split, pad_to)
        plan.graph, plan.gather_bytes = "eager", self.attention.gather_bytes(attention)
        return Batch(
            plan,
            torch.tensor(tokens + padding, device=device),
            torch.tensor(positions + padding, device=device),
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

    @torch.inference_mode()
    def forward(self, batch: Batch, lap: Lap) -> torch.Tensor:
        if batch.pending is not None:  # a failed row's id is -1: whatever follows is not used
            rows, places = batch.pending
            batch.tokens[rows] = self._ids[places].clamp_min_(0)
        logits = self.decoder.forward(
            batch.tokens, batch.positions, batch.attention, self.attention, lap
        )
        batch.plan.expert_reads = self.decoder.expert_reads.count
        return logits if batch.plan.prefills else logits[: len(batch.plan.decodes)]

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
