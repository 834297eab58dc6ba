"""The decoder of the Llama family: one forward over the concatenated tokens of a step.

Pre-norm RMSNorm (Zhang & Sennrich, 2019), rotary positions (Su et al., 2021) in rotate-half order,
grouped-query attention (Ainslie et al., 2023), SwiGLU (Shazeer, 2020). T = tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from stepscope.engine.plan import Lap
from stepscope.models.attention import AttentionBatch, attend
from stepscope.models.kv_cache import KvCache
from stepscope.models.linear import Linear
from stepscope.records import FORWARD, GATHER
from stepscope.spec import ModelSpec


@dataclass(slots=True)
class Layer:
    attn_norm: torch.Tensor
    qkv: Linear
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Takes the weights out of a dict of canonical names (see `models.load`): held once.

    products: plain or onednn, see `models.linear`.
    """

    def __init__(
        self, spec: ModelSpec, weights: dict[str, torch.Tensor], products: str = "plain"
    ) -> None:
        self.spec = spec
        self.products = products
        self.embed = weights.pop("embed")
        self.final_norm = weights.pop("final_norm")
        # A tied head is looked up by row as well, so it keeps the plain layout.
        head = weights.pop("head", None)
        self.head = Linear(self.embed if head is None else head, products, head is not None)
        self.layers = [_take_layer(weights, i, products) for i in range(spec.layers)]
        self.cos, self.sin = rope_tables(spec, self.embed.dtype)
        self.heads_width = spec.heads * spec.head_dim
        self.rotated_width = (spec.heads + spec.kv_heads) * spec.head_dim

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: AttentionBatch,
        cache: KvCache,
        lap: Lap,
    ) -> torch.Tensor:
        """Logits (B, vocab) of the sampled rows, for tokens and positions (T,)."""
        spec = self.spec
        size, eps = (spec.hidden,), spec.norm_eps
        cos = self.cos.index_select(0, positions).unsqueeze(1)
        sin = self.sin.index_select(0, positions).unsqueeze(1)
        x = self.embed.index_select(0, tokens)
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(F.rms_norm(x, size, layer.attn_norm, eps))
            self._rotate(qkv, cos, sin)
            cache.write(index, batch.write_slots, qkv[:, self.heads_width :])
            lap(FORWARD)
            context = cache.gather(index, batch.read_slots)
            lap(GATHER)
            attended = attend(spec, qkv[:, : self.heads_width], context, batch)
            x = x + layer.o(attended)
            gate_up = layer.gate_up(F.rms_norm(x, size, layer.mlp_norm, eps))
            gate, up = gate_up.chunk(2, -1)
            x = x + layer.down(F.silu(gate).mul_(up))
        if batch.sampled_rows is not None:
            x = x.index_select(0, batch.sampled_rows)
        logits = self.head(F.rms_norm(x, size, self.final_norm, eps))
        lap(FORWARD)
        return logits

    def _rotate(self, qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotate q and k in place. The sign of rotate-half lives in the sine table."""
        spec = self.spec
        heads = spec.heads + spec.kv_heads
        # A view, not a reshape: it must write into qkv, so it raises rather than copy.
        both = qkv[:, : self.rotated_width].view(-1, heads, spec.head_dim)
        rolled = both.roll(spec.head_dim // 2, -1)
        both.mul_(cos).addcmul_(rolled, sin)


def _take_layer(weights: dict[str, torch.Tensor], index: int, products: str) -> Layer:
    def take(name: str) -> torch.Tensor:
        return weights.pop(f"layers.{index}.{name}")

    return Layer(
        attn_norm=take("attn_norm"),
        qkv=Linear(take("qkv"), products),
        o=Linear(take("o"), products),
        mlp_norm=take("mlp_norm"),
        gate_up=Linear(take("gate_up"), products),
        down=Linear(take("down"), products),
    )


def rope_tables(spec: ModelSpec, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and signed sin, (max_context, head_dim) each, angles in float32 as transformers does."""
    half = spec.head_dim // 2
    inverse = 1.0 / spec.rope_theta ** (
        torch.arange(0, spec.head_dim, 2, dtype=torch.int64).float() / spec.head_dim
    )
    angles = torch.outer(torch.arange(spec.max_context).float(), inverse)
    sign = torch.cat((-torch.ones(half), torch.ones(half)))
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((angles.sin(), angles.sin()), -1) * sign
    return cos.to(dtype), sin.to(dtype)
