"""A Llama of a few thousand weights, written as a GGUF file and as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

Array = npt.NDArray[np.float32]

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 2, 16, 4, 2, 8, 24, 40
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": LAYERS,
    "hidden_size": HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": INTERMEDIATE,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 7],
    "bos_token_id": 1,
}
METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": HIDDEN,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.feed_forward_length": INTERMEDIATE,
    "llama.context_length": 64,
    "llama.rope.freq_base": 500.0,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}


def hf_shapes() -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        shapes |= {
            layer + "input_layernorm.weight": (HIDDEN,),
            layer + "self_attn.q_proj.weight": (q, HIDDEN),
            layer + "self_attn.k_proj.weight": (kv, HIDDEN),
            layer + "self_attn.v_proj.weight": (kv, HIDDEN),
            layer + "self_attn.o_proj.weight": (HIDDEN, q),
            layer + "post_attention_layernorm.weight": (HIDDEN,),
            layer + "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
            layer + "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
            layer + "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
        }
    return {**shapes, "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}


def hf_weights(seed: int = 0) -> dict[str, Array]:
    draw = np.random.default_rng(seed)
    return {
        name: draw.standard_normal(shape).astype(np.float32) for name, shape in hf_shapes().items()
    }


def write_hf(
    folder: Path, weights: Mapping[str, npt.NDArray[Any]], shards: int = 1, **config: Any
) -> Path:
    """A directory in Hugging Face layout, `config` over the tiny model's own."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if shards == 1:
        save_file(dict(weights), folder / "model.safetensors")
        return folder
    home = {name: f"model-{n % shards}.safetensors" for n, name in enumerate(weights)}
    for file in set(home.values()):
        save_file({n: w for n, w in weights.items() if home[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    return folder


def interleaved(rows: Array, heads: int) -> Array:
    """q or k rows as llama.cpp's converter stores them (convert_hf_to_gguf.py, LlamaModel.permute):
    row i of a head's first half is followed by row i of its second half."""
    out = np.empty_like(rows)
    head_dim = rows.shape[0] // heads
    for head in range(heads):
        for i in range(head_dim // 2):
            first = head * head_dim
            out[first + 2 * i] = rows[first + i]
            out[first + 2 * i + 1] = rows[first + head_dim // 2 + i]
    return out


def gguf_weights(weights: Mapping[str, Array]) -> dict[str, Array]:
    """The same weights under GGUF's names and in its order of rows."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    renamed = {}
    for name, array in weights.items():
        if "q_proj" in name:
            array = interleaved(array, HEADS)
        if "k_proj" in name:
            array = interleaved(array, KV_HEADS)
        renamed[str(names.get_name(name, (".weight",)))] = array
    return renamed


def write_gguf(
    path: Path,
    tensors: Mapping[str, npt.NDArray[Any]],
    metadata: Mapping[str, Any] | None = None,
    arch: str = "llama",
) -> Path:
    """A GGUF file; a metadata value of None leaves the tiny model's own key out."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {**METADATA, **(metadata or {})}.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)
