"""What a step had to move and compute, and how long that takes at the measured ceilings."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.records import StepRecord
from stepscope.roofline import Ceilings
from stepscope.spec import (
    ModelSpec,
    attention_flops,
    head_bytes,
    linear_flops,
    prefill_pairs,
    product_dtype,
    step_kv_bytes,
    windowed_decode_tokens,
    windowed_pairs,
    windowed_prefill_tokens,
)

CONTEXT_GRAIN = 16  # the twin is interpolated on a grid: dispatch hardly depends on context


@dataclass(frozen=True, slots=True)
class StepCost:
    """Bytes, FLOPs and the times they need at least; None where no ceiling was measured."""

    weight_bytes: int = 0
    kv_bytes: int = 0
    flops: int = 0
    context_tokens: int = 0
    memory_ns: float | None = None
    compute_ns: float | None = None
    twin_ns: float | None = None

    @property
    def floor_ns(self) -> float | None:
        """max(memory, compute) of those that are known."""
        known = [ns for ns in (self.memory_ns, self.compute_ns) if ns is not None]
        return max(known) if known and self.memory_ns is not None else None

    @property
    def compute_limited(self) -> bool:
        return (self.compute_ns or 0.0) > (self.memory_ns or 0.0)


NO_COST = StepCost()


def computes_tokens(row: StepRecord) -> bool:
    return bool((row.num_decode_requests or 0) + (row.sum_prefill_tokens or 0))


class CostModel:
    """StepRecord -> StepCost for one model on one device."""

    def __init__(self, spec: ModelSpec, ceilings: Ceilings | None, dtype: str) -> None:
        self.spec = spec
        self.ceilings = ceilings
        self.gemm_flops = ceilings.gemm_flops.get(product_dtype(dtype)) if ceilings else None
        self._twin: dict[tuple[int, int], float | None] = {}

    def of(self, row: StepRecord) -> StepCost:
        """Cost of one step: weights once, KV of every token attended to (cost formulas in spec.py).

        Without work columns nothing is known about the step and nothing is charged.
        """
        if not computes_tokens(row):
            return NO_COST
        decodes, prefills = row.num_decode_requests or 0, row.num_prefill_requests or 0
        new, cached = row.sum_prefill_tokens or 0, row.sum_prefill_kv_tokens or 0
        rows_sampled = decodes if row.num_output_tokens is None else row.num_output_tokens
        context = (row.sum_decode_kv_tokens or 0) + cached + new
        weights = self.spec.weight_bytes_of(decodes + new, row.expert_reads)
        weights -= 0 if rows_sampled else head_bytes(self.spec)
        kv, attention = self._attention(row, max(prefills, min(new, 1)))
        flops = linear_flops(self.spec, decodes + new, rows_sampled) + attention
        rate = self.read_rate(weights + kv)
        return StepCost(
            weights,
            kv,
            flops,
            context,
            (weights + kv) / rate * 1e9 if rate else None,
            flops / self.gemm_flops * 1e9 if self.gemm_flops else None,
            # What was compiled is not the twin's sequence of operations.
            None if row.graph == "compile" else self.twin_ns(decodes + prefills, context),
        )

    def _attention(self, row: StepRecord, prefills: int) -> tuple[int, int]:
        """(bytes of K and V, FLOPs); local layers read no more than their window."""
        spec, decodes = self.spec, row.num_decode_requests or 0
        new, cached = row.sum_prefill_tokens or 0, row.sum_prefill_kv_tokens or 0
        decoded = row.sum_decode_kv_tokens or 0
        seen = windowed_decode_tokens(spec, decodes, decoded)
        local = seen + windowed_prefill_tokens(spec, prefills, new, cached)
        pairs = decoded + prefill_pairs(prefills, new, cached)
        local_pairs = seen + windowed_pairs(spec, prefills, new, cached)
        return (
            step_kv_bytes(spec, decoded + cached + new, local),
            attention_flops(spec, pairs, local_pairs),
        )

    def read_rate(self, working_set_bytes: float) -> float | None:
        """Measured read bandwidth in bytes/s at this working set; None if never measured."""
        if self.ceilings is None or not self.ceilings.read_curve:
            return None
        return self.ceilings.read_rate(working_set_bytes)

    def twin_ns(self, batch: int, context_tokens: int) -> float | None:
        """The twin's forward at this batch and its mean context; None if never measured."""
        if self.ceilings is None:
            return None
        mean = context_tokens / max(batch, 1)
        key = (batch, round(mean / CONTEXT_GRAIN) * CONTEXT_GRAIN)
        if key not in self._twin:
            self._twin[key] = self.ceilings.twin_forward_ns(*key)
        return self._twin[key]
