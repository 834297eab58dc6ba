"""A model, the ceilings of a device and a run's meta data, in round numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stepscope.records import RunMeta, Sample
from stepscope.roofline import Ceilings, GemvPoint, TwinPoint
from stepscope.spec import ModelSpec

US = 1_000
MS = 1_000_000
PAGE = 16


def make_spec(**changes: Any) -> ModelSpec:
    """SmolLM2-135M: 134.5 M parameters read per step, 46,080 bytes of KV per token in fp32."""
    base: dict[str, Any] = {
        "name": "smollm2-135m",
        "arch": "llama",
        "layers": 30,
        "hidden": 576,
        "heads": 9,
        "kv_heads": 3,
        "head_dim": 64,
        "intermediate": 1536,
        "vocab": 49152,
        "max_context": 8192,
        "rope_theta": 100000.0,
        "eos_ids": (2,),
    }
    return ModelSpec(**{**base, **changes})


def make_ceilings(
    read_bytes_per_s: float = 22e9,
    gemm_flops: float = 120e9,
    twin_ns: int = 4 * MS,
    **changes: Any,
) -> Ceilings:
    """Measured-looking ceilings: a cache plateau 1.6x above memory, a twin nearly flat in batch."""
    curve = (
        (16 << 20, 1.6 * read_bytes_per_s),
        (64 << 20, 1.3 * read_bytes_per_s),
        (256 << 20, read_bytes_per_s),
        (1 << 30, read_bytes_per_s),
    )
    twin = tuple(
        TwinPoint(b, c, twin_ns, 200 * US, 50 * US, twin_ns + 600 * US)
        for b in (1, 4, 16)
        for c in (64, 1024)
    )
    base: dict[str, Any] = {
        "device": "cpu",
        "threads": 2,
        "measured_utc": "2026-01-02T03:04:05Z",
        "read_curve": curve,
        "copy_bytes_per_s": 9e9,
        "gemm_flops": {"fp32": gemm_flops, "bf16": 2 * gemm_flops},
        "gemv": (
            GemvPoint("qkv", 960, 576, "fp32", 18e9),
            GemvPoint("down", 576, 1536, "fp32", 20e9),
        ),
        "twin": twin,
    }
    return Ceilings(**{**base, **changes})


def make_meta(
    requests: int,
    kv_pages: int,
    label: str,
    spec: ModelSpec | None,
    ceilings: Ceilings | str | None,
    slo: Mapping[str, float] | None,
    complete: bool,
    changes: dict[str, Any],
) -> RunMeta:
    measured = make_ceilings() if isinstance(ceilings, str) else ceilings
    used = spec or make_spec()
    sample = Sample(0, "The capital of France is", " Paris.", [7, 8], [" Paris", "."])
    base: dict[str, Any] = {
        "run_id": "20260102T030405Z-synthetic-chunked-0a1b2c",
        "label": label,
        "stamp": "MEASURED",
        "created_utc": "2026-01-02T03:04:05Z",
        "scenario": "synthetic",
        "policy": label,
        "model": used.to_dict(),
        "device": {"kind": "cpu", "name": "synthetic cpu", "threads": 2},
        "engine": {
            "page_size": PAGE,
            "kv_pages": kv_pages,
            "budget": 2048,
            "chunk": 512,
            "max_seqs": 16,
            "dtype": used.dtype,
            "graphs": "eager",
        },
        "complete": complete,
        "command": ["stepscope", "run", "synthetic"],
        "workload": {"sha256": "0" * 64, "requests": requests},
        "slo": dict(slo or {}),
        "ceilings": measured.to_dict() if measured else None,
        "clock": {"source": "perf_counter_ns", "resolution_ns": 40, "timelines": 1},
        "recorder": {"ns_per_step": 1_700, "laps_per_step": 11},
        "basis": {"host": "measured", "device": "absent", "telemetry": "absent"},
        "versions": {"stepscope": "0.1.0", "python": "3.12.0"},
        "samples": [sample],
    }
    return RunMeta(**{**base, **changes})
