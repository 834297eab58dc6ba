"""The decoder: one forward over the concatenated tokens of a step, for every family.

Pre-norm RMSNorm (Zhang & Sennrich, 2019), rotary positions (Su et al., 2021) in rotate-half order,
grouped-query attention (Ainslie et al., 2023), SwiGLU (Shazeer, 2020). What else a family has (a
bias, norms of q and k, norms after a block, experts, a window) the spec names, and it is None here
where it is absent. T = tokens of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from stepscope.engine.plan import Lap
from stepscope.errors import UsageError
from stepscope.models.backends import Attention, StepBatch
from stepscope.models.experts import ACTIVATIONS, GatedMlp, Reads, RoutedExperts
from stepscope.models.linear import Linear
from stepscope.models.rope import rope_tables
from stepscope.records import FORWARD
from stepscope.spec import ModelSpec

VECTORS = ("attn_norm", "qkv_bias", "post_attn_norm", "mlp_norm", "post_mlp_norm")


@dataclass(slots=True)
class Layer:
    local: bool
    attn_norm: torch.Tensor
    qkv: Linear
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # (heads + kv_heads, head_dim): q's for each head, then k's
    o: Linear
    post_attn_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Callable[[torch.Tensor], torch.Tensor]
    post_mlp_norm: torch.Tensor | None


class Decoder:
    """Takes the weights out of a dict of canonical names (see `models.tensors`): held once.

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
        self.expert_reads = Reads()
        self.layers = [
            _take_layer(spec, weights, i, products, self.expert_reads) for i in range(spec.layers)
        ]
        self.full_rope, self.local_rope = rope_tables(spec, self.embed.dtype, self.embed.device)
        self.rotated_width = (spec.heads + spec.kv_heads) * spec.head_dim
        self._embed_scale: float | None = None
        if spec.scale_embeddings:  # rounded to the weights' dtype, as Gemma was trained
            self._embed_scale = torch.tensor(spec.hidden**0.5, dtype=self.embed.dtype).item()

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        attention: Attention,
        lap: Lap,
    ) -> torch.Tensor:
        """Logits (B, vocab) of the sampled rows, for tokens and positions (T,)."""
        return self.from_embeddings(self.embedded(tokens), positions, batch, attention, lap)

    def from_embeddings(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        attention: Attention,
        lap: Lap,
    ) -> torch.Tensor:
        """The same, for what `embedded` made of the tokens (T, hidden)."""
        spec = self.spec
        size, eps = (spec.hidden,), spec.norm_eps
        full = local = self._angles(self.full_rope, positions)
        if self.local_rope is not self.full_rope:
            local = self._angles(self.local_rope, positions)
        self.expert_reads.count = None
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(F.rms_norm(x, size, layer.attn_norm, eps))
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            self._rotate(qkv, layer.qk_norm, *(local if layer.local else full))
            y = layer.o(attention(index, layer.local, qkv, batch, lap))
            if layer.post_attn_norm is not None:
                y = F.rms_norm(y, size, layer.post_attn_norm, eps)
            x = x + y
            y = layer.mlp(F.rms_norm(x, size, layer.mlp_norm, eps))
            if layer.post_mlp_norm is not None:
                y = F.rms_norm(y, size, layer.post_mlp_norm, eps)
            x = x + y
        logits = self._logits(x, batch)
        lap(FORWARD)
        return logits

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed.index_select(0, tokens)
        return x if self._embed_scale is None else x * self._embed_scale

    def plain_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Canonical names and tensors in the plain layout, one by one; those laid out are copied.

        Raises UsageError for experts and for quantized weights.
        """
        yield "embed", self.embed
        yield "final_norm", self.final_norm
        if not self.spec.tied:
            yield "head", self.head.plain()
        for index, layer in enumerate(self.layers):
            for name, tensor in _plain_layer(self.spec, layer):
                yield f"layers.{index}.{name}", tensor

    def _angles(
        self, tables: tuple[torch.Tensor, torch.Tensor], positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = tables
        return (
            cos.index_select(0, positions).unsqueeze(1),
            sin.index_select(0, positions).unsqueeze(1),
        )

    def _rotate(
        self,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        """Norm, where there is one, and rotate q and k in place."""
        spec = self.spec
        heads = spec.heads + spec.kv_heads
        # A view, not a reshape: it must write into qkv, so it raises rather than copy.
        both = qkv[:, : self.rotated_width].view(-1, heads, spec.head_dim)
        if qk_norm is not None:
            both.copy_(F.rms_norm(both, (spec.head_dim,), eps=spec.norm_eps)).mul_(qk_norm)
        rolled = both.roll(spec.head_dim // 2, -1)
        both.mul_(cos).addcmul_(rolled, sin)

    def _logits(self, x: torch.Tensor, batch: StepBatch) -> torch.Tensor:
        if batch.sampled_rows is not None:
            x = x.index_select(0, batch.sampled_rows)
        logits = self.head(F.rms_norm(x, (self.spec.hidden,), self.final_norm, self.spec.norm_eps))
        cap = self.spec.final_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


def _take_layer(
    spec: ModelSpec, weights: dict[str, torch.Tensor], index: int, products: str, reads: Reads
) -> Layer:
    layer = f"layers.{index}."

    def take(name: str) -> torch.Tensor:
        return weights.pop(layer + name)

    def mlp(prefix: str = "") -> GatedMlp:
        gate_up = Linear(take(f"{prefix}gate_up"), products)
        down = Linear(take(f"{prefix}down"), products)
        return GatedMlp(gate_up, down, ACTIVATIONS[spec.activation])

    def experts() -> RoutedExperts:
        router = Linear(take("router"), products)
        each = [mlp(f"experts.{i}.") for i in range(spec.experts)]
        return RoutedExperts(router, each, spec.experts_per_token, spec.renormalize, reads)

    return Layer(
        local=spec.is_local(index),
        attn_norm=take("attn_norm"),
        qkv=Linear(take("qkv"), products),
        qkv_bias=weights.pop(f"{layer}qkv_bias", None),
        qk_norm=_per_head(spec, take("q_norm"), take("k_norm")) if spec.qk_norm else None,
        o=Linear(take("o"), products),
        post_attn_norm=weights.pop(f"{layer}post_attn_norm", None),
        mlp_norm=take("mlp_norm"),
        mlp=experts() if spec.experts else mlp(),
        post_mlp_norm=weights.pop(f"{layer}post_mlp_norm", None),
    )


def _plain_layer(spec: ModelSpec, layer: Layer) -> Iterator[tuple[str, torch.Tensor]]:
    """The reverse of _take_layer."""
    if not isinstance(layer.mlp, GatedMlp):
        raise UsageError(f"{spec.name} has routed experts, which are not held as plain weights.")
    yield "qkv", layer.qkv.plain()
    yield "o", layer.o.plain()
    yield "gate_up", layer.mlp.gate_up.plain()
    yield "down", layer.mlp.down.plain()
    vectors = {name: getattr(layer, name) for name in VECTORS}
    if layer.qk_norm is not None:
        vectors |= {"q_norm": layer.qk_norm[0], "k_norm": layer.qk_norm[spec.heads]}
    yield from ((name, tensor) for name, tensor in vectors.items() if tensor is not None)


def _per_head(spec: ModelSpec, q_norm: torch.Tensor, k_norm: torch.Tensor) -> torch.Tensor:
    return torch.cat((q_norm.expand(spec.heads, -1), k_norm.expand(spec.kv_heads, -1)))
