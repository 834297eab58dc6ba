"""Canonical weights: which tensors a decoder holds, and how a file's tensors are copied into them.

Names and shapes (rows first, so that y = x @ W.T):

    embed [vocab, hidden]            layers.I.mlp_norm [hidden]
    layers.I.attn_norm [hidden]      layers.I.gate_up [2 x intermediate, hidden]: gate, then up
    layers.I.qkv [q + k + v, hidden] layers.I.down [hidden, intermediate]
    layers.I.o [hidden, q]           final_norm [hidden]
    head [vocab, hidden], absent when it is tied to embed

and where the spec asks for them:

    layers.I.qkv_bias [q + k + v]           layers.I.post_attn_norm, post_mlp_norm [hidden]
    layers.I.q_norm, k_norm [head_dim]      layers.I.router [experts, hidden]
    layers.I.experts.J.gate_up, down, of the shapes above, instead of layers.I.gate_up, down

q and k rows are in the order in which RoPE rotates the two halves of a head. Norms are what the
normalized value is multiplied with (Gemma's directories store it less one).
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from stepscope.errors import StepscopeError
from stepscope.models.packed import Fp8Weight, Int4Weight, Int8Weight
from stepscope.models.quantize import (
    Codes4,
    Codes8,
    Codes8Float,
    group_of,
    quantize4,
    quantize8,
    quantize_fp8,
    stored_bytes,
    weight_format,
)
from stepscope.models.shapes import check_shape
from stepscope.spec import FP8, QUANTIZED, ModelSpec, compute_dtype
from stepscope.text import listing, plural, size

AnyCodes = TypeVar("AnyCodes", Codes4, Codes8, Codes8Float)
CPU = torch.device("cpu")
Shape = tuple[int, ...]
Part = tuple[str, Shape]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WEIGHT_DTYPES = (*TORCH_DTYPES, *QUANTIZED)
MEMINFO = Path("/proc/meminfo")
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
NO_MEMORY = "can't allocate memory"


class WeightSource(Protocol):
    """A model on disk. `part` is a canonical name, or a fused one's q, k, v, gate or up
    (with a bias: q_bias, k_bias, v_bias)."""

    spec: ModelSpec
    label: str

    def file_name(self, part: str) -> str:
        """What the file calls this part."""

    def shapes(self) -> dict[str, Shape]:
        """Shapes of the file's tensors by the file's names, without those that hold no weights."""

    def stored_shape(self, part: str, shape: Shape) -> Shape:
        """The shape of the file's tensor that holds this part: its own, unless more lie in it."""

    def copy_into(self, part: str, rows: torch.Tensor) -> None:
        """Write the part into `rows`, converting to its dtype."""


@runtime_checkable
class FourBitSource(Protocol):
    """A source whose file may hold int4 codes already."""

    def codes4(self, part: str, shape: Shape) -> Codes4 | None:
        """The part's own codes in groups of 32, None if the file holds it in another format."""


def tensor_plan(spec: ModelSpec) -> dict[str, tuple[Part, ...]]:
    """Canonical tensor -> the parts stacked in it, top to bottom."""
    hidden = spec.hidden
    plan: dict[str, tuple[Part, ...]] = {"embed": (("embed", (spec.vocab, hidden)),)}
    for index in range(spec.layers):
        layer = f"layers.{index}."
        for name, inner in (_attention_parts(spec) | _mlp_parts(spec)).items():
            plan[layer + name] = tuple((layer + part, shape) for part, shape in inner)
    plan["final_norm"] = (("final_norm", (hidden,)),)
    if not spec.tied:
        plan["head"] = (("head", (spec.vocab, hidden)),)
    return plan


def _attention_parts(spec: ModelSpec) -> dict[str, tuple[Part, ...]]:
    hidden, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    parts: dict[str, tuple[Part, ...]] = {
        "attn_norm": (("attn_norm", (hidden,)),),
        "qkv": (("q", (q, hidden)), ("k", (kv, hidden)), ("v", (kv, hidden))),
        "o": (("o", (hidden, q)),),
    }
    if spec.qkv_bias:
        parts["qkv_bias"] = (("q_bias", (q,)), ("k_bias", (kv,)), ("v_bias", (kv,)))
    if spec.qk_norm:
        parts |= {n: ((n, (spec.head_dim,)),) for n in ("q_norm", "k_norm")}
    if spec.post_norms:
        parts |= {n: ((n, (hidden,)),) for n in ("post_attn_norm", "post_mlp_norm")}
    return parts


