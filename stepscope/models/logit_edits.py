"""What changes logits before a token is chosen: logit bias, min_tokens and penalties.

Only the tokens concerned are touched: the host lists them as (row, token) pairs in `prepare`, the
device gathers their logits, changes them and puts them back. For a logit x of a row, in this order
(as in vLLM's sampler; transformers also has bias before the repetition penalty):

1. min_tokens: -inf for the ids that would end the request, while it has fewer output tokens;
2. logit bias: x + bias;
3. repetition penalty r of tokens in prompt or output: x / r if x > 0, else x * r (CTRL, Keskar et
   al., 2019);
4. x - frequency_penalty * (its count in the output) - presence_penalty * (1 if it is there).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepscope.engine.request import Request, Sampling
from stepscope.models.transfer import to_device


@dataclass(slots=True)
class Edits:
    """Of E rows; K pairs are named by place = edited row x vocabulary + token."""

    row_list: list[int]  # rows of the step, on the host
    rows: torch.Tensor  # (E,), the same on the device
    places: torch.Tensor  # (K,)
    bias: torch.Tensor  # (K,) float32
    repetition: torch.Tensor  # (K,) float32, 1 where there is none
    minus: torch.Tensor  # (K,) float32: frequency and presence
    forbidden: torch.Tensor  # places

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """New float32 logits (E, vocab) of the edited rows, out of those of all rows (B, vocab)."""
        edited = logits.index_select(0, self.rows).float()
        flat = edited.view(-1)
        x = flat.index_select(0, self.places) + self.bias
        x = torch.where(x > 0, x / self.repetition, x * self.repetition) - self.minus
        flat.index_copy_(0, self.places, x)
        flat.index_fill_(0, self.forbidden, float("-inf"))
        return edited


def edits(sampling: Sampling, output_tokens: int) -> bool:
    """Are this row's logits changed?"""
    return bool(sampling.penalizes or sampling.logit_bias or output_tokens < sampling.min_tokens)


def plan_edits(
    requests: Sequence[Request], vocab: int, eos: Sequence[int], device: torch.device
) -> Edits | None:
    """None when no row is changed. One request per row; their tokens are all known by now."""
    rows = [i for i, r in enumerate(requests) if edits(r.sampling, r.output_tokens)]
    if not rows:
        return None
    chosen = [requests[i] for i in rows]
    places, bias, repetition, minus = _pairs(chosen, vocab)
    forbidden = [
        row * vocab + token for row, r in enumerate(chosen) for token in _forbidden(r, eos)
    ]

    def tensor(values: np.ndarray | list[int], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, device, dtype)

    return Edits(
        rows,
        tensor(rows, torch.int64),
        tensor(places, torch.int64),
        tensor(bias, torch.float32),
        tensor(repetition, torch.float32),
        tensor(minus, torch.float32),
        tensor(forbidden, torch.int64),
    )


def _pairs(
    requests: Sequence[Request], vocab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """places (K,), each once, and what happens there: bias, repetition penalty, subtraction."""
    seen: list[np.ndarray] = []  # places of prompt and output tokens
    counted: list[np.ndarray] = []  # 1 where the token is of the output
    biased: list[int] = []
    amounts: list[float] = []
    for row, request in enumerate(requests):
        if request.sampling.penalizes:
            tokens = np.array(request.tokens, dtype=np.int64)
            seen.append(tokens + row * vocab)
            counted.append(np.arange(len(tokens)) >= request.prompt_tokens)
        biased += [row * vocab + token for token, _ in request.sampling.logit_bias]
        amounts += [bias for _, bias in request.sampling.logit_bias]
    history = np.concatenate(seen) if seen else np.empty(0, np.int64)
    in_output = np.concatenate(counted) if counted else np.empty(0, bool)
    places, where = np.unique(
        np.concatenate([history, np.array(biased, dtype=np.int64)]), return_inverse=True
    )
    total, old = len(places), len(history)
    bias = np.bincount(where[old:], weights=np.array(amounts), minlength=total)
    counts = np.bincount(where[:old], weights=in_output, minlength=total)
    was_seen = np.bincount(where[:old], minlength=total) > 0
    owner = places // vocab
    r, frequency, presence = np.array(
        [
            (s.repetition_penalty, s.frequency_penalty, s.presence_penalty)
            for s in (request.sampling for request in requests)
        ]
    ).T
    minus = frequency[owner] * counts + presence[owner] * (counts > 0)
    return places, bias, np.where(was_seen, r[owner], 1.0), minus


def _forbidden(request: Request, eos: Sequence[int]) -> set[int]:
    """The ids that would end it too early."""
    sampling = request.sampling
    if request.output_tokens >= sampling.min_tokens:
        return set()
    return {*sampling.stop_ids, *(() if sampling.ignore_eos else eos)}
