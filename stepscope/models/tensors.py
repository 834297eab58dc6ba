"""Canonical weights: which tensors a decoder holds, and how a file's tensors are copied into them.

Names and shapes (rows first, so that y = x @ W.T):

    embed [vocab, hidden]            layers.I.mlp_norm [hidden]
    layers.I.attn_norm [hidden]      layers.I.gate_up [2 x intermediate, hidden]: gate, then up
    layers.I.qkv [q + k + v, hidden] layers.I.down [hidden, intermediate]
    layers.I.o [hidden, q]           final_norm [hidden]
    head [vocab, hidden], absent when it is tied to embed

q and k rows are in the order in which RoPE rotates the two halves of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.spec import ELEMENT_BYTES, ModelSpec
from stepscope.text import listing, plural, size

Shape = tuple[int, ...]
Part = tuple[str, Shape]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DIMENSIONS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context"),
)
MOST_LAYERS = 10_000
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


class WeightSource(Protocol):
    """A model on disk. `part` is a canonical name, or a fused one's q, k, v, gate or up."""

    spec: ModelSpec
    label: str

    def file_name(self, part: str) -> str:
        """What the file calls this part."""

    def shapes(self) -> dict[str, Shape]:
        """Shapes of the file's tensors by the file's names, without those that hold no weights."""

    def copy_into(self, part: str, rows: torch.Tensor) -> None:
        """Write the part into `rows`, converting to its dtype."""


def tensor_plan(spec: ModelSpec) -> dict[str, tuple[Part, ...]]:
    """Canonical tensor -> the parts stacked in it, top to bottom."""
    hidden, q = spec.hidden, spec.heads * spec.head_dim
    kv = spec.kv_heads * spec.head_dim
    plan: dict[str, tuple[Part, ...]] = {"embed": (("embed", (spec.vocab, hidden)),)}
    for index in range(spec.layers):
        parts: dict[str, tuple[Part, ...]] = {
            "attn_norm": (("attn_norm", (hidden,)),),
            "qkv": (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden))),
            "o": (("o", (hidden, q)),),
            "mlp_norm": (("mlp_norm", (hidden,)),),
            "gate_up": (
                ("gate", (spec.intermediate, hidden)),
                ("up", (spec.intermediate, hidden)),
            ),
            "down": (("down", (hidden, spec.intermediate)),),
        }
        for name, inner in parts.items():
            layer = f"layers.{index}."
            plan[layer + name] = tuple((layer + part, shape) for part, shape in inner)
    plan["final_norm"] = (("final_norm", (hidden,)),)
    if not spec.tied:
        plan["head"] = (("head", (spec.vocab, hidden)),)
    return plan


def stacked_shape(parts: tuple[Part, ...]) -> Shape:
    return (sum(shape[0] for _, shape in parts), *parts[0][1][1:])


def assemble(
    source: WeightSource, dtype: str, progress: Callable[[str], None] | None = None
) -> dict[str, torch.Tensor]:
    """Copy every tensor once, part by part, into its place in the canonical weights.

    Raises StepscopeError if the file's tensors are not exactly those of the spec, or if the
    weights do not fit in memory.
    """
    check_shape(source.spec)
    plan = tensor_plan(source.spec)
    _check_inventory(source, plan)
    check_memory(source.label, plan, dtype)
    weights = {}
    for done, (name, parts) in enumerate(plan.items(), start=1):
        whole = torch.empty(stacked_shape(parts), dtype=TORCH_DTYPES[dtype])
        first = 0
        for part, shape in parts:
            source.copy_into(part, whole[first : first + shape[0]])
            first += shape[0]
        weights[name] = whole
        if progress:
            progress(f"Loading {source.label}: {done} of {plural(len(plan), 'tensor')}")
    return weights


def _check_inventory(source: WeightSource, plan: dict[str, tuple[Part, ...]]) -> None:
    present = source.shapes()
    wanted = {source.file_name(part): shape for parts in plan.values() for part, shape in parts}
    missing = [name for name in wanted if name not in present]
    if missing:
        raise StepscopeError(
            f"{source.label} lacks {plural(len(missing), 'tensor')} that its configuration"
            f" promises ({listing(missing, 3)}); download or convert it again."
        )
    extra = sorted(set(present) - set(wanted))
    if extra:
        raise StepscopeError(
            f"{source.label} holds {plural(len(extra), 'tensor')} that a plain Llama does not have"
            f" ({listing(extra, 3)}), so its architecture is not supported; choose a Llama,"
            " Mistral or SmolLM2 model."
        )
    for name, shape in wanted.items():
        if present[name] != shape:
            raise StepscopeError(
                f"Tensor '{name}' in {source.label} has the shape {list(present[name])} where its"
                f" configuration asks for {list(shape)}; download or convert it again."
            )


def check_shape(spec: ModelSpec) -> None:
    """UsageError for dimensions of which no decoder can be made."""
    for key in DIMENSIONS:
        value = getattr(spec, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{key} of {spec.name} is {value} where a whole number above 0 belongs; correct it."
            )
    if spec.layers > MOST_LAYERS:  # a plan of them all would fill the memory before any check of it
        raise UsageError(
            f"layers of {spec.name} is {spec.layers:,}, and at most {MOST_LAYERS:,} are supported;"
            " correct it."
        )
    if spec.heads % spec.kv_heads:
        raise UsageError(
            f"{spec.name} has {spec.heads} heads on {spec.kv_heads} kv_heads; make heads a multiple"
            " of kv_heads."
        )
    if spec.head_dim % 2:
        raise UsageError(
            f"{spec.name} has a head_dim of {spec.head_dim}, and RoPE turns pairs; make it even."
        )


def plan_bytes(plan: dict[str, tuple[Part, ...]], dtype: str) -> int:
    elements = sum(math.prod(shape) for parts in plan.values() for _, shape in parts)
    return elements * ELEMENT_BYTES[dtype]


def check_memory(label: str, plan: dict[str, tuple[Part, ...]], dtype: str) -> None:
    """StepscopeError, before anything is allocated, if the weights exceed the free memory."""
    check_free(
        f"The weights of {label} in {dtype}",
        plan_bytes(plan, dtype),
        "choose a smaller model or a smaller dtype",
    )


def check_free(what: str, needed: int, remedy: str) -> None:
    """StepscopeError if so many bytes are not free. What is unknown is not refused."""
    free = available_memory()
    if free is not None and needed > free:
        raise StepscopeError(
            f"{what} take {size(needed)} and {size(free)} of memory is free; {remedy}."
        )


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping (Linux), None where unknown."""
    limits = []
    if MEMINFO.exists():
        fields = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        if "MemAvailable" in fields:
            limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    if CGROUP_LIMIT.exists() and (limit := CGROUP_LIMIT.read_text().strip()).isdigit():
        limits.append(int(limit))
    return min(limits, default=None)


def with_byte_counts(spec: ModelSpec, weights: dict[str, torch.Tensor], dtype: str) -> ModelSpec:
    """The spec with the bytes of the tensors as loaded."""

    def total(*endings: str) -> int:
        return sum(w.nbytes for name, w in weights.items() if name.endswith(endings))

    return replace(
        spec,
        dtype=dtype,
        kv_dtype=dtype,
        linear_bytes=total(".qkv", ".o", ".gate_up", ".down"),
        norm_bytes=total("_norm"),
        head_bytes=weights["embed" if spec.tied else "head"].nbytes,
        embedding_bytes=weights["embed"].nbytes,
    )
