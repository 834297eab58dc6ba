"""The runner that really computes: plan -> tensors -> logits -> token ids, with torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from stepscope.device.timeline import Spans, Timeline
from stepscope.engine.plan import Lap, Move, Slice, StepPlan
from stepscope.engine.request import Request, TokenLogprobs
from stepscope.models.attention import order_decodes
from stepscope.models.backends import attention_for
from stepscope.models.decoder import Decoder
from stepscope.models.kv_cache import kv_cache
from stepscope.models.logit_edits import plan_edits
from stepscope.models.logprobs import Asked, logprobs_of, plan_logprobs, unpack_logprobs
from stepscope.models.sampling import Draw, plan_draw, sample
from stepscope.models.transfer import Download, download, on_host, upload
from stepscope.records import D2H_WAIT, FORWARD, SAMPLE


@dataclass(slots=True)
class Batch:
    plan: StepPlan
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: Any  # what the attention backend made of the plan
    draw: Draw | None
    pending: tuple[torch.Tensor, torch.Tensor] | None = None  # rows, and places in the last ids
    asked: Asked | None = None
    logprobs: torch.Tensor | Download | None = None  # of the rows that asked, once sampled
    spans: Spans | None = None
    padded: bool = False


class DecodeGraphs(Protocol):
    """Steps that only decode, at fixed batch sizes (buckets), in few launches."""

    @property
    def kind(self) -> str:
        """compile or cuda"""

    @property
    def buckets(self) -> Sequence[int]:
        """Ascending."""

    @property
    def pads(self) -> bool:
        """Whether attention has to look as if a whole bucket decoded."""

    def bucket(self, n: int) -> int | None:
        """The size that a step of n decodes is padded to; None = too many."""

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: Any, lap: Lap
    ) -> torch.Tensor:
        """Logits (bucket, vocab), valid until the next step. May lap GATHER, never the end."""


class TorchRunner:
    """Owns the KV cache; page numbers come from the scheduler's pool.

    The cache has one page more than the pool: what padded rows write goes there.
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
        self.graphs: DecodeGraphs | None = None
        self.timeline: Timeline | None = None  # of a device that works by itself
        self.launches: dict[tuple[str, int], int] = {}  # by graph and rows, where counted
        self._places: dict[Request, int] = {}  # where the last step's ids are each request's
        self._ids = torch.empty(0, dtype=torch.int64, device=weight.device)

    @property
    def device(self) -> torch.device:
        return self.decoder.embed.device

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        self.cache.move(moves)

    @torch.inference_mode()
    def prepare(self, plan: StepPlan) -> Batch:
        """Orders plan.decodes by context, so that ragged ones pad little."""
        plan.decodes, split = order_decodes(plan.decodes)
        pad_to = self._bucket(plan)
        slices = plan.slices
        padding = [0] * ((pad_to or len(slices)) - len(slices))
        positions = [p for s in slices for p in range(s.start, s.context)]
        tokens, *pending = self._tokens(slices)
        sampled = [s for s in slices if s.samples]
        self._places = {s.request: i for i, s in enumerate(sampled)}
        settings = [s.request.sampling for s in sampled]
        spec, device = self.decoder.spec, self.device
        edits = plan_edits([s.request for s in sampled], spec.vocab, spec.eos_ids, device)
        draw = plan_draw(settings, [s.context for s in sampled], spec.vocab, device, edits)
        fixed = pad_to if self.graphs is not None and self.graphs.pads else None
        attention = self.attention.build(plan, split, fixed)
        spans = self._tell(plan, attention, pad_to, draw is None)
        lists = [tokens + padding, positions + padding, *(pending if pending[0] else ())]
        ids, at, *late = upload([np.array(values, dtype=np.int64) for values in lists], device)
        return Batch(
            plan,
            ids,
            at,
            attention,
            draw,
            (late[0], late[1]) if late else None,
            plan_logprobs(settings, spec.vocab, device),
            spans=spans,
            padded=pad_to is not None,
        )

    def _bucket(self, plan: StepPlan) -> int | None:
        """To how many rows a step that only decodes is padded; None = it runs as it is."""
        if self.graphs is None or plan.prefills:
            return None
        return self.graphs.bucket(len(plan.decodes))

    def _tell(
        self, plan: StepPlan, attention: Any, pad_to: int | None, greedy: bool
    ) -> Spans | None:
        """How the step is launched, for its record, and what will say when the device did it."""
        plan.gather_bytes = self.attention.gather_bytes(attention)
        plan.graph, plan.padded_batch, plan.graph_hit = "eager", pad_to, None
        if self.graphs is not None and not plan.prefills:  # those are eager by design
            plan.graph_hit = int(pad_to is not None)
            plan.graph = self.graphs.kind if pad_to is not None else "eager"
        if self.timeline is None:
            return None
        if greedy and not plan.prefills:  # as they were counted
            plan.launches = self.launches.get((plan.graph, pad_to or len(plan.decodes)))
        spans = plan.spans = self.timeline.step()
        plan.syncs = 1 + (self.decoder.spec.layers if self.decoder.spec.experts else 0)
        return spans

    def _tokens(self, slices: Sequence[Slice]) -> tuple[list[int], list[int], list[int]]:
        """Ids as far as they are known; where they are pending, their rows and their places."""
        tokens: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for piece in slices:
            tokens += piece.request.tokens[piece.start : piece.context]
            if piece.context > len(piece.request.tokens):
                rows.append(len(tokens))
                places.append(self._places[piece.request])
                tokens.append(0)
        return tokens, rows, places

    @torch.inference_mode()
    def forward(self, batch: Batch, lap: Lap) -> torch.Tensor:
        spans = batch.spans
        if spans is None:
            return self._logits(batch, lap)
        spans.begin()

        def both(phase: int) -> None:
            lap(phase)
            spans.mark(phase)

        logits = self._logits(batch, both)
        spans.expert_reads = batch.plan.expert_reads
        return logits

    def _logits(self, batch: Batch, lap: Lap) -> torch.Tensor:
        if batch.pending is not None:  # a failed row's id is -1: whatever follows is not used
            rows, places = batch.pending
            batch.tokens.index_copy_(0, rows, self._ids.index_select(0, places).clamp_min_(0))
        inputs = batch.tokens, batch.positions, batch.attention
        if batch.padded and self.graphs is not None:
            logits = self.graphs.run(*inputs, lap)
            lap(FORWARD)
        else:
            logits = self.decoder.forward(*inputs, self.attention, lap)
        batch.plan.expert_reads = self.decoder.expert_reads.count
        return logits if batch.plan.prefills else logits[: len(batch.plan.decodes)]

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: Batch) -> torch.Tensor | Download:
        ids = self._ids = sample(logits, batch.draw)
        logprobs = None if batch.asked is None else logprobs_of(logits, ids, batch.asked)
        if batch.spans is not None:
            batch.spans.mark(SAMPLE)
        if logprobs is not None:
            batch.logprobs = download(logprobs)
        sampled = download(ids)
        if batch.spans is not None:
            batch.spans.mark(D2H_WAIT)
            batch.spans.end()
        return sampled

    def fetch(self, sampled: torch.Tensor | Download) -> list[int]:
        ids: list[int] = on_host(sampled).tolist()
        return ids

    def logprobs(self, batch: Batch) -> list[TokenLogprobs]:
        if batch.asked is None or batch.logprobs is None:
            return []
        return unpack_logprobs(on_host(batch.logprobs), batch.asked)
