"""No run, however poor, makes the analyzer crash or invent a zero."""

from __future__ import annotations

import time
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.errors import StepscopeError
from stepscope.records import Event, Part, RequestRecord, Run, StepRecord
from tests.synthetic import MS, Preemption, Prefill, make_ceilings, make_run

OPTIONAL = [f.name for f in fields(StepRecord) if f.default is None and f.name != "graph"]
OF_REQUESTS = [f.name for f in fields(RequestRecord) if f.default is None]


def busy_run() -> Run:
    return make_run(
        30,
        prefills=[Prefill(5, 300), Prefill(15, 300, mixed=True, chunks=2, output_tokens=5)],
        preemptions=[Preemption(8, 12)],
        idle=[(20, 5 * MS)],
        gc=[(25, 80 * MS)],
        slo={"ttft_ms": 200, "itl_ms": 50},
    )


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.sampled_from(OPTIONAL)),
    st.sets(st.sampled_from(OF_REQUESTS)),
    st.integers(1, 3),
    st.booleans(),
)
def test_any_column_may_be_missing(
    columns: set[str], of_requests: set[str], every: int, parts: bool
) -> None:
    run = busy_run()
    for row in run.steps[::every]:
        for name in columns:
            setattr(row, name, None)
    for request in run.requests[::every]:
        for name in of_requests:
            setattr(request, name, None)
    run.parts = run.parts if parts else []
    analysis = analyze(run)
    working = sum(s.wall_ns for s in run.steps if s.kind != "idle" and not s.warmup)
    assert sum(line.ns for line in analysis.budget) >= working
    assert len(analysis.steps) == len(run.steps)


small = st.none() | st.integers(0, 5)
anything = st.none() | st.integers(0, 10**8)


@st.composite
def wild_runs(draw: st.DrawFn) -> Run:
    run = make_run(0, 0, ceilings=draw(st.sampled_from([None, make_ceilings()])))
    now = 0
    for step in range(draw(st.integers(0, 30))):
        wall = draw(st.integers(0, 10**8))
        kind = draw(st.sampled_from(["decode", "prefill", "mixed", "idle"]))
        row = StepRecord(step, kind, now, now + wall)
        for name in OPTIONAL:
            setattr(row, name, draw(small if name.startswith(("num", "kv")) else anything))
        run.steps.append(row)
        now += wall
    step = st.integers(0, 40)
    kinds = st.sampled_from(["prefill", "decode", "recompute"])
    run.parts = draw(
        st.lists(st.builds(Part, st.integers(0, 3), kinds, step, step, step, step), max_size=6)
    )
    causes = st.sampled_from(["gc", "noise", "compile", "preempt", "something new"])
    run.events = draw(
        st.lists(st.builds(Event, anything.map(int_or_0), anything.map(int_or_0), causes))
    )
    return run


def int_or_0(value: int | None) -> int:
    return value or 0


@settings(max_examples=60, deadline=None)
@given(wild_runs())
def test_any_values(run: Run) -> None:
    analysis = analyze(run)
    assert analysis.verdict.sentence
    assert len(analysis.answers) == 3
    analysis.to_dict()


def test_no_steps() -> None:
    analysis = analyze(make_run(0, 0))
    assert analysis.verdict.name == "insufficient_data"
    assert analysis.budget == [] and analysis.steps == []
    through = analysis.throughput
    assert (through.output_tokens_per_s, through.mean_step_ns, through.mbu) == (None, None, None)


def test_only_idle() -> None:
    run = make_run(0, 0)
    run.steps = [StepRecord(i, "idle", i * MS, (i + 1) * MS) for i in range(5)]
    analysis = analyze(run)
    assert analysis.verdict.name == "insufficient_data"
    assert analysis.throughput.idle_ns == 5 * MS
    assert [s.verdict for s in analysis.steps] == ["no_load"] * 5


def test_interrupted() -> None:
    analysis = analyze(make_run(interrupted=True))
    assert analysis.finish_reasons == {"unfinished": 4}
    assert analysis.latency["e2e"].n == 0
    assert analysis.latency["ttft"].n == 4
    assert any("did not go to its end" in note for note in analysis.notes)


def test_a_run_without_a_model_is_refused_in_one_sentence() -> None:
    run = make_run(0, 0, model={})
    with pytest.raises(StepscopeError, match="does not describe its model"):
        analyze(run)


def test_ceilings_of_another_dtype_leave_compute_unknown() -> None:
    analysis = analyze(make_run(ceilings=make_ceilings(gemm_flops=1.0), engine={}))
    assert analysis.card.gemm_flops == 1.0
    run = make_run()
    run.meta.ceilings = {**(run.meta.ceilings or {}), "gemm_flops": {}}
    analysis = analyze(run)
    assert analysis.throughput.mfu is None and analysis.card.critical_batch is None
    assert analysis.verdict.name == "bandwidth_bound"


def test_ranks_are_not_pooled() -> None:
    run = make_run(30)
    other = make_run(30)
    for row in other.steps:
        row.rank = 1
    run.steps += other.steps
    analysis = analyze(run)
    assert len(analysis.steps) == len(other.steps)
    assert any("rank 0" in note for note in analysis.notes)


def test_time_grows_linearly_with_steps() -> None:
    """Ten times the steps take about ten times the time, and surely not forty times."""

    def seconds(steps: int) -> float:
        run = make_run(steps, prefills=[Prefill(i, 50, mixed=True) for i in range(0, steps, 3)])
        begin = time.process_time()
        analyze(run)
        return time.process_time() - begin

    # Quadratic time would be a hundredfold. The best of each, since a disturbance only adds.
    assert min(seconds(6000) for _ in range(2)) < 40 * min(seconds(600) for _ in range(3))
