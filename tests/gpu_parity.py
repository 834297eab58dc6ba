"""The tiny checkpoint on a device: every way to run gives what transformers gave on a CPU."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from stepscope.device.timeline import clock_timeline
from stepscope.engine.scheduler import Limits
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model
from stepscope.runner.graphs import CudaGraphs
from stepscope.runner.threaded import ThreadedRunner
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import TIE, Observed, ask, run, same_text

CHECKPOINT = Path(__file__).parent / "data" / "parity"
PAGE = 16
PLENTY, SCARCE = 64, 18  # pages; the second makes the engine preempt
NEAR = 5  # the fp32 id is among so many best in bf16 and fp16


@dataclass(frozen=True)
class Way:
    """One way to run."""

    name: str
    attention: str = "gather"
    graphs: bool = False
    overlap: bool = False
    pages: int = PLENTY
    options: dict[str, Any] = field(default_factory=dict)


def ways(cuda: bool) -> list[Way]:
    found = [
        Way("gather"),
        Way("gather, chunks of 7", options={"limits": Limits(max_seqs=6, chunk=7)}),
        Way("gather, preempted", pages=SCARCE),
        Way("gather, swapped", pages=SCARCE, options={"swap": True}),
        Way("gather, overlap", overlap=True),
    ]
    if cuda:
        found += [
            Way("paged", "paged"),
            Way("paged, chunks of 7", "paged", options={"limits": Limits(max_seqs=6, chunk=7)}),
            Way("paged, preempted", "paged", pages=SCARCE),
            Way("paged, radix cache", "paged", options={"prefix": "radix"}),
            Way("paged, graphs", "paged", graphs=True),
            Way("paged, graphs, overlap", "paged", graphs=True, overlap=True),
            Way("paged, graphs, overlap, preempted", "paged", True, True, SCARCE),
        ]
    return found


def parity(device: str) -> list[dict[str, Any]]:
    """A row per way and dtype: what was compared and what differed ('' = nothing)."""
    return list(compared(device))


def compared(device: str) -> Iterator[dict[str, Any]]:
    """The rows of `parity`, each as soon as it is known."""
    torch.set_float32_matmul_precision("highest")  # an environment may have said otherwise
    reference = json.loads((CHECKPOINT / "ids.json").read_text())
    decoder = _decoder("fp32", device)
    cuda = device == "cuda"
    for way in ways(cuda):
        yield _row(way, "fp32", partial(_compare, way, decoder, reference))
    for dtype in ("bf16", "fp16"):
        low = _decoder(dtype, device)
        for attention in ("gather", "paged") if cuda else ("gather",):
            check = partial(_near, attention, low, reference)
            yield _row(Way(attention, attention), dtype, check)


def _decoder(dtype: str, device: str) -> Decoder:
    model = load_model(str(CHECKPOINT), dtype, device=device)
    return Decoder(model.spec, model.weights)


def _row(way: Way, dtype: str, check: Callable[[], str]) -> dict[str, Any]:
    """A check that fails or breaks is a row, so that the others are still made."""
    try:
        found = check()
    except Exception as error:  # whatever a GPU answers belongs into the table
        found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return {"way": way.name, "dtype": dtype, "differs": found}


def _compare(way: Way, decoder: Decoder, reference: Sequence[dict[str, Any]]) -> str:
    runner = TorchRunner(decoder, way.pages, PAGE, way.attention)
    if way.graphs:
        graphs = runner.graphs = CudaGraphs(decoder, runner.attention, (1, 2, 4, 6))
        graphs.prepare()
    threaded = None
    if way.overlap and runner.device.type == "cpu":
        runner.timeline = clock_timeline(time.monotonic_ns)
        threaded = ThreadedRunner(runner)
    asked = [ask(i, r["prompt"], len(r["ids"]), ignore_eos=True) for i, r in enumerate(reference)]
    options: dict[str, Any] = {"limits": Limits(max_seqs=6), **way.options}
    done = run(
        asked,
        runner=threaded or Observed(runner),
        pages=way.pages,
        page_size=PAGE,
        overlap=way.overlap,
        forget=threaded is None,
        **options,
    )
    if threaded is not None:
        threaded.close()
    if way.pages == SCARCE and not done.preemptions:
        return "nothing was preempted, so this shows nothing"
    expected = {i: r["ids"] for i, r in enumerate(reference)}
    gaps = {i: r["gaps"] for i, r in enumerate(reference)}
    try:
        ties = same_text(expected, gaps, done.outputs, allowed=1.0)
    except AssertionError as error:
        return str(error)
    return "" if len(ties) <= 1 else f"{len(ties)} ties closer than {TIE}"


def _near(attention: str, decoder: Decoder, reference: Sequence[dict[str, Any]]) -> str:
    """In fewer bits: the fp32 id is among the NEAR best after every prompt and prefix of it."""
    observed = Observed(TorchRunner(decoder, PLENTY, PAGE, attention), keep_logits=True)
    asked = [
        ask(100 * i + n, r["prompt"] + r["ids"][:n], 1, ignore_eos=True)
        for i, r in enumerate(reference)
        for n in (0, 7, 19)
    ]
    run(asked, runner=observed, pages=PLENTY, page_size=PAGE, limits=Limits(max_seqs=6))
    missed = []
    for request, logits in observed.logits.items():
        wanted = reference[request // 100]["ids"][request % 100]
        best: list[int] = logits[0].float().topk(NEAR).indices.tolist()
        if wanted not in best:
            missed.append(request)
        if not bool(torch.isfinite(logits[0]).all()):
            return f"request {request} has logits that are not finite"
    return f"{len(missed)} of {len(asked)} not among the {NEAR} best" if missed else ""


if __name__ == "__main__":
    for row in compared(*sys.argv[1:]):
        print(json.dumps(row), flush=True)
