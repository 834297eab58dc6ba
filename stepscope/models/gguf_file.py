"""The GGUF container: metadata and tensor table, bounds-checked so that a cut file is named as one.

Format: github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian. The
reader of the `gguf` package slices past the end of a file without noticing and takes seconds over
a tokenizer's string arrays, so the container is parsed here; block formats are left to it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from stepscope.errors import StepscopeError, UsageError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MOST_DIMENSIONS = 4
STRING, ARRAY = 8, 9
KNOWN_KINDS = {int(kind) for kind in GGML_QUANT_SIZES}
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table; `shape` is (out, in), the reverse of the order on disk."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int
    row_bytes: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


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
        begin = entry.begin + first * entry.row_bytes
        raw = np.frombuffer(self.mapping, np.uint8, (last - first) * entry.row_bytes, begin)
        try:
            values = dequantize(raw.reshape(last - first, entry.row_bytes), entry.kind)
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
    if not path.is_file() or path.stat().st_size < len(MAGIC):
        raise UsageError(f"{path} is empty or no file; give the path of a complete GGUF file.")
    with path.open("rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    cursor = _Cursor(path, memoryview(mapping))
    _check_magic(path, cursor)
    num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = dict(_metadata(cursor, num_keys))
    table = list(_tensor_table(cursor, num_tensors))
    tensors = _placed(cursor, table, metadata)
    return GgufFile(path, metadata, tensors, mapping)


class _Cursor:
    """Reads forward through the header; every read is checked against the end of the file."""

    def __init__(self, path: Path, view: memoryview) -> None:
        self.path = path
        self.view = view
        self.at = 0

    def take(self, num_bytes: int) -> memoryview:
        end = self.at + num_bytes
        if end > len(self.view):
            raise self.truncated("its header goes on")
        piece = self.view[self.at : end]
        self.at = end
        return piece

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.scalar("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.damaged(f"the text before byte {self.at:,} is not UTF-8") from None

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            return self.array()
        if kind not in SCALARS:
            raise self.damaged(f"byte {self.at:,} has the unknown value type {kind}")
        return self.scalar(SCALARS[kind])

    def array(self) -> list[Any]:
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in SCALARS:
            size = struct.calcsize("<" + SCALARS[kind])
            return list(struct.unpack(f"<{count}{SCALARS[kind]}", self.take(count * size)))
        if kind != STRING:
            raise self.damaged(f"byte {self.at:,} has an array of the unknown type {kind}")
        return [self.string() for _ in range(count)]

    def truncated(self, what: str) -> StepscopeError:
        return StepscopeError(
            f"{self.path} is truncated: it ends at byte {len(self.view):,} but {what}; download"
            " or convert it again."
        )

    def damaged(self, what: str) -> StepscopeError:
        return StepscopeError(f"{self.path} is damaged: {what}; download or convert it again.")


def _check_magic(path: Path, cursor: _Cursor) -> None:
    if bytes(cursor.take(len(MAGIC))) != MAGIC:
        raise UsageError(
            f"{path} is not a GGUF file, as it does not begin with 'GGUF'; give the path of one."
        )
    version = cursor.scalar("I")
    if version not in VERSIONS:
        raise UsageError(
            f"{path} has the GGUF version {version} (or another byte order), and versions 2 and 3,"
            " little-endian, are read; convert the model again."
        )


def _metadata(cursor: _Cursor, num_keys: int) -> Iterator[tuple[str, Any]]:
    for _ in range(num_keys):
        key = cursor.string()
        yield key, cursor.value(cursor.scalar("I"))


def _tensor_table(cursor: _Cursor, num_tensors: int) -> Iterator[TensorEntry]:
    """Entries whose `begin` is still relative to the data section."""
    for _ in range(num_tensors):
        name = cursor.string()
        num_dimensions = cursor.scalar("I")
        if not 1 <= num_dimensions <= MOST_DIMENSIONS:
            raise cursor.damaged(f"tensor '{name}' has {num_dimensions} dimensions")
        shape = tuple(cursor.scalar("Q") for _ in range(num_dimensions))[::-1]
        kind, row_bytes = _layout(cursor, name, shape[-1], cursor.scalar("I"))
        yield TensorEntry(name, shape, kind, cursor.scalar("Q"), row_bytes)


def _layout(
    cursor: _Cursor, name: str, row_elements: int, kind: int
) -> tuple[GGMLQuantizationType, int]:
    if kind not in KNOWN_KINDS:
        raise cursor.damaged(f"tensor '{name}' has the unknown type {kind}")
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    if row_elements % block:
        raise cursor.damaged(f"a row of tensor '{name}' is not a whole number of blocks")
    return GGMLQuantizationType(kind), row_elements // block * block_bytes


def _placed(
    cursor: _Cursor, table: list[TensorEntry], metadata: dict[str, Any]
) -> dict[str, TensorEntry]:
    """Offsets made absolute, each tensor's last byte checked to be in the file."""
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise cursor.damaged(f"its alignment is {alignment}")
    base = -(-cursor.at // alignment) * alignment
    placed = {}
    for entry in table:
        placed[entry.name] = replace(entry, begin=base + entry.begin)
        if placed[entry.name].begin + entry.num_bytes > len(cursor.view):
            raise cursor.truncated(f"tensor '{entry.name}' reaches beyond")
    if len(placed) != len(table):
        raise cursor.damaged("two tensors have the same name")
    return placed
