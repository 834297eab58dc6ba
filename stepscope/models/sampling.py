"""From logits to token ids: greedy, temperature, top-k, top-p, with a seed per request.

A draw depends on (seed, position) alone, so neither batch neighbours nor scheduling change it.
Order as in transformers: temperature, top-k, top-p, draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepscope.engine.request import Sampling

# Most nuclei are short: look for them among the largest logits before sorting a vocabulary.
SHORTLIST = 256
# Below it logits / temperature overflows float32; here every gap between two logits has decided.
COLDEST = 1e-20


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """One float64 in [0, 1) per (seed, position): SplitMix64 (Steele et al., 2014) as a hash."""
    with np.errstate(over="ignore"):
        seed = np.asarray([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
        mixed = _splitmix(seed) + np.asarray(positions, dtype=np.uint64)
        bits: np.ndarray = _splitmix(mixed) >> np.uint64(11)
        # 53 bits are what a float64 holds exactly.
        return np.ldexp(bits.astype(np.float64), -53)


def _splitmix(x: np.ndarray) -> np.ndarray:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


@dataclass(slots=True)
class Draw:
    """How the B rows of a step are sampled. Row indices and settings as tensors of one device."""

    rows: torch.Tensor  # rows that are not greedy
    temperature: torch.Tensor  # (n, 1)
    top_k: torch.Tensor  # (n, 1); the vocabulary's size where off
    top_p: torch.Tensor  # (n, 1)
    uniform: torch.Tensor  # (n, 1) float64
    truncated: bool  # some row uses top-k or top-p


def plan_draw(
    settings: Sequence[Sampling], positions: Sequence[int], vocab: int, device: torch.device
) -> Draw | None:
    """None when every row is greedy. positions = index of the token to be drawn."""
    rows = [i for i, s in enumerate(settings) if s.temperature > 0]
    if not rows:
        return None
    chosen = [settings[i] for i in rows]

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)[:, None]

    draws = uniforms([s.seed for s in chosen], [positions[i] for i in rows])
    return Draw(
        rows=torch.tensor(rows, device=device),
        temperature=column([max(s.temperature, COLDEST) for s in chosen], torch.float32),
        top_k=column([min(s.top_k, vocab) or vocab for s in chosen], torch.int64),
        top_p=column([s.top_p for s in chosen], torch.float32),
        uniform=column(draws.tolist(), torch.float64),
        truncated=any(s.top_k or s.top_p < 1 for s in chosen),
    )


def sample(logits: torch.Tensor, draw: Draw | None) -> torch.Tensor:
    """Token ids (B,) for logits (B, vocab)."""
    ids = logits.max(-1).indices  # several times faster than argmax in bf16 on CPU
    if draw is not None:
        ids.index_copy_(0, draw.rows, _drawn(logits.index_select(0, draw.rows), draw))
    return ids


def _drawn(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Row by row the same arithmetic, whatever the other rows ask for."""
    probs = torch.softmax(logits.float() / draw.temperature, -1)
    plain = _inverse_cdf(probs, draw.uniform)
    if not draw.truncated:
        return plain
    vocab = probs.shape[-1]
    untouched = ((draw.top_k == vocab) & (draw.top_p >= 1)).squeeze(-1)
    values, order = probs.topk(min(SHORTLIST, vocab), dim=-1)
    picked, complete = _truncated(values, order, draw, vocab)
    if not bool((complete | untouched).all()):  # a nucleus wider than the shortlist
        values, order = probs.sort(dim=-1, descending=True)
        full, _ = _truncated(values, order, draw, vocab)
        picked = torch.where(complete, picked, full)
    return torch.where(untouched, plain, picked)


def _truncated(
    values: torch.Tensor, order: torch.Tensor, draw: Draw, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, is the kept set certainly inside `values`?) for descending probabilities (n, m)."""
    count = values.shape[-1]
    rank = torch.arange(count, device=values.device)
    in_k = rank < draw.top_k
    within = torch.where(in_k, values, 0.0).double()
    # top-p is taken of what top-k left, renormalised, as transformers does.
    everything = draw.top_k == vocab
    total = torch.where(everything, 1.0, within.sum(-1, keepdim=True))
    before = within.cumsum(-1) - within
    keep = in_k & ((before < draw.top_p * total) | (rank == 0))
    k_inside = (draw.top_k <= count).squeeze(-1)
    p_inside = everything.squeeze(-1) & (keep.sum(-1) < count)
    index = _inverse_cdf(torch.where(keep, values, 0.0), draw.uniform)
    return order.gather(-1, index[:, None]).squeeze(-1), k_inside | p_inside


def _inverse_cdf(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index (n,) of the first cumulated weight above uniform x total; weights need no norm.

    An index of weight zero is never returned: clamped to the last one that counts.
    """
    cumulated = weights.double().cumsum(-1)
    total = cumulated[:, -1:]
    index = torch.searchsorted(cumulated, uniform * total, right=True).squeeze(-1)
    last = (cumulated < total).sum(-1)  # the first index that reaches the total
    return torch.minimum(index, last)
