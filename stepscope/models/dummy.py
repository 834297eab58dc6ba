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
from stepscope.models.tensors import TORCH_DTYPES, check_memory, stacked_shape, tensor_plan
from stepscope.spec import ModelSpec
from stepscope.text import listing, plural

FAMILIES = ("llama", "mistral")
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
OVERRIDABLE = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context"),
)
SPREAD = 0.02  # standard deviation: activations stay finite through any number of layers


def dummy_spec(name: str, overrides: dict[str, int]) -> ModelSpec:
    """The shape behind `dummy:NAME`, with some of its dimensions changed.

    Raises UsageError for an unknown or unsupported name and for dimensions that do not fit.
    """
    wanted = name.partition(":")[2]
    spec = replace(_known(wanted), name=name)
    unknown = [key for key in overrides if key not in OVERRIDABLE]
    if unknown:
        raise UsageError(
            f"A dummy model has no dimension '{unknown[0]}'; choose from"
            f" {listing([*OVERRIDABLE], most=len(OVERRIDABLE))}."
        )
    spec = spec.resized(**overrides)
    _check_shape(spec)
    return spec


def random_weights(
    spec: ModelSpec, dtype: str, seed: int, progress: Callable[[str], None] | None = None
) -> dict[str, torch.Tensor]:
    """Canonical weights, normal with standard deviation 0.02, norms 1; the same for a seed.

    Raises StepscopeError before allocating if they do not fit in memory.
    """
    plan = tensor_plan(spec)
    check_memory(spec.name, plan, dtype)
    draw = torch.Generator().manual_seed(seed)
    weights = {}
    for done, (name, parts) in enumerate(plan.items(), start=1):
        tensor = torch.empty(stacked_shape(parts), dtype=TORCH_DTYPES[dtype])
        norm = name.endswith("_norm")
        weights[name] = tensor.fill_(1.0) if norm else tensor.normal_(0, SPREAD, generator=draw)
        if progress:
            progress(f"Making {spec.name}: {done} of {plural(len(plan), 'tensor')}")
    return weights


def dummy_names() -> list[str]:
    """Names that work after `dummy:`, the generic one first."""
    return [GENERIC, *(name for name, facts in _configs().items() if _is_supported(facts))]


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
    if not _is_supported(configs[name]):
        raise UsageError(
            f"{name} is of the family {configs[name]['family']}, and dummies of the Llama family"
            f" with full attention are supported; choose one such as {listing(dummy_names(), 3)}."
        )
    return _from_facts(name, configs[name])


def _configs() -> dict[str, Any]:
    text = resources.files("stepscope").joinpath("data/model_configs.json").read_text("utf-8")
    models: dict[str, Any] = json.loads(text)["models"]
    return models


def _is_supported(facts: dict[str, Any]) -> bool:
    return facts["family"] in FAMILIES and not facts["sliding_window"]


def _from_facts(name: str, facts: dict[str, Any]) -> ModelSpec:
    """Scaled RoPE is left out: it changes angles, not the bytes or FLOPs of a step."""
    return ModelSpec(
        name=name,
        arch="llama",
        layers=facts["layers"],
        hidden=facts["hidden"],
        heads=facts["heads"],
        kv_heads=facts["kv_heads"],
        head_dim=facts["head_dim"],
        intermediate=facts["intermediate"],
        vocab=facts["vocab"],
        max_context=facts["max_position"],
        rope_theta=facts["rope_theta"],
        norm_eps=facts["norm_eps"],
        tied=facts["tied_embeddings"],
    )


def _check_shape(spec: ModelSpec) -> None:
    for key in OVERRIDABLE:
        value = getattr(spec, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"{key} of {spec.name} is {value}; give a whole number above 0.")
    if spec.heads % spec.kv_heads:
        raise UsageError(
            f"{spec.name} would have {spec.heads} heads on {spec.kv_heads} kv_heads; make heads a"
            " multiple of kv_heads."
        )
    if spec.head_dim % 2:
        raise UsageError(
            f"{spec.name} would have a head_dim of {spec.head_dim}; RoPE turns pairs, so make it"
            " even."
        )
