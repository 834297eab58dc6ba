"""Is a run that could be parsed also one that can be analysed? One sentence names what is not.

The types of RunMeta, ModelSpec, Ceilings and Sample are the rules; what a type cannot say (a size
is positive, a dtype is known) stands in LIMITS. JSON keys are checked before any object is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass, replace
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from stepscope.errors import UsageError
from stepscope.records import Part, RunMeta, StepRecord
from stepscope.spec import ELEMENT_BYTES, Ceilings, GemvPoint, ModelSpec, TwinPoint
from stepscope.text import listing, printable

LARGEST = 2**63 - 1
MOST_SKIPPED = 10_000  # step numbers between two rows; more is damage, not a gap
RATE = (1.0, 1e18)  # bytes or FLOPs per second
SIZE = (1, 10**9)  # a dimension of a model
BYTES = (0, 10**16)


@dataclass
class Device:
    """What is computed with; everything else about a device is only shown."""

    kind: str | None = None
    name: str | None = None
    threads: int | None = None


@dataclass
class Recorder:
    ns_per_step: float | None = None
    laps_per_step: int | None = None


@dataclass
class Document(RunMeta):
    """run.json, with the types of its parts instead of dict[str, Any]."""

    model: ModelSpec  # type: ignore[assignment]
    device: Device  # type: ignore[assignment]
    slo: dict[str, float | None] = field(default_factory=dict)  # type: ignore[assignment]
    ceilings: Ceilings | None = None  # type: ignore[assignment]
    recorder: Recorder = field(default_factory=Recorder)  # type: ignore[assignment]


# Keys that may be more than the fields: they are kept as they are, or belong to a later version.
OPEN = (Document, Device, Recorder)
# Fields with a default that the readers nevertheless expect.
NEEDED = {ModelSpec: {"eos_ids"}, Ceilings: {"gemv", "twin", "notes"}}
LIMITS: dict[tuple[type, str], tuple[float, float]] = {
    **{
        (ModelSpec, name): SIZE
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
    },
    (ModelSpec, "max_context"): SIZE,
    **{
        (ModelSpec, f"{name}_bytes"): BYTES for name in ("linear", "norm", "head", "embedding")
    },
    (Ceilings, "read_curve"): RATE,
    (Ceilings, "copy_bytes_per_s"): RATE,
    (Ceilings, "gemm_flops"): RATE,
    (GemvPoint, "bytes_per_s"): RATE,
    (GemvPoint, "rows"): SIZE,
    (GemvPoint, "cols"): SIZE,
    (TwinPoint, "batch"): SIZE,
    **{
        (TwinPoint, name): (0, LARGEST)
        for name in ("context", "forward_ns", "gather_ns", "sample_ns", "step_ns")
    },
    (Device, "threads"): (0, 10**6),
    (Recorder, "ns_per_step"): (0, 1e18),
    (Document, "slo"): (0, 1e15),
}
CHOICES: dict[tuple[type, str], Iterable[str]] = {
    (ModelSpec, "dtype"): ELEMENT_BYTES,
    (ModelSpec, "kv_dtype"): ELEMENT_BYTES,
}
