"""The families' checkpoints again as GGUF files: the same weights, the same traits.

Names come from the `gguf` package's own map, the rest from what convert_hf_to_gguf.py does: q and k
rows interleaved for the architecture llama, experts stacked, one added to Gemma's norms, the llama3
scaling written as divisors.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from stepscope.errors import StepscopeError
from stepscope.models.load import load_model
from stepscope.models.rope import inverse_frequencies
from stepscope.spec import ModelSpec
from tests import tiny_llama as tiny
from tests.engine.families import FAMILIES, LLAMA3, Family, make

Array = tiny.Array
NOT_IN_GGUF = ("Qwen 2: window 13 from layer 1", "Qwen 3 MoE: shares as they are")
ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
WRITTEN = [family for family in FAMILIES if family.name not in NOT_IN_GGUF]


def converted(family: Family, spec: ModelSpec, weights: dict[str, Array]) -> dict[str, Array]:
    names = gguf.get_tensor_name_map(ARCHITECTURES[family.gguf], spec.layers)
    out: dict[str, Array] = {}
    for name, array in stacked(weights, spec.experts).items():
        if family.gguf == "llama" and ("q_proj" in name or "k_proj" in name):
            array = tiny.interleaved(array, spec.heads if "q_proj" in name else spec.kv_heads)
        if family.gguf.startswith("gemma") and "norm" in name:
            array = array + 1
        found = names.get_name(name, (".weight", ".bias"))
        assert found is not None, name
        out[found] = array
    return out


def stacked(weights: dict[str, Array], experts: int) -> dict[str, Array]:
    """experts.0.w1, experts.1.w1, ... -> experts.w1 (experts, out, in)."""
    out = {n: w for n, w in weights.items() if ".experts." not in n}
    for name in weights:
        if ".experts.0." in name:
            each = [weights[name.replace(".experts.0.", f".experts.{i}.")] for i in range(experts)]
            out[name.replace(".experts.0.", ".experts.")] = np.stack(each)
    return out


def llama3_divisors(head_dim: int, theta: float) -> Array:
    rope = LLAMA3["rope_parameters"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    old, factor = rope["original_max_position_embeddings"], rope["factor"]
    divisors = []
    for i in range(0, head_dim, 2):
        length = 2 * math.pi * theta ** (i / head_dim)
        if length < old / high:
            divisors.append(1.0)
        elif length > old / low:
            divisors.append(factor)
        else:
            smooth = (old / length - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


def metadata(family: Family, spec: ModelSpec) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "block_count": spec.layers,
        "embedding_length": spec.hidden,
        "attention.head_count": spec.heads,
        "attention.head_count_kv": spec.kv_heads,
        "attention.key_length": spec.head_dim,
        "attention.value_length": spec.head_dim,
        "feed_forward_length": family.config.get("intermediate_size", 80),
        "context_length": spec.max_context,
        "rope.freq_base": spec.rope_theta,
        "attention.layer_norm_rms_epsilon": spec.norm_eps,
    }
    if spec.experts:
        keys |= {"expert_count": spec.experts, "expert_used_count": spec.experts_per_token}
        keys["expert_feed_forward_length"] = spec.intermediate
    if spec.window:
        keys["attention.sliding_window"] = spec.window
    if spec.rope and spec.rope.kind != "llama3":
        keys["rope.scaling.type"] = spec.rope.kind
        keys["rope.scaling.factor"] = spec.rope.factor
        keys["rope.scaling.original_context_length"] = spec.rope.original
    if spec.attn_softcap:
        keys["attn_logit_softcapping"] = spec.attn_softcap
        keys["final_logit_softcapping"] = spec.final_softcap
    if spec.local_rope_theta:
        keys["rope.freq_base_swa"] = spec.local_rope_theta
    return {f"{family.gguf}.{key}": value for key, value in keys.items()}


@pytest.fixture(scope="module", params=WRITTEN, ids=str)
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, the directory's model, the tensors and metadata of the GGUF file)."""
    folder: Path = tmp_path_factory.mktemp("family")
    family = replace(request.param, config=dict(request.param.config))
    if family.gguf.startswith("gemma"):  # GGUF has no query_pre_attn_scalar: it is head_dim
        family.config["query_pre_attn_scalar"] = family.config["head_dim"]
    make(family, folder)
    as_hf = load_model(str(folder), "fp32")
    weights = load_file(folder / "model.safetensors")
    tensors = converted(family, as_hf.spec, weights)
    if as_hf.spec.rope and as_hf.spec.rope.kind == "llama3":
        tensors["rope_freqs.weight"] = llama3_divisors(as_hf.spec.head_dim, as_hf.spec.rope_theta)
    return family, as_hf, tensors, folder


def written(folder: Path, family: Family, spec: ModelSpec, tensors: dict[str, Array]) -> Path:
    keys = dict.fromkeys(tiny.METADATA) | metadata(family, spec)
    return tiny.write_gguf(folder / "model.gguf", tensors, keys, family.gguf)


def test_weights_and_traits_are_the_same(files: Any) -> None:
    family, as_hf, tensors, folder = files
    as_gguf = load_model(str(written(folder, family, as_hf.spec, tensors)), "fp32")
    assert as_gguf.weights.keys() == as_hf.weights.keys()
    for name, tensor in as_hf.weights.items():
        assert torch.equal(as_gguf.weights[name], tensor), name
    ours, theirs = as_gguf.spec, as_hf.spec
    frequencies = [inverse_frequencies(s.head_dim, s.rope_theta, s.rope) for s in (ours, theirs)]
    torch.testing.assert_close(*frequencies)
    named = {"name": "", "arch": "", "rope": None, "eos_ids": (), "bos_id": None}
    ours, theirs = replace(ours, **named), replace(theirs, **named)
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)
    pattern = [ours.is_local(i) for i in range(ours.layers)]
    assert pattern == [theirs.is_local(i) for i in range(theirs.layers)]
    same = {"layer_pattern": "f", "norm_eps": 1e-6}
    assert replace(ours, **same) == replace(theirs, **same)


def test_a_missing_tensor_is_named(files: Any) -> None:
    family, as_hf, tensors, folder = files
    for name in [n for n in tensors if n.startswith("blk.1.")]:
        rest = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(StepscopeError, match=name):
            load_model(str(written(folder, family, as_hf.spec, rest)), "fp32")
