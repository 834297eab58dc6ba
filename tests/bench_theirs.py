"""transformers as the bench runs it: the same weights, its caches, its way of compiling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepscope.models.load import LoadedModel


def hugging_face(model: LoadedModel) -> Any:
    """The same weights in transformers' LlamaForCausalLM; the fused tensors are split as views."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied,
        attn_implementation="sdpa",
    )
    other = LlamaForCausalLM(config)
    other.load_state_dict(_state(model), assign=True)
    return other.eval()


def _state(model: LoadedModel) -> dict[str, torch.Tensor]:
    spec, w = model.spec, model.weights
    q, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    state = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["final_norm"]}
    state["lm_head.weight"] = w.get("head", w["embed"])
    for i in range(spec.layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        for name, part in zip("qkv", w[here + "qkv"].split([q, k, k]), strict=True):
            state[f"{there}self_attn.{name}_proj.weight"] = part
        gate, up = w[here + "gate_up"].chunk(2)
        state[f"{there}mlp.gate_proj.weight"], state[f"{there}mlp.up_proj.weight"] = gate, up
        state[f"{there}mlp.down_proj.weight"] = w[here + "down"]
        state[f"{there}self_attn.o_proj.weight"] = w[here + "o"]
        state[f"{there}input_layernorm.weight"] = w[here + "attn_norm"]
        state[f"{there}post_attention_layernorm.weight"] = w[here + "mlp_norm"]
    return state


class Decoding:
    """Greedy steps from a context of `context` tokens on; `back` returns to it.

    One prompt is prefilled and repeated: only the size of the cache matters here.
    """

    def __init__(self, model: Any, batch: int, context: int) -> None:
        self._call: Callable[..., Any] = model
        with torch.inference_mode():
            prompt = torch.randint(5, 1000, (1, context - 1))
            self._prefill(model, prompt, batch)
        self._done = 0

    def _prefill(self, model: Any, prompt: torch.Tensor, batch: int) -> None:
        first = model(prompt, use_cache=True, logits_to_keep=1)
        self._token = first.logits[:, -1].argmax(-1, keepdim=True).repeat(batch, 1)
        self._cache = first.past_key_values
        self._cache.batch_repeat_interleave(batch)

    @torch.inference_mode()
    def step(self) -> None:
        """The token is read back, as a stop has to be seen."""
        out = self._call(self._token, past_key_values=self._cache, use_cache=True)
        self._token = out.logits[:, -1].argmax(-1, keepdim=True)
        self._token.tolist()
        self._done += 1

    @torch.inference_mode()
    def back(self) -> None:
        self._cache.crop(-self._done)
        self._done = 0


class CompiledDecoding(Decoding):
    """With a static cache of just the length and its forward compiled, in torch's default mode.

    This is what its documentation advises; "reduce-overhead" is for CUDA and falls back to the
    default mode here. Every batch and length is compiled by itself.
    """

    def __init__(self, model: Any, batch: int, context: int, room: int) -> None:
        self._room = room
        super().__init__(model, batch, context)
        torch._dynamo.reset()
        self._call = torch.compile(model.forward, fullgraph=True, dynamic=False)
        self.step()
        self.back()

    def _prefill(self, model: Any, prompt: torch.Tensor, batch: int) -> None:
        from transformers import StaticCache

        super()._prefill(model, prompt, batch)
        tokens = prompt.shape[1]
        static = StaticCache(config=model.config, max_cache_len=tokens + 1 + self._room)
        for layer, filled in zip(static.layers, self._cache.layers, strict=True):
            layer.update(filled.keys, filled.values)
        self._cache = static
