"""A Llama-family model in a directory of Hugging Face layout: config.json and safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.hf_tokenizer import eos_ids_of, tokenizer_from_directory
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


class HfModel:
    """WeightSource over a directory (models/tensors.py)."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError or StepscopeError if it is not a Llama that can be loaded."""
        self.path = path
        self.label = str(path)
        config = read_json(path / "config.json")
        _check_supported(path, config)
        self.tokenizer: TextTokenizer | None = tokenizer_from_directory(path, config)
        self.spec = _spec(path, config, self.tokenizer)
        self._files = {file: _opened(file) for file in _weight_files(path)}
        self._home = {name: file for file in self._files for name in self._files[file].keys()}

    def file_name(self, part: str) -> str:
        if part in TOP:
            return TOP[part]
        _, index, name = part.split(".")
        return f"model.layers.{index}.{LAYER[name]}.weight"

    def shapes(self) -> dict[str, Shape]:
        return {
            name: tuple(self._files[file].get_slice(name).get_shape())
            for name, file in self._home.items()
            if not self._carries_nothing(name)
        }

    def _carries_nothing(self, name: str) -> bool:
        """Old checkpoints store RoPE's frequencies, and tied ones their head a second time."""
        repeated_head = self.spec.tied and name == TOP["head"]
        return repeated_head or name.endswith("rotary_emb.inv_freq")

    def copy_into(self, part: str, rows: torch.Tensor) -> None:
        name = self.file_name(part)
        file = self._home[name]
        kind = self._files[file].get_slice(name).get_dtype()
        if kind not in FLOATS:
            raise StepscopeError(
                f"Tensor '{name}' in {file} is stored as {kind}, and {', '.join(FLOATS)} are read;"
                " use an unquantized copy of the model."
            )
        rows.copy_(self._files[file].get_tensor(name))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; StepscopeError if the file is absent or is no such thing."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise UsageError(
            f"{path.parent} has no {path.name}; give a directory in Hugging Face layout."
        ) from None
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StepscopeError(f"{path} is not valid JSON ({error}); download it again.") from None
    if not isinstance(value, dict):
        raise StepscopeError(f"{path} is not a JSON object; download it again.")
    return value


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
        shards = read_json(path / INDEX).get("weight_map")
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
    def number(key: str, default: float | None = None) -> Any:
        value = config.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise StepscopeError(
                f"{path / 'config.json'} has {value!r} as {key} where a number above 0 belongs;"
                " download it again."
            )
        return value

    heads, hidden = number("num_attention_heads"), number("hidden_size")
    rope = config.get("rope_parameters") or {}
    return ModelSpec(
        name=path.resolve().name,
        arch="llama",
        layers=number("num_hidden_layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads),
        intermediate=number("intermediate_size"),
        vocab=number("vocab_size"),
        max_context=number("max_position_embeddings"),
        rope_theta=float(number("rope_theta", rope.get("rope_theta", 10000.0))),
        norm_eps=float(number("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=tokenizer.eos_ids if tokenizer else eos_ids_of(path, config),
        bos_id=tokenizer.bos_id if tokenizer else config.get("bos_token_id"),
        add_bos=tokenizer.add_bos if tokenizer else False,
    )
