"""GGUF metadata -> ModelSpec. What a file leaves out is as llama.cpp supplies it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.gguf_file import GgufFile
from stepscope.models.tokenizer import TextTokenizer
from stepscope.spec import ModelSpec, RopeScaling
from stepscope.text import listing

ROPE_DIVISORS = "rope_freqs.weight"  # Llama 3.1's scaling, worked out by the converter
# Gemma's scores are scaled by 1/sqrt(head_dim), but those of its 27B models by this; the files do
# not say, so llama.cpp tells them by their number of layers.
GEMMA_27B_SCALARS = {("gemma2", 46): 144.0, ("gemma3", 62): 168.0}
Traits = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metadata:
    """The keys of the file's own architecture."""

    file: GgufFile

    @property
    def arch(self) -> str:
        return self.file.architecture

    def whole(self, key: str, default: int | None = None) -> int:
        return int(self._value(key, int, default))

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._value(key, float, default))

    def has(self, key: str) -> bool:
        return bool(self.file.metadata.get(f"{self.arch}.{key}"))

    def _value(self, key: str, kind: type, default: Any) -> Any:
        full = f"{self.arch}.{key}"
        if default is not None and full not in self.file.metadata:
            return default
        return self.file.need(full, kind)


def spec_from_metadata(file: GgufFile, name: str, tokenizer: TextTokenizer | None) -> ModelSpec:
    """The model's shape and traits.

    Raises UsageError for an architecture or a trait that the decoder does not have, StepscopeError
    for metadata that is absent or makes no sense.
    """
    arch = file.architecture
    if arch not in TRAITS:
        raise UsageError(
            f"{file.path} has the architecture '{arch}', and {listing([*TRAITS], len(TRAITS))} are"
            " supported in GGUF files; choose one of those."
        )
    data = Metadata(file)
    hidden, heads = data.whole("embedding_length"), data.whole("attention.head_count")
    head_dim = data.whole("attention.key_length", hidden // max(heads, 1))
    _check_head(data, head_dim, data.whole("attention.value_length", head_dim))
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 1  # assemble() names it among the missing
    spec = ModelSpec(
        name=name,
        arch=arch,
        layers=data.whole("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=data.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=data.whole("feed_forward_length", 0 if data.has("expert_count") else None),
        vocab=data.whole("vocab_size", tokenizer.vocab_size if tokenizer else rows),
        max_context=data.whole("context_length"),
        rope_theta=data.real("rope.freq_base", 10000.0),
        rope=_scaling(data, head_dim),
        norm_eps=data.real("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in file.tensors,
        eos_ids=tokenizer.eos_ids if tokenizer else (),
        bos_id=tokenizer.bos_id if tokenizer else None,
        add_bos=tokenizer.add_bos if tokenizer else False,
    )
    return replace(spec, **TRAITS[arch](data, spec))


def _check_head(data: Metadata, key_length: int, value_length: int) -> None:
    rotated = data.whole("rope.dimension_count", key_length)
    if not key_length == value_length == rotated:
        raise StepscopeError(
            f"{data.file.path} has keys of {key_length}, values of {value_length} and {rotated}"
            " rotated dimensions per head, and only equal ones are supported; choose another model."
        )


def _scaling(data: Metadata, head_dim: int) -> RopeScaling | None:
    kind = data.file.metadata.get(f"{data.arch}.rope.scaling.type", "none")
    if ROPE_DIVISORS in data.file.tensors:
        return _divisors(data, head_dim)
    if kind == "none":
        older = data.real("rope.scale_linear", 1.0)
        return RopeScaling("linear", older) if older > 1 else None
    if kind not in ("linear", "yarn"):
        raise UsageError(
            f"{data.file.path} scales RoPE by '{kind}', and linear, llama3 and yarn are supported;"
            " choose a model with one of those or without scaling."
        )
    original = data.whole("rope.scaling.original_context_length", data.whole("context_length"))
    scaling = RopeScaling(kind, data.real("rope.scaling.factor"), original)
    if original < 1:
        raise StepscopeError(
            f"{data.file.path} scales RoPE from {original} positions, and it takes at least 1;"
            " convert the model again."
        )
    fast = data.real("rope.scaling.yarn_beta_fast", 32.0)
    slow = data.real("rope.scaling.yarn_beta_slow", 1.0)
    return replace(scaling, beta_fast=fast, beta_slow=slow)


def _divisors(data: Metadata, head_dim: int) -> RopeScaling:
    shape = data.file.tensors[ROPE_DIVISORS].shape
    if shape != (head_dim // 2,):
        raise StepscopeError(
            f"Tensor '{ROPE_DIVISORS}' in {data.file.path} has the shape {list(shape)} where half a"
            f" head, {head_dim // 2}, belongs; download or convert it again."
        )
    values = data.file.rows(ROPE_DIVISORS, 0, 1)[0]
    return RopeScaling("divisors", divisors=tuple(float(v) for v in values))


def _experts(data: Metadata, width: int) -> Traits:
    return {
        "experts": data.whole("expert_count"),
        "experts_per_token": data.whole("expert_used_count"),
        "intermediate": data.whole("expert_feed_forward_length", width),
    }


def _llama(data: Metadata, spec: ModelSpec) -> Traits:
    """Llama, SmolLM2, Mistral and, where there are experts, Mixtral."""
    traits: Traits = _experts(data, spec.intermediate) if data.has("expert_count") else {}
    if data.has("attention.sliding_window"):
        traits |= {"window": data.whole("attention.sliding_window"), "layer_pattern": "s"}
    return traits


def _refuse_window(data: Metadata) -> None:
    if data.has("attention.sliding_window"):
        raise UsageError(
            f"{data.file.path} uses a sliding window without saying on which layers, which is not"
            " supported; use the model's directory in Hugging Face layout."
        )


def _qwen2(data: Metadata, spec: ModelSpec) -> Traits:
    _refuse_window(data)
    return {"qkv_bias": True}


def _qwen3(data: Metadata, spec: ModelSpec) -> Traits:
    _refuse_window(data)
    return {"qk_norm": True}


def _qwen3_moe(data: Metadata, spec: ModelSpec) -> Traits:
    return {**_qwen3(data, spec), **_experts(data, spec.intermediate)}


def _gemma(data: Metadata, spec: ModelSpec, pattern: str) -> Traits:
    scalar = GEMMA_27B_SCALARS.get((data.arch, spec.layers), spec.head_dim)
    return {
        "window": data.whole("attention.sliding_window", 4096),
        "layer_pattern": pattern,
        "post_norms": True,
        "activation": "gelu_tanh",
        "scale_embeddings": True,
        "query_scale": max(scalar, 1) ** -0.5,
    }


def _gemma2(data: Metadata, spec: ModelSpec) -> Traits:
    return {
        **_gemma(data, spec, "sf"),
        "attn_softcap": data.real("attn_logit_softcapping", 50.0),
        "final_softcap": data.real("final_logit_softcapping", 30.0),
    }


def _gemma3(data: Metadata, spec: ModelSpec) -> Traits:
    final = data.real("final_logit_softcapping", 0.0)
    return {
        **_gemma(data, spec, "sssssf"),
        "qk_norm": True,
        "rope_theta": data.real("rope.freq_base", 1e6),
        "local_rope_theta": data.real("rope.freq_base_swa", 10000.0),
        "final_softcap": final or None,
    }


TRAITS: dict[str, Callable[[Metadata, ModelSpec], Traits]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
}
