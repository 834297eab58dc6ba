"""A model in a GGUF file: shape from the metadata, weights from the tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from stepscope.models.gguf_codes import FOUR_BIT, four_bit
from stepscope.models.gguf_config import ROPE_DIVISORS, spec_from_metadata
from stepscope.models.gguf_file import read_gguf
from stepscope.models.gguf_tokenizer import tokenizer_from_gguf
from stepscope.models.quantize import Codes4
from stepscope.models.tensors import Shape
from stepscope.models.tokenizer import TextTokenizer

CHUNK_ELEMENTS = 1 << 22  # floats dequantized at a time: bounds what is held beside the weights
TOP = {"embed": "token_embd", "final_norm": "output_norm", "head": "output"}
LAYER = {
    "attn_norm": "attn_norm.weight",
    **{part: f"attn_{part}.weight" for part in "qkv"},
    **{f"{part}_bias": f"attn_{part}.bias" for part in "qkv"},
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "o": "attn_output.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
}
PERMUTED = ("llama",)  # architectures whose q and k rows the converter interleaves


class GgufModel:
    """WeightSource over a GGUF file (models/tensors.py)."""

    def __init__(self, path: Path, name: str) -> None:
        """Raises UsageError or StepscopeError if the file is not a model that can be loaded."""
        self.file = read_gguf(path)
        self.label = str(path)
        self.tokenizer: TextTokenizer | None = tokenizer_from_gguf(self.file)
        self.spec = spec_from_metadata(self.file, name, self.tokenizer)

    def file_name(self, part: str) -> str:
        if part in TOP:
            return f"{TOP[part]}.weight"
        _, index, name = part.split(".", 2)
        if name.startswith("experts."):
            return f"blk.{index}.ffn_{name.rsplit('.', 1)[1]}_exps.weight"
        return f"blk.{index}.{LAYER[name]}"

    def shapes(self) -> dict[str, Shape]:
        """Without the divisors of RoPE, which became a part of the spec."""
        return {n: entry.shape for n, entry in self.file.tensors.items() if n != ROPE_DIVISORS}

    def stored_shape(self, part: str, shape: Shape) -> Shape:
        """The experts of a layer lie in one tensor, one after another."""
        return (self.spec.experts, *shape) if ".experts." in part else shape

    def copy_into(self, part: str, rows: torch.Tensor) -> None:
        name = self.file_name(part)
        rotated = part.endswith((".q", ".k")) and self.spec.arch in PERMUTED
        if rows.dim() == 1:
            rows.copy_(torch.from_numpy(self.file.rows(name, 0, 1)[0]))
        elif ".experts." in part:
            self._copy_matrix(name, int(part.split(".")[3]) * rows.shape[0], False, rows)
        else:
            self._copy_matrix(name, 0, rotated, rows)
        self.file.release()

    def holds(self, kind: str) -> bool:
        """Whether any tensor is of this GGUF type."""
        return any(entry.kind.name == kind for entry in self.file.tensors.values())

    def holds_only(self, kinds: Collection[str]) -> bool:
        """Whether every tensor is of one of these GGUF types."""
        return all(entry.kind.name in kinds for entry in self.file.tensors.values())

    def codes4(self, part: str, shape: Shape) -> Codes4 | None:
        """The codes of a Q4_0 or Q4_1 tensor as they are, in groups of 32; else None."""
        name = self.file_name(part)
        entry = self.file.tensors[name]
        if entry.kind.name not in FOUR_BIT:
            return None
        first = int(part.split(".")[3]) * shape[0] if ".experts." in part else 0
        stored = entry.data.reshape(-1, entry.data.shape[-1])[first : first + shape[0]]
        found = four_bit(stored, entry.kind.name)
        self.file.release()
        if part.endswith((".q", ".k")) and self.spec.arch in PERMUTED:
            head_dim = self.spec.head_dim
            fields = (found.codes, found.scales, found.zeros)
            return Codes4(*(half_order(rows, head_dim) for rows in fields))
        return found

    def _copy_matrix(self, name: str, begin: int, rotated: bool, rows: torch.Tensor) -> None:
        """The file's rows from `begin` on."""
        step = max(1, CHUNK_ELEMENTS // rows.shape[1])
        if rotated:  # a head's rows move within the head, so chunks hold whole heads
            step = max(1, step // self.spec.head_dim) * self.spec.head_dim
        for first in range(0, rows.shape[0], step):
            last = min(first + step, rows.shape[0])
            chunk = torch.from_numpy(self.file.rows(name, begin + first, begin + last))
            rows[first:last] = half_order(chunk, self.spec.head_dim) if rotated else chunk
            self.file.release()


def half_order(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows [heads x head_dim, in] from the order of adjacent pairs to that of halves.

    GGUF's `llama` converter interleaves each head's two halves (convert_hf_to_gguf.py,
    LlamaModel.permute), because ggml rotates neighbours; this undoes it.
    """
    pairs = rows.view(-1, head_dim // 2, 2, rows.shape[1])
    return pairs.transpose(1, 2).reshape(rows.shape)
