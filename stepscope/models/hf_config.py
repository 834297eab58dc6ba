"""config.json in Hugging Face layout -> ModelSpec, for the families the decoder covers.

Defaults of absent keys are those of transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.hf_tokenizer import eos_ids_of
from stepscope.models.rope import SCALINGS
from stepscope.models.shapes import MOST_LAYERS
from stepscope.models.tokenizer import TextTokenizer
from stepscope.spec import ModelSpec, RopeScaling
from stepscope.text import listing

ABSENT = object()  # stands for a key that must be there
MOST = 2**48  # far beyond any size or base, yet a float holds every whole number up to it
HEAD_DIMS = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256}  # elsewhere hidden / heads
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
SLIDING, FULL = "sliding_attention", "full_attention"
Traits = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Config:
    """config.json, or a section of it, read value by value; null is as good as absent."""

    path: Path
    values: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def whole(self, key: str, default: Any = ABSENT) -> int:
        return int(self._number(key, int, default))

    def real(self, key: str, default: Any = ABSENT) -> float:
        return float(self._number(key, int | float, default))

    def optional(self, key: str, default: float | None = None) -> float | None:
        """None where the key is there and null: so a trait is switched off."""
        if key in self.values and self.values[key] is None:
            return None
        return default if key not in self.values else self.real(key)

    def section(self, *keys: str) -> Config:
        """The objects of these names laid over one another; empty where there are none."""
        found = [self.values.get(key) for key in keys]
        merged: dict[str, Any] = {}
        for value in found:
            merged |= value if isinstance(value, dict) else {}
        return Config(self.path, merged)

    def wrong(self, key: str, belongs: str, value: Any = None) -> StepscopeError:
        found = self.get(key, ABSENT) if value is None else value
        return StepscopeError(
            f"{self.path / 'config.json'} has {'no' if found is ABSENT else repr(found) + ' as'}"
            f" {key} where {belongs} belongs; download it again."
        )

    def _number(self, key: str, kind: Any, default: Any) -> Any:
        value = self.get(key, default)
        number = isinstance(value, kind) and not isinstance(value, bool)
        if not number or not abs(value) < MOST:  # so that NaN fails, too
            raise self.wrong(key, "a number", value)
        return value


def spec_from_config(
    path: Path, values: dict[str, Any], tokenizer: TextTokenizer | None
) -> ModelSpec:
    """The model's shape and traits.

    Raises UsageError, naming it, for an architecture or a trait that the decoder does not have,
    and StepscopeError for a value that is no number where one belongs.
    """
    config = Config(path, values)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in TRAITS:
        raise UsageError(
            f"{path} has the model_type '{kind}', and {listing([*TRAITS], len(TRAITS))} are"
            " supported; choose one of those."
        )
    _check_supported(config)
    bos = config.get("bos_token_id")
    heads, hidden = config.whole("num_attention_heads"), config.whole("hidden_size")
    theta, scaling = _rope(config, FULL)
    spec = ModelSpec(
        name=path.resolve().name,
        arch=kind,
        layers=config.whole("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=config.whole("num_key_value_heads", heads),
        head_dim=config.whole("head_dim", HEAD_DIMS.get(kind, hidden // max(heads, 1))),
        intermediate=config.whole("intermediate_size"),
        vocab=config.whole("vocab_size"),
        max_context=config.whole("max_position_embeddings"),
        rope_theta=theta,
        rope=scaling,
        norm_eps=config.real("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        eos_ids=tokenizer.eos_ids if tokenizer else eos_ids_of(path, values),
        bos_id=tokenizer.bos_id if tokenizer else bos,
        add_bos=tokenizer.add_bos if tokenizer else False,
    )
    return replace(spec, **TRAITS[kind](config))


def _check_supported(config: Config) -> None:
    activation = config.get("hidden_activation", config.get("hidden_act", "silu"))
    rope = config.section("rope_parameters", "rope_scaling")
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    for present, what in (
        (partial != 1.0, "a partial rotation"),
        (config.get("attention_bias") or config.get("mlp_bias"), "biases beside those of Qwen 2"),
        (activation not in list(ACTIVATIONS), f"the activation {activation}"),
        (config.get("quantization_config"), "quantized weights"),
        (config.get("use_bidirectional_attention"), "attention in both directions"),
    ):
        if present:
            raise UsageError(
                f"{config.path} uses {what}, which is not supported; choose a model without it."
            )


def _rope(config: Config, layers: str) -> tuple[float, RopeScaling | None]:
    """(theta, scaling) of layers of this type; older files have them beside each other."""
    rope = config.section("rope_scaling", "rope_parameters")
    if isinstance(rope.get(layers), dict):
        rope = rope.section(layers)
    theta = rope.real("rope_theta", config.get("rope_theta", 10000.0))
    if theta <= 1:
        raise rope.wrong("rope_theta", "a number above 1")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind not in SCALINGS:
        raise UsageError(
            f"{config.path} scales RoPE by '{kind}', and {listing([*SCALINGS])} are supported;"
            " choose a model with one of those or without scaling."
        )
    return theta, _scaling(kind, rope, config.whole("max_position_embeddings"))


def _scaling(kind: str, rope: Config, max_context: int) -> RopeScaling:
    original = rope.whole("original_max_position_embeddings", max_context)
    scaling = RopeScaling(kind, rope.real("factor", max_context / max(original, 1)), original)
    if scaling.factor < 1 or original < 1:
        raise rope.wrong("factor", "a number of at least 1, over a context of at least 1,")
    if kind == "llama3":
        low, high = rope.real("low_freq_factor"), rope.real("high_freq_factor")
        if high <= low:
            raise rope.wrong("high_freq_factor", "a number above low_freq_factor")
        return replace(scaling, low_freq=low, high_freq=high)
    if kind == "yarn":
        if rope.get("truncate") is False:
            raise UsageError(
                f"{rope.path} scales RoPE by yarn without rounding its bounds (truncate), which is"
                " not supported; choose a model without it."
            )
        return replace(
            scaling,
            beta_fast=rope.real("beta_fast", 32.0),
            beta_slow=rope.real("beta_slow", 1.0),
            attention=_yarn_attention(rope, scaling.factor),
        )
    return scaling


def _yarn_attention(rope: Config, factor: float) -> float | None:
    """The file's own factor of cos and sin, DeepSeek's two exponents, or None: YaRN's formula."""
    told = rope.optional("attention_factor")
    if told is not None:
        return told
    above, below = rope.real("mscale", 0.0), rope.real("mscale_all_dim", 0.0)
    if not (above and below):
        return None
    grown = 0.1 * math.log(factor)
    return (above * grown + 1) / (below * grown + 1)


