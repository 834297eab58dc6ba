"""One call from a model's name or path to its weights, tokenizer and shape."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.catalogue import CATALOGUE, unknown_model
from stepscope.models.dummy import dummy_spec, random_weights
from stepscope.models.fetch import fetch
from stepscope.models.hf_dir import HfModel
from stepscope.models.hub import HubCopy, fetch_hub, hub_id
from stepscope.models.hub_errors import HUB_PREFIX, HubId
from stepscope.models.packed import Int8Weight, check_device
from stepscope.models.quantize import LOOKED_UP
from stepscope.models.tensors import WEIGHT_DTYPES, assemble, with_byte_counts
from stepscope.models.tokenizer import TextTokenizer
from stepscope.spec import FP8, QUANTIZED, ModelSpec
from stepscope.text import listing, plural, size

if TYPE_CHECKING:
    from stepscope.models.gguf_model import GgufModel

DUMMY_PREFIX = "dummy:"
AUTO_DTYPE = "bf16"
FLOAT_KINDS = ("F32", "F16", "BF16")
Say = Callable[[str], None]


@runtime_checkable
class Encoded(Protocol):
    """A source whose file may hold weights in codes of its own."""

    def holds(self, kind: str) -> bool: ...

    def holds_only(self, kinds: Collection[str]) -> bool: ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Canonical weights (models/tensors.py), each held once in the spec's dtype."""

    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tokenizer: TextTokenizer | None
    notes: tuple[str, ...] = ()  # what is held otherwise than the dtype says


def load_model(
    name: str,
    dtype: str = "auto",
    *,
    overrides: dict[str, int] | None = None,
    seed: int = 0,
    progress: Say | None = None,
    told: Say | None = None,
    device: torch.device | str = "cpu",
) -> LoadedModel:
    """Load a catalogue name, a .gguf file, a Hugging Face directory, a hub id, or `dummy:NAME`.

    `dtype` is fp32, bf16, fp16, auto (bf16), or of the weights alone int8, int4, int4-g64,
    int4-g128 on a CPU and fp8 on a GPU (models/quantize.py). The weights lie on the device.
    `overrides` and `seed` shape a dummy's random weights. progress is told often how far it is,
    told once what takes long (a download).
    Raises UsageError for what is not known or supported, StepscopeError for damaged files and for
    weights that do not fit in memory.
    """
    kind, where = _dtype(dtype), torch.device(device)
    check_device(kind, where)
    if name.startswith(DUMMY_PREFIX):
        spec = dummy_spec(name, overrides or {})
        weights = random_weights(spec, kind, seed, progress, where)
        counted = with_byte_counts(spec, weights, kind)
        return LoadedModel(counted, weights, None, quantization_notes(weights, kind))
    if overrides:
        raise UsageError(
            f"The shape of {name} cannot be overridden, as it has real weights; use a dummy model"
            " such as dummy:llama."
        )
    source, notes = _open(name, progress, told)
    _check_vocabulary(source)
    weights = assemble(source, kind, progress, where)
    notes += quantization_notes(weights, kind, source)
    spec = with_byte_counts(source.spec, weights, kind)
    return LoadedModel(spec, weights, source.tokenizer, notes)


def quantization_notes(
    weights: Mapping[str, object], dtype: str, source: object = None
) -> tuple[str, ...]:
    """Sentences on what is not as the dtype promises, and on what was rounded twice."""
    if dtype not in QUANTIZED:
        return ()
    notes = _fp8_notes(weights) if dtype == FP8 else _integer_notes(weights, dtype)
    if dtype != FP8 and isinstance(source, Encoded) and source.holds("Q8_0"):
        notes.append("The file's Q8_0 has a scale per 32 values, int8 one per row: rounded twice.")
    if dtype == FP8 and isinstance(source, Encoded) and not source.holds_only(FLOAT_KINDS):
        notes.append("The file's own codes were turned into floats and then fp8: rounded twice.")
    return tuple(notes)


def _integer_notes(weights: Mapping[str, object], dtype: str) -> list[str]:
    eights = {name: w for name, w in weights.items() if isinstance(w, Int8Weight)}
    notes = []
    fallen = [n for n in eights if dtype != "int8" and n not in LOOKED_UP]
    if fallen:
        notes.append(
            f"{plural(len(fallen), 'tensor')} held as int8, as {dtype} needs rows in"
            f" 16s and inputs in 32s ({listing(fallen, 2)})."
        )
    slow = [name for name, w in eights.items() if not w.packable]
    if slow:
        notes.append(
            f"{plural(len(slow), 'tensor')} turned into bf16 for every product, as"
            f" torch's int8 product needs inputs in 16s ({listing(slow, 2)})."
        )
    return notes


def _fp8_notes(weights: Mapping[str, object]) -> list[str]:
    fallen = [
        name
        for name, w in weights.items()
        if isinstance(w, torch.Tensor) and w.dim() == 2 and name not in LOOKED_UP
        if not name.endswith(".router")
    ]
    if not fallen:
        return []
    return [
        f"{plural(len(fallen), 'tensor')} held in bf16, as fp8 needs rows and inputs in 16s"
        f" ({listing(fallen, 2)})."
    ]


def _dtype(dtype: str) -> str:
    kind = AUTO_DTYPE if dtype == "auto" else dtype
    if kind not in WEIGHT_DTYPES:
        choices = listing([*WEIGHT_DTYPES, "auto"], most=len(WEIGHT_DTYPES) + 1)
        raise UsageError(f"There is no dtype '{dtype}'; choose from {choices}.")
    return kind


def _open(
    name: str, progress: Say | None, told: Say | None
) -> tuple[GgufModel | HfModel, tuple[str, ...]]:
    """The model on disk, and what is to be said about how it came there."""
    if name in CATALOGUE:
        return _gguf(fetch(name, _bytes_told(name, progress)), name), ()
    path = Path(name).expanduser()
    if path.is_dir():
        return HfModel(path), ()
    if path.is_file():
        return _gguf(path, path.stem), ()
    wanted = hub_id(name)
    if wanted is not None:
        copy = fetch_hub(wanted, progress, told)
        return _from_hub(wanted, copy), copy.notes
    if path.suffix == ".gguf" or "/" in name or name.startswith(HUB_PREFIX):
        raise UsageError(f"There is no model file or directory {path}; check the path.")
    raise unknown_model(name)


def _gguf(path: Path, label: str) -> GgufModel:
    from stepscope.models.gguf_model import GgufModel  # its library may be missing

    return GgufModel(path, label)


def _from_hub(wanted: HubId, copy: HubCopy) -> GgufModel | HfModel:
    source: GgufModel | HfModel
    if wanted.file is None:
        source = HfModel(copy.path)
        name = wanted.repo  # the directory is called by its commit
    else:
        name = Path(wanted.file).stem
        source = _gguf(copy.path, name)
    source.spec = replace(source.spec, name=name, source=copy.source)
    return source


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
