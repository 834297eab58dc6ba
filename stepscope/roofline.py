"""What a device was measured to reach: bandwidth, FLOP rates, and the dispatch floor of a twin."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from stepscope.stats import interpolate


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
    gather_ns: int | None  # None: pages were read in place
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