def _window(config: Config, default: float | None, pattern: str) -> Traits:
    """layer_types, where a file has them, over the family's own pattern of layers."""
    window = config.optional("sliding_window", default)
    if window is None:
        return {}
    if window < 1 or window != int(window):
        raise config.wrong("sliding_window", "a whole number above 0")
    types = config.get("layer_types")
    if types is not None:
        known = isinstance(types, list) and all(t in (SLIDING, FULL) for t in types)
        if not known or len(types) != config.whole("num_hidden_layers"):
            raise config.wrong("layer_types", f"{SLIDING} or {FULL} for each layer")
        pattern = "".join("s" if t == SLIDING else "f" for t in types)
    return {"window": int(window), "layer_pattern": pattern}


def _plain(config: Config) -> Traits:
    return {}


def _mistral(config: Config) -> Traits:
    return _window(config, 4096, "s")


def _mixtral(config: Config) -> Traits:
    return {
        **_window(config, None, "s"),
        "experts": config.whole("num_local_experts", 8),
        "experts_per_token": config.whole("num_experts_per_tok", 2),
    }


def _qwen_window(config: Config) -> Traits:
    """Only where it is switched on, and then from a layer on (Qwen2Config)."""
    if not config.get("use_sliding_window"):
        return {}
    layers = min(config.whole("num_hidden_layers"), MOST_LAYERS)
    full = min(max(config.whole("max_window_layers", 28), 0), layers)
    return _window(config, 4096, "f" * full + "s" * (layers - full))


def _qwen2(config: Config) -> Traits:
    return {"qkv_bias": True, **_qwen_window(config)}


def _qwen3(config: Config) -> Traits:
    return {"qk_norm": True, **_qwen_window(config)}


def _qwen3_moe(config: Config) -> Traits:
    if config.get("mlp_only_layers") or config.whole("decoder_sparse_step", 1) != 1:
        raise UsageError(
            f"{config.path} mixes layers with experts and layers without (mlp_only_layers or"
            " decoder_sparse_step), which is not supported; choose a model without it."
        )
    window = _window(config, 4096, "s") if config.get("use_sliding_window") else {}
    return {
        **window,
        "qk_norm": True,
        "intermediate": config.whole("moe_intermediate_size", 768),
        "experts": config.whole("num_experts", config.get("num_local_experts", 128)),
        "experts_per_token": config.whole("num_experts_per_tok", 8),
        "renormalize": bool(config.get("norm_topk_prob", False)),
    }


def _gemma(config: Config, pattern: str) -> Traits:
    scalar = config.real("query_pre_attn_scalar", 256)
    if scalar <= 0:
        raise config.wrong("query_pre_attn_scalar", "a number above 0")
    activation = config.get("hidden_activation", config.get("hidden_act", "gelu_pytorch_tanh"))
    return {
        **_window(config, 4096, pattern),
        "post_norms": True,
        "activation": ACTIVATIONS[activation],
        "scale_embeddings": True,
        "query_scale": scalar**-0.5,
    }


def _gemma2(config: Config) -> Traits:
    return {
        **_gemma(config, "sf"),
        "attn_softcap": config.optional("attn_logit_softcapping", 50.0),
        "final_softcap": config.optional("final_logit_softcapping", 30.0),
    }


def _gemma3(config: Config) -> Traits:
    every = config.whole("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    if not 1 <= every <= 1000:
        raise config.wrong("sliding_window_pattern", "a number of layers")
    older = config.real("rope_local_base_freq", 10000.0)
    nested = config.section("rope_parameters").get(SLIDING)
    theta, scaling = _rope(config, SLIDING) if isinstance(nested, dict) else (older, None)
    if scaling:
        raise UsageError(
            f"{config.path} scales RoPE on its sliding layers, which is not supported; choose a"
            " model without it."
        )
    newer = isinstance(config.section("rope_parameters").get(FULL), dict)
    base = {} if newer else {"rope_theta": config.real("rope_theta", 1e6)}
    return {
        **_gemma(config, "s" * (every - 1) + "f"),
        **base,
        "qk_norm": True,
        "local_rope_theta": theta,
        "attn_softcap": config.optional("attn_logit_softcapping"),
        "final_softcap": config.optional("final_logit_softcapping"),
    }


TRAITS: dict[str, Callable[[Config], Traits]] = {
    "llama": _plain,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
}
