"""Decode steps on demand, outside any schedule: warm-up, the twin, the bench."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

from stepscope.engine.plan import Runner, Slice, StepPlan
from stepscope.engine.recorder import Recorder
from stepscope.engine.request import Request, Sampling
from stepscope.records import D2H_WAIT, PREPARE, SAMPLE, RequestRecord, StepRecord


def decode_plan(batch: int, context: int, page_size: int) -> StepPlan:
    """One decode for each of `batch` requests of `context` tokens, pages 0, 1, 2, ..."""
    pages = -(-context // page_size)
    plan = StepPlan(running=batch)
    for i in range(batch):
        record = RequestRecord(id=i, arrival_ns=0, prompt_tokens=context - 1)
        request = Request(record, [0] * context, Sampling(), computed=context - 1)
        request.pages = array("q", range(i * pages, (i + 1) * pages))
        plan.decodes.append(Slice(request, context - 1, 1, "decode", samples=True))
    return plan


def prefill_plan(tokens: int, page_size: int) -> StepPlan:
    """One whole prompt of so many tokens."""
    request = Request(
        RequestRecord(id=0, arrival_ns=0, prompt_tokens=tokens), [0] * tokens, Sampling()
    )
    request.pages = array("q", range(-(-tokens // page_size)))
    return StepPlan(prefills=[Slice(request, 0, tokens, "prefill", samples=True)], running=1)


def steps(
    runner: Runner,
    plan: StepPlan,
    count: int,
    now: Callable[[], int] = time.monotonic_ns,
) -> list[StepRecord]:
    """Run the same plan so many times; one record each, on the recorder's own clock."""
    recorder = Recorder(now)
    for _ in range(count):
        batch = runner.prepare(plan)
        recorder.lap(PREPARE)
        logits = runner.forward(batch, recorder.lap)
        sampled = runner.sample(logits, batch)
        recorder.lap(SAMPLE)
        runner.fetch(sampled)
        recorder.lap(D2H_WAIT)
        recorder.end_step(plan, len(plan.slices))
    rows, _, _ = recorder.drain()
    return rows
