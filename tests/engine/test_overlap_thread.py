"""The thread that computes: same text with a real model, device columns, errors that surface."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from stepscope.device.timeline import clock_timeline
from stepscope.engine.scheduler import Limits
from stepscope.runner.threaded import ThreadedRunner
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import (
    Observed,
    Outcome,
    ask,
    build,
    finish,
    run,
    same_text,
    small_decoder,
)
from tests.engine.test_invariance import reference, requests

SCARCE = 320 // 16


def threaded(runner: Any) -> ThreadedRunner:
    getattr(runner, "inner", runner).timeline = clock_timeline(time.monotonic_ns)
    return ThreadedRunner(runner)


@pytest.mark.parametrize("thread", [False, True], ids=["same-thread", "own-thread"])
@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("policy,prefix", [("chunked", "off"), ("prefill-first", "radix")])
def test_the_text_is_the_same(policy: str, prefix: str, swap: bool, thread: bool) -> None:
    expected, gaps = reference()
    observed = Observed(TorchRunner(small_decoder(), SCARCE, 16))
    runner = threaded(observed) if thread else observed
    limits = Limits(max_seqs=8, token_budget=64, chunk=16)
    done = run(
        requests(),
        policy,
        pages=SCARCE,
        limits=limits,
        runner=runner,
        prefix=prefix,
        swap=swap,
        overlap=True,
    )
    if isinstance(runner, ThreadedRunner):
        runner.close()
    same_text(expected, gaps, done.outputs)
    assert done.preemptions


@pytest.mark.parametrize("sampling", [{"seed": 7, "temperature": 1.1}, {"min_tokens": 6}])
def test_draws_and_edits_do_not_depend_on_overlap(sampling: dict[str, Any]) -> None:
    def texts(overlap: bool) -> dict[int, list[int]]:
        runner = threaded(TorchRunner(small_decoder(), 64, 16))
        asked = [
            ask(i, 6 + i, 12, repetition_penalty=1.0 + 0.3 * (i % 2), **sampling) for i in range(5)
        ]
        done = run(
            asked, runner=runner, overlap=overlap, forget=False, eos=list(range(40)), pages=64
        )
        runner.close()
        return done.outputs

    assert texts(True) == texts(False)


def test_logprobs_belong_to_their_tokens() -> None:
    def values(overlap: bool) -> list[list[float]]:
        runner = threaded(TorchRunner(small_decoder(), 64, 16))
        asked = [ask(i, 6 + i, 5, logprobs=1) for i in range(3)]
        done = run(asked, runner=runner, overlap=overlap, forget=False, pages=64)
        runner.close()
        found: list[list[float]] = [[] for _ in asked]
        for outputs in done.emitted:
            for out in outputs:
                assert out.logprobs is not None and out.logprobs.top_ids[0] == out.token
                found[out.request.id].append(out.logprobs.logprob)
        return found

    for one, other in zip(values(True), values(False), strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def overlapped(pages: int = 64) -> tuple[Outcome, ThreadedRunner]:
    runner = threaded(TorchRunner(small_decoder(), pages, 16))
    asked = [ask(i, 9, 6) for i in range(3)]
    return build(asked, runner=runner, overlap=True, forget=False, pages=pages), runner


def test_the_thread_is_the_device_of_the_run() -> None:
    made, runner = overlapped()
    done = finish(made)
    runner.close()
    rows = [row for row in done.steps if row.num_decode_requests is not None]
    for row in rows:
        parts = (row.dev_forward_ns, row.dev_gather_ns, row.dev_sample_ns)
        assert all(part is not None and part > 0 for part in parts)
        span = (row.dev_end_ns or 0) - (row.dev_begin_ns or 0)
        assert 0.5 * span < sum(part or 0 for part in parts) <= span
        assert row.num_syncs == 1
    begins = [row.dev_begin_ns or 0 for row in rows]
    assert begins == sorted(begins)


def test_a_row_that_fails_fails_alone() -> None:
    made, runner = overlapped()
    inner: Any = runner.inner
    forward = inner.forward

    def broken(batch: Any, lap: Any) -> torch.Tensor:
        logits: torch.Tensor = forward(batch, lap).clone()
        if len(batch.plan.decodes) == 3:
            row = [s.request.id for s in batch.plan.decodes].index(1)
            logits[row] = float("nan")
        return logits

    inner.forward = broken
    done = finish(made)
    runner.close()
    reasons = {i: r.finish_reason for i, r in done.records.items()}
    assert reasons == {0: "length", 1: "error", 2: "length"}
    assert len(done.outputs[1]) == 1
    assert sum(row.num_extra_tokens or 0 for row in done.steps) == 1


def test_an_error_in_the_thread_reaches_the_engine() -> None:
    before = threading.enumerate()
    made, runner = overlapped()

    def broken(*args: Any) -> None:
        raise RuntimeError("out of memory, say")

    runner.inner.forward = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        finish(made)
    runner.close()
    assert not [t for t in threading.enumerate() if t not in before]