def _mlp_parts(spec: ModelSpec) -> dict[str, tuple[Part, ...]]:
    hidden, wide = spec.hidden, spec.intermediate
    parts: dict[str, tuple[Part, ...]] = {"mlp_norm": (("mlp_norm", (hidden,)),)}
    if spec.experts:
        parts["router"] = (("router", (spec.experts, hidden)),)
    for at in [f"experts.{i}." for i in range(spec.experts)] or [""]:
        parts[f"{at}gate_up"] = ((f"{at}gate", (wide, hidden)), (f"{at}up", (wide, hidden)))
        parts[f"{at}down"] = ((f"{at}down", (hidden, wide)),)
    return parts


def stacked_shape(parts: tuple[Part, ...]) -> Shape:
    return (sum(shape[0] for _, shape in parts), *parts[0][1][1:])


def assemble(
    source: WeightSource,
    dtype: str,
    progress: Callable[[str], None] | None = None,
    device: torch.device = CPU,
) -> dict[str, torch.Tensor]:
    """Copy every tensor once, part by part, into its place in the canonical weights.

    Each goes to the device as soon as it is whole, so that the host never holds more than one.
    Raises StepscopeError if the file's tensors are not exactly those of the spec, or if the
    weights do not fit in memory.
    """
    check_shape(source.spec)
    plan = tensor_plan(source.spec)
    _check_inventory(source, plan)
    check_memory(source.label, plan, dtype, device)
    weights: dict[str, Any] = {}  # tensors, and QuantizedWeights where the dtype asks for them
    for done, (name, parts) in enumerate(plan.items(), start=1):
        form = weight_format(name, stacked_shape(parts), dtype)
        if form == FP8:
            weights[name] = _fp8(source, parts, device)
        elif form in QUANTIZED:
            weights[name] = _quantized(source, parts, form).to(device)
        else:
            weights[name] = _stacked(source, parts, form).to(device)
        if progress:
            progress(f"Loading {source.label}: {done} of {plural(len(plan), 'tensor')}")
    return weights


def _stacked(source: WeightSource, parts: tuple[Part, ...], form: str) -> torch.Tensor:
    whole = torch.empty(stacked_shape(parts), dtype=TORCH_DTYPES[form])
    first = 0
    for part, shape in parts:
        source.copy_into(part, whole[first : first + shape[0]])
        first += shape[0]
    return whole


def _quantized(source: WeightSource, parts: tuple[Part, ...], form: str) -> Int8Weight | Int4Weight:
    """Part by part, so that only one is ever held in float32 beside the codes."""
    if form == "int8":
        rows = [_finite(source, part, quantize8(_floats(source, part, s))) for part, s in parts]
        return Int8Weight(
            Codes8(torch.cat([r.codes for r in rows]), torch.cat([r.scales for r in rows]))
        )
    pieces = [_codes4(source, *part, form) for part in parts]
    joined = (
        torch.cat([getattr(p, field) for p in pieces]) for field in ("codes", "scales", "zeros")
    )
    return Int4Weight(Codes4(*joined), form)


def _fp8(source: WeightSource, parts: tuple[Part, ...], device: torch.device) -> Fp8Weight:
    """Part by part as above; a GPU turns them into codes itself, as it is the faster one."""
    rows = [
        _finite(source, part, quantize_fp8(_floats(source, part, shape).to(device)))
        for part, shape in parts
    ]
    codes = torch.cat([r.codes for r in rows])
    return Fp8Weight(Codes8Float(codes, torch.cat([r.scales for r in rows])))


def _codes4(source: WeightSource, part: str, shape: Shape, form: str) -> Codes4:
    """The file's own codes where the groups are the same, else the floats quantized."""
    group = group_of(shape[1], form)
    found = source.codes4(part, shape) if isinstance(source, FourBitSource) else None
    if found is not None and found.group == group:
        return found
    return _finite(source, part, quantize4(_floats(source, part, shape), group))


