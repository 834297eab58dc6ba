"""A Llama-family model in a GGUF file: shape from the metadata, weights from the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.gguf_file import GgufFile, read_gguf
from stepscope.models.gguf_tokenizer import tokenizer_from_gguf
from stepscope.models.tensors import Shape
from stepscope.models.tokenizer import TextTokenizer
from stepscope.spec import ModelSpec

ARCHITECTURES = ("llama",)  # Llama, Mistral and SmolLM2 are all written under this name
ROPE_DIVISORS = "rope_freqs.weight"  # Llama 3.1's scaled frequencies
CHUNK_ELEMENTS = 1 << 22  # floats dequantized at a time: bounds what is held beside the weights
TOP = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
LAYER = {
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "mlp_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


class GgufModel:
    """WeightSource over a GGUF file (models/tensors.py)."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises UsageError or StepscopeError if the file is not a Llama that can be loaded."""
        self.file = read_gguf(path)
        self.label = str(path)
        _check_supported(self.file)
        self.tokenizer: TextTokenizer | None = tokenizer_from_gguf(self.file)
        self.spec = _spec(self.file, name, self.tokenizer)

    def file_name(self, part: str) -> str:
        if part in TOP:
            return f"{TOP[part]}.weight"
        _, index, name = part.split(".")
        return f"blk.{index}.{LAYER[name]}.weight"

    def shapes(self) -> dict[str, Shape]:
        return {name: entry.shape for name, entry in self.file.tensors.items()}

    def copy_into(self, part: str, rows: torch.Tensor) -> None:
        name = self.file_name(part)
        if rows.dim() == 1:
            rows.copy_(torch.from_numpy(self.file.rows(name, 0, 1)[0]))
        else:
            self._copy_matrix(name, part.endswith((".q", ".k")), rows)
        self.file.release()

    def _copy_matrix(self, name: str, rotated: bool, rows: torch.Tensor) -> None:
        step = max(1, CHUNK_ELEMENTS // rows.shape[1])
        if rotated:  # a head's rows move within the head, so chunks hold whole heads
            step = max(1, step // self.spec.head_dim) * self.spec.head_dim
        for first in range(0, rows.shape[0], step):
            last = min(first + step, rows.shape[0])
            chunk = torch.from_numpy(self.file.rows(name, first, last))
            rows[first:last] = half_order(chunk, self.spec.head_dim) if rotated else chunk


def half_order(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [heads x head_dim, in] from the order of adjacent pairs to that of halves.

    GGUF's `llama` converter interleaves each head's two halves (convert_hf_to_gguf.py,
    LlamaModel.permute), because ggml rotates neighbours; this undoes it.
    """
    pairs = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _check_supported(file: GgufFile) -> None:
    arch = file.architecture
    if arch not in ARCHITECTURES:
        raise UsageError(
            f"{file.path} has the architecture '{arch}', and GGUF files of the architecture"
            " 'llama' (Llama, Mistral, SmolLM2) are supported; choose one of those."
        )
    scaling = file.metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none" or ROPE_DIVISORS in file.tensors:
        kind = "llama3" if scaling == "none" else scaling
        raise UsageError(
            f"{file.path} uses RoPE scaling ({kind}), which is not supported yet; choose a model"
            " without it, such as smollm2-135m."
        )
    for key, what in (
        (f"{arch}.expert_count", "experts"),
        (f"{arch}.attention.sliding_window", "a sliding window"),
    ):
        if file.metadata.get(key):
            raise UsageError(
                f"{file.path} uses {what}, which is not supported yet; choose a dense Llama-family"
                " model with full attention."
            )


def _spec(file: GgufFile, name: str, tokenizer: TextTokenizer | None) -> ModelSpec:
    arch = file.architecture

    def whole(key: str, default: int | None = None) -> int:
        full = f"{arch}.{key}"
        if default is not None and full not in file.metadata:
            return default
        return int(file.need(full, int))

    hidden, heads = whole("embedding_length"), whole("attention.head_count")
    head_dim = whole("attention.key_length", hidden // max(heads, 1))
    _check_head(file, head_dim, whole("attention.value_length", head_dim), whole)
    embedding = file.tensors.get("token_embd.weight")
    rows = embedding.shape[0] if embedding else 1  # assemble() names it among the missing
    return ModelSpec(
        name=name,
        arch=arch,
        layers=whole("block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate=whole("feed_forward_length"),
        vocab=whole("vocab_size", tokenizer.vocab_size if tokenizer else rows),
        max_context=whole("context_length"),
        rope_theta=float(file.metadata.get(f"{arch}.rope.freq_base", 10000.0)),
        norm_eps=float(file.need(f"{arch}.attention.layer_norm_rms_epsilon", float)),
        tied="output.weight" not in file.tensors,
        eos_ids=tokenizer.eos_ids if tokenizer else (),
        bos_id=tokenizer.bos_id if tokenizer else None,
        add_bos=tokenizer.add_bos if tokenizer else False,
    )


def _check_head(file: GgufFile, key_length: int, value_length: int, whole: Any) -> None:
    rotated = whole("rope.dimension_count", key_length)
    if not key_length == value_length == rotated:
        raise StepscopeError(
            f"{file.path} has keys of {key_length}, values of {value_length} and {rotated} rotated"
            " dimensions per head, and only equal ones are supported; choose another model."
        )
