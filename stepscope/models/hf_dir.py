"""A Llama-family model in a directory of Hugging Face layout: config.json and safetensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.hf_tokenizer import eos_ids_of, json_object, tokenizer_from_directory
from stepscope.models.tensors import Shape
from stepscope.models.tokenizer import TextTokenizer
from stepscope.spec import ModelSpec

MODEL_TYPES = ("llama", "mistral")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOATS = ("F32", "F16", "BF16")
TOP = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class _Stored:
    """Where a tensor lies, and how."""

    file: Path
    dtype: str
    shape: Shape


class HfModel:
    """WeightSource over a directory (models/tensors.py)."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError or StepscopeError if it is not a Llama that can be loaded."""
        self.path = path
        self.label = str(path)
        if not (path / "config.json").is_file():
            raise UsageError(f"{path} has no config.json; give a directory in Hugging Face layout.")
        config = json_object(path / "config.json")
        _check_supported(path, config)
        self.tokenizer: TextTokenizer | None = tokenizer_from_directory(path, config)
        self.spec = _spec(path, config, self.tokenizer)
        self._stored: dict[str, _Stored] = {}
        for file in _weight_files(path):
            self._stored |= _contents(file)

    def file_name(self, part: str) -> str:
        if part in TOP:
            return TOP[part]
        _, index, name = part.split(".")
        return f"model.layers.{index}.{LAYER[name]}.weight"

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
            rows.copy_(file.get_tensor(name))


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


def _weight_files(path: Path) -> list[Path]:
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    if (path / INDEX).is_file():
        shards = json_object(path / INDEX).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(s, str) for s in shards.values()):
            raise StepscopeError(f"{path / INDEX} has no weight_map; download it again.")
        return [path / Path(shard).name for shard in sorted(set(shards.values()))]
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise UsageError(
            f"{path} holds no .safetensors files, and no other weights are read; convert the model"
            " to safetensors or use a .gguf file."
        )
    return files


def _check_supported(path: Path, config: dict[str, Any]) -> None:
    kind = config.get("model_type")
    if kind not in MODEL_TYPES:
        raise UsageError(
            f"{path} has the model_type '{kind}', and {' and '.join(MODEL_TYPES)} are supported;"
            " choose one of those."
        )
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor", 1.0))
    for present, what in (
        (scaling != "default", f"RoPE scaling ({scaling})"),
        (partial != 1.0, "a partial rotation"),
        (config.get("sliding_window"), "a sliding window"),
        (config.get("attention_bias") or config.get("mlp_bias"), "biases"),
        (config.get("hidden_act", "silu") != "silu", f"the activation {config.get('hidden_act')}"),
        (config.get("quantization_config"), "quantized weights"),
    ):
        if present:
            raise UsageError(
                f"{path} uses {what}, which is not supported yet; choose a Llama-family model"
                " without it."
            )


def _spec(path: Path, config: dict[str, Any], tokenizer: TextTokenizer | None) -> ModelSpec:
    def number(key: str, kind: type, default: float | None = None) -> Any:
        value = default if config.get(key) is None else config[key]
        if isinstance(value, bool) or not isinstance(value, kind | int):
            raise StepscopeError(
                f"{path / 'config.json'} has {value!r} as {key} where a number belongs; download"
                " it again."
            )
        return value

    heads, hidden = number("num_attention_heads", int), number("hidden_size", int)
    rope = config.get("rope_parameters") or {}
    return ModelSpec(
        name=path.resolve().name,
        arch="llama",
        layers=number("num_hidden_layers", int),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", int, heads),
        head_dim=number("head_dim", int, hidden // max(heads, 1)),
        intermediate=number("intermediate_size", int),
        vocab=number("vocab_size", int),
        max_context=number("max_position_embeddings", int),
        rope_theta=float(number("rope_theta", float, rope.get("rope_theta", 10000.0))),
        norm_eps=float(number("rms_norm_eps", float, 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=tokenizer.eos_ids if tokenizer else eos_ids_of(path, config),
        bos_id=tokenizer.bos_id if tokenizer else config.get("bos_token_id"),
        add_bos=tokenizer.add_bos if tokenizer else False,
    )
