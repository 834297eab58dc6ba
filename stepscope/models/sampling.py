"""From logits to token ids: greedy, or drawn with a seed per request.

A draw depends on (seed, position) alone, so neither batch neighbours nor scheduling change it.
Order: edits of the logits (min_tokens, bias, penalties: `logit_edits`, for greedy rows too), then
temperature, top-k, top-p, min-p, draw. That is the order of transformers' generate; vLLM's sampler
differs in one place, min-p before top-k and top-p, so that its nucleus is taken of what min-p left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stepscope.engine.request import Sampling
from stepscope.models.logit_edits import Edits
from stepscope.models.transfer import to_device

# Most nuclei are short: look for them among the largest logits before sorting a vocabulary.
SHORTLIST = 256
# Below it logits / temperature overflows float32; here every gap between two logits has decided.
COLDEST = 1e-20
NOT_FINITE = -1  # in place of an id: the row's largest logit is NaN or infinite


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
    top_p: torch.Tensor  # (n, 1); 2 where off, so that rounding drops nothing
    min_p: torch.Tensor  # (n, 1)
    uniform: torch.Tensor  # (n, 1) float64
    truncated: bool  # some row uses top-k, top-p or min-p
    short: bool  # every row that does has a top-k within the shortlist
    edits: Edits | None = None
    edited: tuple[torch.Tensor, torch.Tensor] | None = None  # which of `rows`: which edited row


def plan_draw(
    settings: Sequence[Sampling],
    positions: Sequence[int],
    vocab: int,
    device: torch.device,
    edits: Edits | None = None,
) -> Draw | None:
    """None when every row is greedy and as it is. positions = index of the token to be drawn."""
    rows = [i for i, s in enumerate(settings) if s.temperature > 0]
    if not rows and edits is None:
        return None
    chosen = [settings[i] for i in rows]

    def column(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return to_device(values, device, dtype)[:, None]

    draws = uniforms([s.seed for s in chosen], [positions[i] for i in rows])
    return Draw(
        rows=to_device(rows, device, torch.int64),
        temperature=column([max(s.temperature, COLDEST) for s in chosen], torch.float32),
        top_k=column([min(s.top_k, vocab) or vocab for s in chosen], torch.int64),
        top_p=column([s.top_p if s.top_p < 1 else 2.0 for s in chosen], torch.float32),
        min_p=column([s.min_p for s in chosen], torch.float32),
        uniform=column(draws.tolist(), torch.float64),
        truncated=any(map(_truncates, chosen)),
        short=all(0 < s.top_k <= SHORTLIST for s in chosen if _truncates(s)),
        edits=edits,
        edited=None if edits is None else _shared(rows, edits, device),
    )


def _truncates(sampling: Sampling) -> bool:
    return bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)


def _shared(
    rows: Sequence[int], edits: Edits, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where a drawn row is an edited one: its place among the drawn, its place among the edited."""
    place = {row: i for i, row in enumerate(edits.row_list)}
    pairs = [(i, place[row]) for i, row in enumerate(rows) if row in place]
    if not pairs:
        return None
    drawn, edited = to_device(np.array(pairs), device).unbind(1)
    return drawn, edited


def sample(logits: torch.Tensor, draw: Draw | None) -> torch.Tensor:
    """Token ids (B,) for logits (B, vocab); NOT_FINITE for a row that says nothing."""
    best, ids = logits.max(-1)  # several times faster than argmax in bf16 on CPU
    if draw is not None:
        changed = None
        if draw.edits is not None:
            changed = draw.edits.apply(logits)
            top = changed.max(-1)
            ids.index_copy_(0, draw.edits.rows, top.indices)
            best = best.float().index_copy_(0, draw.edits.rows, top.values)
        if draw.rows.shape[0]:
            ids.index_copy_(0, draw.rows, _drawn(_scores(logits, changed, draw), draw))
    # x - x is 0 for a number alone; a NaN anywhere in a row is its maximum.
    return ids.masked_fill_(best - best != 0, NOT_FINITE)


def _scores(logits: torch.Tensor, changed: torch.Tensor | None, draw: Draw) -> torch.Tensor:
    """Float32 logits (n, vocab) of the rows that are drawn, edits included."""
    scores = logits.index_select(0, draw.rows).float()
    if changed is not None and draw.edited is not None:
        drawn, edited = draw.edited
        scores.index_copy_(0, drawn, changed.index_select(0, edited))
    return scores


def _drawn(logits: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Row by row the same arithmetic, whatever the other rows ask for."""
    probs = torch.softmax(logits / draw.temperature, -1)
    plain = _inverse_cdf(probs, draw.uniform)
    if not draw.truncated:
        return plain
    vocab = probs.shape[-1]
    untouched = ((draw.top_k == vocab) & (draw.top_p >= 1) & (draw.min_p <= 0)).squeeze(-1)
    values, order = probs.topk(min(SHORTLIST, vocab), dim=-1)
    picked, complete = _truncated(values, order, draw, vocab)
    # On a GPU looking at the shortlist's success would be a synchronisation.
    if not draw.short and (probs.is_cuda or not bool((complete | untouched).all())):
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
    # min-p compares with the largest, so it matters not of which sum these are shares.
    keep &= values >= draw.min_p * values[:, :1]
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
