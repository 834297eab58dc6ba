"""The GGUF container, as the `gguf` package reads it, with every read kept inside the file.

GGUFReader slices past the end of a file without noticing, walks arrays of any length a file claims
and keeps two memory maps per value. Every byte it takes goes through its `_get`, so the bounds are
checked there; fields, tensors and block formats are left to the package.
"""

from __future__ import annotations

import mmap
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderTensor
from gguf.quants import dequantize

from stepscope.errors import StepscopeError, UsageError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_READS = (
    3_000_000  # three times those of Llama 3's tokenizer; about 300 bytes are held for each
)
MOST_ERROR_CHARS = 150


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table; `shape` is (out, in), the reverse of the order on disk."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    data: npt.NDArray[Any]  # mapped, its rows in the stored format

    @property
    def num_bytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True)
class GgufFile:
    """A parsed header and the memory-mapped file, of which nothing is copied."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    mapping: mmap.mmap

    def rows(self, name: str, first: int, last: int) -> npt.NDArray[np.float32]:
        """Rows first..last of a tensor, dequantized: float32 [last - first, in], writable.

        Raises StepscopeError for a block format that the `gguf` package cannot decode.
        """
        entry = self.tensors[name]
        stored = entry.data.reshape(-1, entry.data.shape[-1])[first:last]
        try:
            values = dequantize(stored, entry.kind)
        except NotImplementedError:
            raise StepscopeError(
                f"Tensor '{name}' in {self.path} has the type {entry.kind.name}, which cannot be"
                " decoded; convert the model to one of the common GGUF types such as Q8_0."
            ) from None
        return np.require(values, np.float32, ["C", "W"])

    def release(self) -> None:
        """Let go of the pages read so far: the file is read once and need not stay resident."""
        self.mapping.madvise(mmap.MADV_DONTNEED)

    @property
    def architecture(self) -> str:
        return str(self.need("general.architecture", str))

    def need(self, key: str, kind: type) -> Any:
        """A metadata value of the given type; StepscopeError if it is absent or of another."""
        value = self.metadata.get(key)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            found = "is missing" if value is None else f"is a {type(value).__name__}"
            raise StepscopeError(
                f"The metadata key '{key}' in {self.path} {found} where a {kind.__name__} belongs;"
                " convert the model again."
            )
        return value


def read_gguf(path: Path) -> GgufFile:
    """Parse the header of a GGUF file and check that all of its tensor data is there.

    Raises UsageError if the file is not a GGUF, StepscopeError if it is cut short or damaged.
    """
    _check_magic(path)
    try:
        with np.errstate(all="raise"):  # an offset that wraps around would point into the header
            reader = _BoundedReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = {tensor.name: _entry(tensor) for tensor in reader.tensors}
    except (ValueError, LookupError, ArithmeticError) as error:  # all that the reader raises
        what = textwrap.shorten(str(error), MOST_ERROR_CHARS, placeholder="...")
        raise StepscopeError(f"{path} is damaged ({what}); download or convert it again.") from None
    return GgufFile(path, metadata, tensors, cast(mmap.mmap, reader.data.base))


def _check_magic(path: Path) -> None:
    if not path.is_file() or path.stat().st_size < len(MAGIC):
        raise UsageError(f"{path} is empty or no file; give the path of a complete GGUF file.")
    with path.open("rb") as file:
        magic, version = file.read(len(MAGIC)), file.read(4)
    if magic != MAGIC:
        raise UsageError(
            f"{path} is not a GGUF file, as it does not begin with 'GGUF'; give the path of one."
        )
    number = int.from_bytes(version, "little")
    if len(version) == 4 and number not in VERSIONS:
        raise UsageError(
            f"{path} has the GGUF version {number} (or another byte order), and versions 2 and 3,"
            " little-endian, are read; convert the model again."
        )


def _entry(tensor: ReaderTensor) -> TensorEntry:
    shape = tuple(tensor.shape.tolist())[::-1]
    if not shape:
        raise ValueError(f"tensor '{tensor.name}' has no dimensions")
    return TensorEntry(shape, tensor.tensor_type, tensor.data_offset, tensor.data)


class _BoundedReader(GGUFReader):
    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads = 0
        super().__init__(path)

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        """`count` little-endian values at `offset`: a plain view, far lighter than a np.memmap."""
        kind = np.dtype(dtype).newbyteorder("<")
        end = offset + kind.itemsize * int(count)
        if end > self.data.size:
            raise StepscopeError(
                f"{self.path} is truncated: it ends at byte {self.data.size:,} but its contents"
                f" reach to byte {end:,}; download or convert it again."
            )
        self.reads += 1
        if self.reads > MOST_READS:
            raise ValueError(f"its header holds more than {MOST_READS:,} values")
        return np.ndarray((int(count),), kind, self.data, offset)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        """Refuses arrays in arrays, which no model has and which take quadratic time to read."""
        if raw_type == GGUFValueType.ARRAY and self._get(orig_offs, "u4")[0] == raw_type:
            raise ValueError("it has an array of arrays")
        return super()._get_field_parts(orig_offs, int(raw_type))
