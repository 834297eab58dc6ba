"""A model in a directory of Hugging Face layout: config.json and safetensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.hf_config import spec_from_config
from stepscope.models.hf_tokenizer import json_object, tokenizer_from_directory
from stepscope.models.tensors import Shape
from stepscope.models.tokenizer import TextTokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm.weight",
    **{part: f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
}
# Gemma's post_attention_layernorm comes after attention; elsewhere it is the one before the MLP.
GEMMA = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}
MIXTRAL = {"router": "block_sparse_moe.gate.weight"}
EXPERTS = "mlp.experts.{index}.{part}_proj.weight"
MIXTRAL_EXPERTS = "block_sparse_moe.experts.{index}.{part}.weight"
MIXTRAL_PARTS = {"gate": "w1", "up": "w3", "down": "w2"}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies, and how."""

    file: Path
    dtype: str
    shape: Shape


class HfModel:
    """WeightSource over a directory (models/tensors.py)."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError or StepscopeError if it is not a model that can be loaded."""
        self.path = path
        self.label = str(path)
        if not (path / "config.json").is_file():
            raise UsageError(f"{path} has no config.json; give a directory in Hugging Face layout.")
        config = json_object(path / "config.json")
        self.tokenizer: TextTokenizer | None = tokenizer_from_directory(path, config)
        self.spec = spec_from_config(path, config, self.tokenizer)
        arch = self.spec.arch
        self._layer = LAYER | (GEMMA if self.spec.post_norms else {})
        self._layer |= MIXTRAL if arch == "mixtral" else {}
        self._norm_offset = 1.0 if arch.startswith("gemma") else 0.0  # it stores the norm less one
        self._stored: dict[str, _Stored] = {}
        for file in _weight_files(path):
            self._stored |= _contents(file)

    def file_name(self, part: str) -> str:
        if part in TOP:
            return TOP[part]
        _, index, name = part.split(".", 2)
        return f"model.layers.{index}.{self._in_layer(name)}"

    def _in_layer(self, name: str) -> str:
        if not name.startswith("experts."):
            return self._layer[name]
        _, index, part = name.split(".")
        if self.spec.arch == "mixtral":
            return MIXTRAL_EXPERTS.format(index=index, part=MIXTRAL_PARTS[part])
        return EXPERTS.format(index=index, part=part)

    def shapes(self) -> dict[str, Shape]:
        return {
            name: stored.shape
            for name, stored in self._stored.items()
            if not self._carries_nothing(name)
        }

    def _carries_nothing(self, name: str) -> bool:
        """Old checkpoints store RoPE's frequencies, and tied ones their head a second time."""
        repeated_head = self.spec.tied and name == TOP["head"]
        return repeated_head or name.endswith("rotary_emb.inv_freq")

    def stored_shape(self, part: str, shape: Shape) -> Shape:
        return shape

    def copy_into(self, part: str, rows: torch.Tensor) -> None:
        name = self.file_name(part)
        stored = self._stored[name]
        if stored.dtype not in FLOATS:
            raise StepscopeError(
                f"Tensor '{name}' in {stored.file} is stored as {stored.dtype}, and"
                f" {', '.join(FLOATS)} are read; use an unquantized copy of the model."
            )
        # Opened anew for each tensor, so that no more than one stays mapped beside the weights.
        with _opened(stored.file) as file:
            values = file.get_tensor(name)
            if self._norm_offset and part.endswith("_norm"):
                values = values.float() + self._norm_offset
            rows.copy_(values)


def _contents(file: Path) -> dict[str, _Stored]:
    with _opened(file) as opened:
        slices = {name: opened.get_slice(name) for name in list(opened.keys())}
        return {
            name: _Stored(file, piece.get_dtype(), tuple(piece.get_shape()))
            for name, piece in slices.items()
        }


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise StepscopeError(
            f"{file} is truncated or damaged ({error}); download it again."
        ) from None
    except FileNotFoundError:
        raise StepscopeError(
            f"{file} is missing though {INDEX} names it; download it again."
        ) from None


def weight_names(names: Sequence[str]) -> list[str]:
    """Of a directory's files those with the weights: one, the index of several, or any."""
    for name in (SINGLE, INDEX):
        if name in names:
            return [name]
    return sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)


def shards_of(path: Path) -> list[str]:
    """The files that the directory's index names."""
    shards = json_object(path / INDEX).get("weight_map")
    if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
        raise StepscopeError(f"{path / INDEX} has no weight_map; download it again.")
    return [Path(shard).name for shard in sorted(set(shards.values()))]


def _weight_files(path: Path) -> list[Path]:
    names = weight_names([file.name for file in path.iterdir() if file.is_file()])
    if not names:
        raise UsageError(
            f"{path} holds no .safetensors files, and no other weights are read; convert the model"
            " to safetensors or use a .gguf file."
        )
    return [path / name for name in (shards_of(path) if names == [INDEX] else names)]
