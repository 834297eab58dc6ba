"""Random weights in the shape of a public model: for timing without the weights themselves."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from difflib import get_close_matches
from importlib import resources
from typing import Any

import torch

from stepscope.errors import UsageError
from stepscope.models.packed import quantized
from stepscope.models.quantize import weight_format
from stepscope.models.shapes import DIMENSIONS, check_shape
from stepscope.models.tensors import (
    CPU,
    TORCH_DTYPES,
    check_memory,
    plan_bytes,
    stacked_shape,
    tensor_plan,
)
from stepscope.spec import ELEMENT_BYTES, QUANTIZED, ModelSpec, RopeScaling, compute_dtype
from stepscope.text import listing, plural, size

FAMILIES = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3")
# Why the decoder cannot take the shape of the others.
LACKS = {
    "deepseek_v3": "multi-head latent attention and experts that are shared or chosen in groups",
    "gpt2": "layer norms and learned positions",
    "gptneox": "layer norms, a parallel residual and partly rotated heads",
    "gpt_oss": "attention sinks and experts with biases and clamped activations",
    "llama4": "layers without RoPE, chunked attention and a shared expert",
    "phi3": "projections that are stored fused",
}
LOCAL_ROPE_THETA = 10000.0  # Gemma 3, which its configurations leave to the code
OVERRIDES = (*DIMENSIONS, "experts", "experts_per_token")
GENERIC = "llama"
GENERIC_SPEC = ModelSpec(
    name="dummy:llama",
    arch="llama",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    head_dim=64,
    intermediate=768,
    vocab=4096,
    max_context=8192,
)
BLOCK = 2**22 - 3  # a prime: repeated end to end, no two rows of a matrix come out the same
SPREAD = 0.02  # standard deviation: activations stay finite through any number of layers


def dummy_spec(name: str, overrides: dict[str, int]) -> ModelSpec:
    """The shape behind `dummy:NAME`, with some of its dimensions changed.

    Raises UsageError for an unknown or unsupported name and for dimensions that do not fit.
    """
    wanted = name.partition(":")[2]
    spec = replace(_known(wanted), name=name)
    unknown = [key for key in overrides if key not in OVERRIDES]
    if unknown:
        raise UsageError(
            f"A dummy model has no dimension '{unknown[0]}'; choose from"
            f" {listing([*OVERRIDES], most=len(OVERRIDES))}."
        )
    spec = spec.resized(**overrides)
    check_shape(spec)
    return spec


def random_weights(
    spec: ModelSpec,
    dtype: str,
    seed: int,
    progress: Callable[[str], None] | None = None,
    device: torch.device = CPU,
) -> dict[str, torch.Tensor]:
    """Canonical weights, normal with standard deviation 0.02, norms 1; the same for a seed.

    They are drawn on the device, and another kind of device draws other numbers. Drawing billions
    takes minutes, so a block of 4 million is drawn and repeated.
    Raises StepscopeError before allocating if they do not fit in memory.
    """
    plan = tensor_plan(spec)
    check_memory(spec.name, plan, dtype, device)
    floats = TORCH_DTYPES[compute_dtype(dtype)]
    block = _normal(seed, device).to(floats)
    weights: dict[str, Any] = {}
    at = 0
    for done, (name, parts) in enumerate(plan.items(), start=1):
        tensor = torch.empty(stacked_shape(parts), dtype=floats, device=device)
        if name.endswith("_norm"):
            tensor.fill_(1.0)
        else:
            at = _fill_from(block, at, tensor.view(-1))
        form = weight_format(name, tuple(tensor.shape), dtype)
        weights[name] = quantized(tensor, form) if form in QUANTIZED else tensor
        if progress:
            progress(f"Making {spec.name}: {done} of {plural(len(plan), 'tensor')}")
    return weights


def _normal(seed: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.empty(BLOCK, device=device).normal_(0, SPREAD, generator=generator)


def _fill_from(block: torch.Tensor, at: int, values: torch.Tensor) -> int:
    """Fill `values` with the block, starting in it at `at`; returns where it was left."""
    done = 0
    while done < len(values):
        count = min(len(values) - done, len(block) - at)
        values[done : done + count] = block[at : at + count]
        done, at = done + count, (at + count) % len(block)
    return at


def dummy_names() -> list[str]:
    """Names that work after `dummy:`, the generic one first."""
    return [GENERIC, *(name for name, facts in _configs().items() if not _lacking(facts))]


def described() -> list[tuple[str, str]]:
    """(name, one line) of the generic dummy and of every public model whose shape is known."""
    return [
        (f"dummy:{GENERIC}", f"{_weight(GENERIC_SPEC)}, made to be reshaped"),
        *((f"dummy:{name}", _line(name, facts)) for name, facts in _configs().items()),
    ]


def _line(name: str, facts: dict[str, Any]) -> str:
    lacking = _lacking(facts)
    return f"not supported: {lacking}" if lacking else _weight(_from_facts(name, facts))


def _weight(spec: ModelSpec) -> str:
    taken = plan_bytes(tensor_plan(spec), "bf16")
    number = taken / ELEMENT_BYTES["bf16"]
    count = f"{number / 1e9:.1f} B" if number >= 1e9 else f"{number / 1e6:.0f} M"
    experts = f", {spec.experts_per_token} of {spec.experts} experts" if spec.experts else ""
    return f"{spec.arch}, {count} random weights{experts}, {size(taken)} in bf16"


def _known(wanted: str) -> ModelSpec:
    if wanted.lower() == GENERIC:
        return GENERIC_SPEC
    configs = _configs()
    by_lower = {name.lower(): name for name in configs}
    if wanted.lower() not in by_lower:
        names = {name.lower(): name for name in dummy_names()}
        near = get_close_matches(wanted.lower(), names, n=3, cutoff=0.4)
        shown = [names[n] for n in near] or dummy_names()
        raise UsageError(f"There is no dummy model '{wanted}'; the nearest are {listing(shown)}.")
    name = by_lower[wanted.lower()]
    lacking = _lacking(configs[name])
    if lacking:
        raise UsageError(
            f"{name} is of the family {configs[name]['family']}, which is not supported, as it has"
            f" {lacking}; choose one such as {listing(dummy_names(), 3)}."
        )
    return _from_facts(name, configs[name])


def _configs() -> dict[str, Any]:
    text = resources.files("stepscope").joinpath("data/model_configs.json").read_text("utf-8")
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def _lacking(facts: dict[str, Any]) -> str:
    """What the decoder would need and does not have; '' where it has all."""
    family = facts["family"]
    return "" if family in FAMILIES else LACKS.get(family, f"an architecture of its own ({family})")


def _from_facts(name: str, facts: dict[str, Any]) -> ModelSpec:
    """The scores' scale is left out where it is not 1/sqrt(head_dim): it costs nothing."""
    window = facts["sliding_window"]
    moe = facts["moe"] or {"experts": 0, "top_k": 0, "norm_topk_prob": True}
    return ModelSpec(
        name=name,
        arch=facts["family"],
        layers=facts["layers"],
        hidden=facts["hidden"],
        heads=facts["heads"],
        kv_heads=facts["kv_heads"],
        head_dim=facts["head_dim"],
        intermediate=moe.get("expert_intermediate", facts["intermediate"]),
        vocab=facts["vocab"],
        max_context=facts["max_position"],
        rope_theta=facts["rope_theta"],
        norm_eps=facts["norm_eps"],
        tied=facts["tied_embeddings"],
        rope=_rope(facts["rope_scaling"]),
        window=window,
        layer_pattern=facts["layer_types"] or ("s" if window else "f"),
        local_rope_theta=LOCAL_ROPE_THETA if facts["family"] == "gemma3" else None,
        qkv_bias=facts["qkv_bias"],
        qk_norm=facts["qk_norm"],
        post_norms=facts["post_norms"],
        activation="gelu_tanh" if facts["act"].startswith("gelu_tanh") else "silu",
        scale_embeddings=facts["embed_scale"],
        attn_softcap=facts["attn_softcap"],
        final_softcap=facts["final_softcap"],
        experts=moe["experts"],
        experts_per_token=moe["top_k"],
        renormalize=moe["norm_topk_prob"] is not False,
    )


def _rope(facts: dict[str, Any] | None) -> RopeScaling | None:
    if facts is None:
        return None
    return RopeScaling(
        kind=facts["rope_type"],
        factor=facts["factor"],
        original=facts.get("original_max_position_embeddings", 0),
        low_freq=facts.get("low_freq_factor", 1.0),
        high_freq=facts.get("high_freq_factor", 4.0),
    )
