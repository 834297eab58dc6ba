"""The twin: the model's own sequence of operations at minimal widths. What it takes is dispatch.

On a CPU nothing else separates the cost of launching operations from the work they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from stepscope.device.cuda import cuda_timeline
from stepscope.models.decoder import Decoder
from stepscope.models.dummy import random_weights
from stepscope.roofline import Ceilings, TwinPoint
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner
from stepscope.spec import INT4_GROUPS, QUANTIZED, ModelSpec
from stepscope.stats import median

CPU = torch.device("cpu")
WARM_STEPS = 2
TIMED_STEPS = 9
CONTEXTS = (64, 512, 2048)


def twin_spec(spec: ModelSpec) -> ModelSpec:
    """Same layers and operations; every width so small that its work is not measurable.

    One head as well: the scores of many heads over a long context would be work of their own.
    int4 comes in groups of 32 inputs and int8 in 16s: less, and another product would run.
    """
    width = 32 if spec.dtype in INT4_GROUPS else 16
    head_dim = width if spec.dtype in QUANTIZED else 8
    return spec.resized(
        hidden=width, heads=1, kv_heads=1, head_dim=head_dim, intermediate=width, vocab=64
    )


def twin_batches(most: int) -> list[int]:
    """1, 2, 4, ... and the largest batch itself."""
    batches = [1]
    while batches[-1] * 2 <= most:
        batches.append(batches[-1] * 2)
    return batches if batches[-1] == most else [*batches, most]


@dataclass(frozen=True, slots=True)
class Twin:
    """What the twin has in common with the run: all but the widths.

    graphs: gives a runner graphs at these batch sizes; None = it launches one call after the other.
    """

    spec: ModelSpec
    products: str = "plain"
    page_size: int = 16
    attention: str = "auto"
    device: torch.device = CPU
    graphs: Callable[[TorchRunner, Sequence[int]], None] | None = None

    def runner(self, batches: Sequence[int], context: int) -> TorchRunner:
        """Its cache holds the largest batch at this context."""
        small = twin_spec(self.spec)
        weights = random_weights(small, small.dtype, seed=0, device=self.device)
        decoder = Decoder(small, weights, self.products)
        pages = max(batches) * -(-context // self.page_size)
        runner = TorchRunner(decoder, pages, self.page_size, self.attention)
        if self.graphs is not None:
            self.graphs(runner, batches)
        if self.device.type == "cuda":
            runner.timeline, _ = cuda_timeline(time.monotonic_ns)
        return runner


def measure_twin(
    twin: Twin,
    batches: Sequence[int],
    contexts: Sequence[int] = CONTEXTS,
    progress: Callable[[str], None] = lambda text: None,
) -> list[TwinPoint]:
    """Median phases of decode steps at each batch and context (both capped by the model)."""
    fitting = sorted({min(c, twin.spec.max_context) for c in contexts})
    runner = twin.runner(batches, fitting[-1])
    points = []
    for context in fitting:
        for batch in batches:
            progress(f"dispatch floor: batch {batch}, context {context}")
            points.append(_point(runner, batch, context, twin.page_size))
    return points


def drift(twin: Twin, ceilings: Ceilings) -> float:
    """The dispatch floor now over the one in `ceilings`, at its smallest batch and context."""
    before = min(ceilings.twin, key=lambda p: (p.context, p.batch))
    runner = twin.runner([before.batch], before.context)
    now = _point(runner, before.batch, before.context, twin.page_size)
    return now.forward_ns / before.forward_ns


def _point(runner: TorchRunner, batch: int, context: int, page_size: int) -> TwinPoint:
    """On a device that works by itself what counts is how long it took there."""
    rows = steps(runner, decode_plan(batch, context, page_size), WARM_STEPS + TIMED_STEPS)
    timed = rows[WARM_STEPS:]
    where = "" if runner.timeline is None else "dev_"

    def typical(name: str) -> int | None:
        values = [ns for row in timed if (ns := getattr(row, name)) is not None]
        return round(median(values) or 0) if values else None

    return TwinPoint(
        batch,
        context,
        forward_ns=typical(f"{where}forward_ns") or 0,
        gather_ns=typical(f"{where}gather_ns"),
        sample_ns=typical(f"{where}sample_ns") or 0,
        step_ns=typical("wall_ns") or 0,
    )
