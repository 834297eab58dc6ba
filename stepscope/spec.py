"""A model and a device as plain numbers, and what a step costs: bytes and FLOPs by arithmetic."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stepscope.stats import interpolate

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a Llama-family decoder.

    linear_bytes, head_bytes and norm_bytes are the bytes of the tensors as loaded that one step
    reads; they are None until a loader has seen real tensors. The embedding table is not part of
    a step's weight bytes unless it is tied and so serves as the output head.
    """

    name: str
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True
    dtype: str = "fp32"
    kv_dtype: str = "fp32"
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    linear_bytes: int | None = None  # all layers' projections
    norm_bytes: int | None = None
    head_bytes: int | None = None
    embedding_bytes: int | None = None  # resident, but read by the row

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelSpec:
        return cls(**{**raw, "eos_ids": tuple(raw["eos_ids"])})

    @property
    def layer_linears(self) -> tuple[tuple[str, int, int], ...]:
        """(name, out, in) of the matrix products of one layer, fused as they are run."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        return (
            ("qkv", qkv, self.hidden),
            ("o", self.hidden, self.heads * self.head_dim),
            ("gate_up", 2 * self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        )

    @property
    def linear_params(self) -> int:
        return self.layers * sum(rows * cols for _, rows, cols in self.layer_linears)

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step which samples reads once."""
        element = ELEMENT_BYTES[self.dtype]
        linear = self.linear_params * element if self.linear_bytes is None else self.linear_bytes
        head = self.head_params * element if self.head_bytes is None else self.head_bytes
        norms = (2 * self.layers + 1) * self.hidden * element
        return linear + head + (norms if self.norm_bytes is None else self.norm_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token holds in the cache: K and V of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    def resized(self, **changes: Any) -> ModelSpec:
        """The same model with other dimensions; byte counts as loaded no longer hold."""
        unknown = {"linear_bytes": None, "norm_bytes": None, "head_bytes": None}
        return replace(self, **{**unknown, "embedding_bytes": None, **changes})


def step_kv_bytes(spec: ModelSpec, context_tokens: int) -> int:
    """K and V read by attention: 2 x layers x kv_heads x head_dim x sum of context x element."""
    return spec.kv_bytes_per_token * context_tokens


def linear_flops(spec: ModelSpec, tokens: int, sampled_rows: int) -> int:
    """2 FLOPs per parameter and token; the head only for rows that are sampled."""
    return 2 * spec.linear_params * tokens + 2 * spec.head_params * sampled_rows


def attention_flops(spec: ModelSpec, query_key_pairs: int) -> int:
    """QK^T and PV: 4 x layers x heads x head_dim per (query, key) pair (FlashAttention, sec. 4)."""
    return 4 * spec.layers * spec.heads * spec.head_dim * query_key_pairs


def prefill_pairs(requests: int, tokens: int, cached_tokens: int) -> int:
    """(query, key) pairs of causal prefills, from sums.

    Exact for one request and for equal ones: a chunk of c tokens after s cached ones has
    c*s + c*(c+1)/2 pairs. Sums of unequal chunks are treated as equal ones.
    """
    if requests == 0:
        return 0
    return round(tokens * (cached_tokens + (tokens + requests) / 2) / requests)


@dataclass(frozen=True, slots=True)
class GemvPoint:
    """Measured matrix-vector product at one of the model's own shapes."""

    name: str
    rows: int
    cols: int
    dtype: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TwinPoint:
    """A step of the minimal-width twin: what is left when the work is gone is dispatch."""

    batch: int
    context: int
    forward_ns: int
    gather_ns: int
    sample_ns: int
    step_ns: int


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device was measured to reach. Rates are per second, sizes in bytes."""

    device: str
    threads: int
    measured_utc: str
    read_curve: tuple[tuple[int, float], ...]  # (working set bytes, bytes/s), ascending
    copy_bytes_per_s: float | None
    gemm_flops: dict[str, float]  # dtype -> FLOP/s
    gemv: tuple[GemvPoint, ...] = ()
    twin: tuple[TwinPoint, ...] = ()
    notes: tuple[str, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Ceilings:
        return cls(
            **{
                **raw,
                "read_curve": tuple((int(a), float(b)) for a, b in raw["read_curve"]),
                "gemv": tuple(GemvPoint(**p) for p in raw["gemv"]),
                "twin": tuple(TwinPoint(**p) for p in raw["twin"]),
                "notes": tuple(raw["notes"]),
            }
        )

    def read_rate(self, working_set_bytes: float) -> float:
        """Read bandwidth at this working set: linear in log(size) between measured points."""
        xs = [math.log(size) for size, _ in self.read_curve]
        return interpolate(
            math.log(max(working_set_bytes, 1)), xs, [rate for _, rate in self.read_curve]
        )

    def twin_forward_ns(self, batch: int, context: int) -> float | None:
        """Dispatch cost of a forward at this batch and mean context, interpolated."""
        if not self.twin:
            return None
        contexts = sorted({p.context for p in self.twin})
        by_context = [self._over_batch(c, batch) for c in contexts]
        return interpolate(context, contexts, by_context)

    def _over_batch(self, context: int, batch: int) -> float:
        points = sorted((p.batch, p.forward_ns) for p in self.twin if p.context == context)
        return interpolate(batch, [b for b, _ in points], [float(ns) for _, ns in points])
