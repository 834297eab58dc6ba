"""The twin: the model's own sequence of operations at minimal widths. What it takes is dispatch.

On a CPU nothing else separates the cost of launching operations from the work they do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.models.decoder import Decoder
from stepscope.models.dummy import random_weights
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner
from stepscope.spec import INT4_GROUPS, QUANTIZED, Ceilings, ModelSpec, TwinPoint
from stepscope.stats import median

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


def twin_runner(
    spec: ModelSpec, products: str, tokens: int, page_size: int, attention: str = "auto"
) -> TorchRunner:
    """A runner of the twin whose cache holds so many tokens."""
    small = twin_spec(spec)
    decoder = Decoder(small, random_weights(small, small.dtype, seed=0), products)
    return TorchRunner(decoder, -(-tokens // page_size), page_size, attention)


def measure_twin(
    spec: ModelSpec,
    batches: Sequence[int],
    products: str,
    contexts: Sequence[int] = CONTEXTS,
    page_size: int = 16,
    progress: Callable[[str], None] = lambda text: None,
    attention: str = "auto",
) -> list[TwinPoint]:
    """Median phases of decode steps at each batch and context (both capped by the model)."""
    fitting = sorted({min(c, spec.max_context) for c in contexts})
    most = max(batches) * (fitting[-1] + page_size)
    runner = twin_runner(spec, products, most, page_size, attention)
    points = []
    for context in fitting:
        for batch in batches:
            progress(f"dispatch floor: batch {batch}, context {context}")
            points.append(_point(runner, batch, context, page_size))
    return points


def drift(
    spec: ModelSpec,
    ceilings: Ceilings,
    products: str,
    page_size: int = 16,
    attention: str = "auto",
) -> float:
    """The dispatch floor now over the one in `ceilings`, at its smallest batch and context."""
    before = min(ceilings.twin, key=lambda p: (p.context, p.batch))
    tokens = before.batch * (before.context + page_size)
    runner = twin_runner(spec, products, tokens, page_size, attention)
    now = _point(runner, before.batch, before.context, page_size)
    return now.forward_ns / before.forward_ns


def _point(runner: TorchRunner, batch: int, context: int, page_size: int) -> TwinPoint:
    rows = steps(runner, decode_plan(batch, context, page_size), WARM_STEPS + TIMED_STEPS)
    timed = rows[WARM_STEPS:]

    def typical(values: list[int]) -> int:
        return round(median(values) or 0)

    gathers = [r.gather_ns for r in timed if r.gather_ns is not None]

    return TwinPoint(
        batch,
        context,
        forward_ns=typical([r.forward_ns or 0 for r in timed]),
        gather_ns=typical(gathers) if gathers else None,
        sample_ns=typical([r.sample_ns or 0 for r in timed]),
        step_ns=typical([r.wall_ns for r in timed]),
    )
