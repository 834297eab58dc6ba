"""Rotary positions: the frequencies of each family's scaling, and tables of their cos and sin.

RoPE (Su et al., 2021) turns each pair of a head by position x theta^(-2i / head_dim). To reach
beyond the positions seen in training a model may divide its frequencies: all alike (linear: Chen et
al., 2023), the slow ones only (llama3: Meta's Llama 3.1), or by a ramp over the number of turns
(YaRN: Peng et al., 2023).
"""

from __future__ import annotations

import math

import torch

from stepscope.spec import ModelSpec, RopeScaling

Tables = tuple[torch.Tensor, torch.Tensor]
SCALINGS = ("linear", "llama3", "yarn")  # that a configuration may name


def rope_tables(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> tuple[Tables, Tables]:
    """(cos, signed sin) of full layers and of local ones; one and the same where they agree."""
    full = _tables(spec, spec.rope_theta, spec.rope, dtype, device)
    if spec.local_rope_theta is None or not spec.local_layers:
        return full, full
    return full, _tables(spec, spec.local_rope_theta, None, dtype, device)


def _tables(
    spec: ModelSpec,
    theta: float,
    scaling: RopeScaling | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Tables:
    """(max_context, head_dim) each, angles in float32 as transformers does.

    The sign of rotate-half lives in the sine.
    """
    half = spec.head_dim // 2
    angles = torch.outer(
        torch.arange(spec.max_context).float(), inverse_frequencies(spec.head_dim, theta, scaling)
    )
    sign = torch.cat((-torch.ones(half), torch.ones(half)))
    size = attention_factor(scaling)
    cos = torch.cat((angles.cos(), angles.cos()), -1) * size
    sin = torch.cat((angles.sin(), angles.sin()), -1) * (sign * size)
    return cos.to(dtype).to(device), sin.to(dtype).to(device)


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> torch.Tensor:
    """Radians per position of each pair (head_dim / 2), float32."""
    powers = theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    plain = 1.0 / powers
    if scaling is None:
        return plain
    if scaling.kind == "divisors":
        return plain / torch.tensor(scaling.divisors)
    if scaling.kind == "llama3":
        return _slow_divided(plain, scaling)
    if scaling.kind == "yarn":
        kept = 1 - _ramp(head_dim, theta, scaling)
        return 1.0 / (scaling.factor * powers) * (1 - kept) + plain * kept
    return plain / scaling.factor


def attention_factor(scaling: RopeScaling | None) -> float:
    """By what cos and sin are multiplied, so that scores grow by its square (YaRN, eq. 22)."""
    if scaling is None or scaling.kind != "yarn":
        return 1.0
    if scaling.attention is not None:
        return scaling.attention
    return 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0


def _slow_divided(plain: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Fast turns kept, slow ones divided, those between interpolated (llama-models, model.py)."""
    turns = scaling.original * plain / (2 * math.pi)  # within the original context
    smooth = (turns - scaling.low_freq) / (scaling.high_freq - scaling.low_freq)
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _ramp(head_dim: int, theta: float, scaling: RopeScaling) -> torch.Tensor:
    """0 for the pairs that are kept, 1 for those interpolated (YaRN, section 3.2)."""

    def pair_of(turns: float) -> float:
        return head_dim * math.log(scaling.original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), head_dim - 1)
    width = high - low or 0.001
    return ((torch.arange(head_dim // 2).float() - low) / width).clamp(0, 1)
