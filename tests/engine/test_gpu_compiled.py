"""torch.compile for a GPU, on a CPU: it traces without a break, and the text is the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from stepscope.engine.scheduler import Limits
from stepscope.errors import UsageError
from stepscope.runner.gpu_compiled import CompiledOnGpu
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import Observed, ask, run, same_text, small_decoder

PAGES, PAGE = 40, 16
SIZES = [(9, 20), (30, 12), (3, 25), (17, 8), (22, 15)]


def served(runner: Any, **options: Any) -> Any:
    asked = [ask(i, p, m) for i, (p, m) in enumerate(SIZES)]
    limits = Limits(max_seqs=5, token_budget=64, chunk=16)
    return run(asked, runner=runner, pages=PAGES, page_size=PAGE, limits=limits, **options)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("most", [3, 8])
def test_the_text_is_the_same_and_nothing_compiles_while_serving(most: int, overlap: bool) -> None:
    plain = Observed(TorchRunner(small_decoder(), PAGES, PAGE))
    expected = served(plain)
    torch._dynamo.reset()
    runner = TorchRunner(small_decoder(), PAGES, PAGE)
    told: list[str] = []
    # Its own backend needs a GPU; this one stops after tracing, which fails on any graph break.
    runner.graphs = CompiledOnGpu(
        runner.decoder, runner.attention, (most,), told.append, backend="aot_eager"
    )
    assert told == ["compiling a step of 1 rows", f"compiling a step of {most} rows"]
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    done = served(Observed(runner), overlap=overlap)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    same_text(expected.outputs, plain.gaps, done.outputs)
    decodes = [row for row in done.steps if row.kind == "decode"]
    assert [row.graph_hit for row in decodes] == [
        int((row.num_decode_requests or 0) <= most) for row in decodes
    ]
    hits = [row for row in decodes if row.graph_hit]
    assert hits and all(row.graph == "compile" and row.gather_ns is not None for row in hits)


def test_what_it_cannot_compile_it_refuses() -> None:
    runner = TorchRunner(small_decoder(), PAGES, PAGE)
    object.__setattr__(runner.decoder.spec, "experts", 4)
    with pytest.raises(UsageError, match="--graphs eager"):
        CompiledOnGpu(runner.decoder, runner.attention, (1,), backend="eager")
