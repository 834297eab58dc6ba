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
from stepscope.models.tensors import (
    DIMENSIONS,
    TORCH_DTYPES,
    check_memory,
    check_shape,
    stacked_shape,
    tensor_plan,
)
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
BLOCK = 2**22 - 3  # a prime: repeated end to end, no two rows of a matrix come out the same
SPREAD = 0.02  # standard deviation: activations stay finite through any number of layers


def dummy_spec(name: str, overrides: dict[str, int]) -> ModelSpec:
    """The shape behind `dummy:NAME`, with some of its dimensions changed.

    Raises UsageError for an unknown or unsupported name and for dimensions that do not fit.
    """
    wanted = name.partition(":")[2]
    spec = replace(_known(wanted), name=name)
    unknown = [key for key in overrides if key not in DIMENSIONS]
    if unknown:
        raise UsageError(
            f"A dummy model has no dimension '{unknown[0]}'; choose from"
            f" {listing([*DIMENSIONS], most=len(DIMENSIONS))}."
        )
    spec = spec.resized(**overrides)
    check_shape(spec)
    return spec


def random_weights(
    spec: ModelSpec, dtype: str, seed: int, progress: Callable[[str], None] | None = None
) -> dict[str, torch.Tensor]:
    """Canonical weights, normal with standard deviation 0.02, norms 1; the same for a seed.

    Drawing billions of numbers takes minutes, so a block of 4 million is drawn and repeated.
    Raises StepscopeError before allocating if they do not fit in memory.
    """
    plan = tensor_plan(spec)
    check_memory(spec.name, plan, dtype)
    block = torch.empty(BLOCK).normal_(0, SPREAD, generator=torch.Generator().manual_seed(seed))
    block = block.to(TORCH_DTYPES[dtype])
    weights: dict[str, torch.Tensor] = {}
    at = 0
    for done, (name, parts) in enumerate(plan.items(), start=1):
        tensor = torch.empty(stacked_shape(parts), dtype=TORCH_DTYPES[dtype])
        weights[name] = tensor
        if name.endswith("_norm"):
            tensor.fill_(1.0)
        else:
            at = _fill_from(block, at, tensor.view(-1))
        if progress:
            progress(f"Making {spec.name}: {done} of {plural(len(plan), 'tensor')}")
    return weights


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
