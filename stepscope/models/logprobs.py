"""Log-probabilities of sampled tokens and of the likeliest ones, for the rows that ask for them.

Under the raw logits, before bias, penalties and temperature, as vLLM reports them by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stepscope.engine.request import Sampling, TokenLogprobs
from stepscope.models.transfer import to_device

LEAST = -9999.0  # stands for -inf, which JSON has no word for; vLLM's server says the same


@dataclass(slots=True)
class Asked:
    rows: torch.Tensor  # (n,)
    counts: list[int]  # how many of the likeliest tokens each of them wants


def plan_logprobs(settings: Sequence[Sampling], vocab: int, device: torch.device) -> Asked | None:
    """None when no row asks."""
    wanted = [(i, min(s.logprobs, vocab)) for i, s in enumerate(settings) if s.logprobs is not None]
    if not wanted:
        return None
    rows = to_device([i for i, _ in wanted], device, torch.int64)
    return Asked(rows, [n for _, n in wanted])


def logprobs_of(logits: torch.Tensor, ids: torch.Tensor, asked: Asked) -> torch.Tensor:
    """(n, 1 + 2m) float64: the token's log-probability, then m ids and m log-probabilities.

    One tensor, so that they come to the host in one copy; m is the most that a row wants.
    """
    scores = torch.log_softmax(logits.index_select(0, asked.rows).float(), -1)
    taken = ids.index_select(0, asked.rows).clamp_min(0)[:, None]  # -1: the row failed
    best, which = scores.topk(max(asked.counts), -1)
    values = torch.cat((scores.gather(-1, taken), best), -1).clamp_min(LEAST).double()
    return torch.cat((values[:, :1], which.double(), values[:, 1:]), -1)


def unpack_logprobs(packed: torch.Tensor, asked: Asked) -> list[TokenLogprobs]:
    most = max(asked.counts)
    return [
        TokenLogprobs(row[0], [int(i) for i in row[1 : 1 + n]], row[1 + most : 1 + most + n])
        for row, n in zip(packed.tolist(), asked.counts, strict=True)
    ]
