"""One call from a model's name or path to its weights, tokenizer and shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.catalogue import CATALOGUE, unknown_model
from stepscope.models.dummy import dummy_spec, random_weights
from stepscope.models.fetch import fetch
from stepscope.models.gguf_model import GgufModel
from stepscope.models.hf_dir import HfModel
from stepscope.models.tensors import TORCH_DTYPES, assemble, with_byte_counts
from stepscope.models.tokenizer import TextTokenizer
from stepscope.spec import ModelSpec
from stepscope.text import size

DUMMY_PREFIX = "dummy:"
AUTO_DTYPE = "bf16"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Canonical weights (models/tensors.py), each held once in the spec's dtype."""

    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tokenizer: TextTokenizer | None


def load_model(
    name: str,
    dtype: str = "auto",
    *,
    overrides: dict[str, int] | None = None,
    seed: int = 0,
    progress: Say | None = None,
) -> LoadedModel:
    """Load a catalogue name, a .gguf file, a Hugging Face directory, or `dummy:NAME`.

    `dtype` is fp32, bf16 or auto (bf16). `overrides` and `seed` shape a dummy's random weights.
    Raises UsageError for what is not known or supported, StepscopeError for damaged files and for
    weights that do not fit in memory.
    """
    kind = _dtype(dtype)
    if name.startswith(DUMMY_PREFIX):
        spec = dummy_spec(name, overrides or {})
        weights = random_weights(spec, kind, seed, progress)
        return LoadedModel(with_byte_counts(spec, weights, kind), weights, None)
    if overrides:
        raise UsageError(
            f"The shape of {name} cannot be overridden, as it has real weights; use a dummy model"
            " such as dummy:llama."
        )
    source = _open(name, progress)
    _check_vocabulary(source)
    weights = assemble(source, kind, progress)
    return LoadedModel(with_byte_counts(source.spec, weights, kind), weights, source.tokenizer)


def _dtype(dtype: str) -> str:
    kind = AUTO_DTYPE if dtype == "auto" else dtype
    if kind not in TORCH_DTYPES:
        raise UsageError(f"There is no dtype '{dtype}'; choose fp32, bf16 or auto.")
    return kind


def _open(name: str, progress: Say | None) -> GgufModel | HfModel:
    if name in CATALOGUE:
        return GgufModel(fetch(name, _bytes_told(name, progress)), name)
    path = Path(name).expanduser()
    if path.is_dir():
        return HfModel(path)
    if path.is_file():
        return GgufModel(path, path.stem)
    if path.suffix == ".gguf" or "/" in name:
        raise UsageError(f"There is no model file or directory {path}; check the path.")
    raise unknown_model(name)


def _check_vocabulary(source: GgufModel | HfModel) -> None:
    tokenizer = source.tokenizer
    if tokenizer and tokenizer.vocab_size > source.spec.vocab:
        raise StepscopeError(
            f"The tokenizer of {source.label} has ids up to {tokenizer.vocab_size - 1:,} and its"
            f" embedding {source.spec.vocab:,} rows; download or convert the model again."
        )


def _bytes_told(name: str, progress: Say | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress(f"Fetching {name}: {size(done)} of {size(total)}")
