"""Ceilings are measured once per machine, device, dtype and shape, and kept in the cache."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path

from stepscope.cache import cache_directory
from stepscope.device.ceilings import Plan, Progress, gemv_shapes, measure, no_progress
from stepscope.device.cuda import gpu_key
from stepscope.device.host import machine_key
from stepscope.roofline import Ceilings
from stepscope.spec import ModelSpec
from stepscope.store import write_atomically

CACHE_FORMAT = 1  # raised when what is measured changes, so that old files are measured again
# Above this share of all CPU time used by others, what was measured is no ceiling. More than makes
# a block of steps noisy: every rate is a median of repeats that lie seconds apart.
BUSY_SHARE = 0.1


def cache_file(spec: ModelSpec, threads: int, device: str = "cpu") -> Path:
    """Where the ceilings of this machine, thread count, dtype and model shape are kept."""
    where = f"{threads}t" if device == "cpu" else f"{device}-{gpu_key()}"
    shape = (CACHE_FORMAT, gemv_shapes(spec), spec.layers, spec.weight_bytes)
    digest = hashlib.sha256(repr(shape).encode()).hexdigest()[:12]
    return cache_directory() / f"ceilings-{machine_key()}-{where}-{spec.dtype}-{digest}.json"


def load(file: Path) -> Ceilings | None:
    """None if the file is absent or damaged: then they are measured again."""
    try:
        found = Ceilings.from_dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    sizes = [size for size, _ in found.read_curve]
    sound = sizes == sorted(sizes) and all(size > 0 and rate > 0 for size, rate in found.read_curve)
    return found if sizes and sound else None


def save(file: Path, ceilings: Ceilings) -> None:
    """Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(ceilings.to_dict(), indent=1) + "\n")


def load_or_measure(
    spec: ModelSpec,
    threads: int,
    progress: Progress = no_progress,
    refresh: bool = False,
    plan: Plan | None = None,
    device: str = "cpu",
) -> Ceilings:
    """The cached ceilings, or new ones, which are then cached.

    What was measured while others were busy is not: the next run measures again. That, and a cache
    that cannot be written, is told in a note.
    """
    file = cache_file(spec, threads, device)
    if not refresh and (cached := load(file)):
        return cached
    if device == "cuda":
        from stepscope.device.cuda_ceilings import measure_cuda

        ceilings = measure_cuda(spec, progress)
    else:
        ceilings = measure(spec, threads, progress, plan)
    foreign = ceilings.extra.get("foreign_share")
    if foreign is not None and foreign > BUSY_SHARE:
        note = (
            f"the ceilings were measured while other processes used {foreign * 100:.0f} % of the"
            " cores: they may be too low, are not kept, and are measured again next time"
        )
        return replace(ceilings, notes=(*ceilings.notes, note))
    try:
        save(file, ceilings)
    except OSError as error:
        note = f"not cached, as {file} cannot be written ({error.strerror or error})"
        return replace(ceilings, notes=(*ceilings.notes, note))
    return ceilings