def _floats(source: WeightSource, part: str, shape: Shape) -> torch.Tensor:
    # A mapping of its own goes back to the system; in the heap the codes would lie among the holes.
    rows = torch.frombuffer(mmap.mmap(-1, 4 * math.prod(shape)), dtype=torch.float32).view(shape)
    source.copy_into(part, rows)
    return rows


def _finite(source: WeightSource, part: str, stored: AnyCodes) -> AnyCodes:
    """A value that is no finite number makes its row's or group's scale one as well."""
    if not stored.scales.isfinite().all():
        raise StepscopeError(
            f"Tensor '{source.file_name(part)}' in {source.label} has values that are no finite"
            " numbers, which cannot be quantized; download or convert it again."
        )
    return stored


def _check_inventory(source: WeightSource, plan: dict[str, tuple[Part, ...]]) -> None:
    present = source.shapes()
    wanted = {
        source.file_name(part): source.stored_shape(part, shape)
        for parts in plan.values()
        for part, shape in parts
    }
    missing = [name for name in wanted if name not in present]
    if missing:
        raise StepscopeError(
            f"{source.label} lacks {plural(len(missing), 'tensor')} that its configuration"
            f" promises ({listing(missing, 3)}); download or convert it again."
        )
    extra = sorted(set(present) - set(wanted))
    if extra:
        raise StepscopeError(
            f"{source.label} holds {plural(len(extra), 'tensor')} that a model of the family"
            f" {source.spec.arch} does not have ({listing(extra, 3)}), so it is not one and"
            " not supported; choose an unchanged model of a supported family."
        )
    for name, shape in wanted.items():
        if present[name] != shape:
            raise StepscopeError(
                f"Tensor '{name}' in {source.label} has the shape {list(present[name])} where its"
                f" configuration asks for {list(shape)}; download or convert it again."
            )


def plan_bytes(plan: dict[str, tuple[Part, ...]], dtype: str) -> int:
    shapes = {name: stacked_shape(parts) for name, parts in plan.items()}
    return sum(stored_bytes(s, weight_format(name, s, dtype)) for name, s in shapes.items())


def check_memory(
    label: str, plan: dict[str, tuple[Part, ...]], dtype: str, device: torch.device = CPU
) -> None:
    """StepscopeError, before anything is allocated, if the weights exceed the free memory."""
    check_free(
        f"The weights of {label} in {dtype}",
        plan_bytes(plan, dtype),
        "choose a smaller model or a smaller dtype",
        device,
    )


def check_free(what: str, needed: int, remedy: str, device: torch.device = CPU) -> None:
    """StepscopeError if so many bytes are not free. What is unknown is not refused."""
    free = available_memory() if device.type == "cpu" else _device_memory(device)
    if free is not None and needed > free:
        where = "memory" if device.type == "cpu" else f"the memory of {device}"
        raise StepscopeError(
            f"{what} take {size(needed)} and {size(free)} of {where} is free; {remedy}."
        )


@contextmanager
def memory_told(remedy: str) -> Iterator[None]:
    """StepscopeError where torch or Python gets no memory; other errors pass."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # A GPU's allocator has an error of its own, the CPU's only these words.
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_MEMORY in str(error):
            raise StepscopeError(f"There was not enough memory for a step; {remedy}.") from error
        raise


def _device_memory(device: torch.device) -> int | None:
    """Bytes that are free on a GPU; what torch itself holds in reserve is not counted."""
    return int(torch.cuda.mem_get_info(device)[0]) if device.type == "cuda" else None


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

    def total(*endings: str, experts: bool = False) -> int:
        return sum(
            w.nbytes
            for name, w in weights.items()
            if name.endswith(endings) and (".experts." in name) == experts
        )

    return replace(
        spec,
        dtype=dtype,
        kv_dtype=compute_dtype(dtype),
        linear_bytes=total(".qkv", ".o", ".router", ".gate_up", ".down"),
        expert_bytes=total(".gate_up", ".down", experts=True) if spec.experts else None,
        norm_bytes=total("_norm", "_bias"),
        head_bytes=weights["embed" if spec.tied else "head"].nbytes,
        embedding_bytes=weights["embed"].nbytes,
    )
