"""Every verdict, from a run that triggers it and one just below its threshold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stepscope.analyze import analyze
from stepscope.analyze.rules import RULES
from stepscope.analyze.thresholds import Thresholds
from stepscope.records import Event, RequestRecord, Run
from tests.synthetic import MS, US, Preemption, Prefill, make_ceilings, make_run

# Of the default run: 59 decode steps of 33.8 ms count, so 221.6 ms more are 10 % of the time;
# reading weights and cache takes 25.79 ms of a mean step.


def verdict(run: Run) -> tuple[str, str]:
    found = analyze(run).verdict
    assert found.name in RULES
    return found.name, found.sub


def with_phase(name: str, ms: float) -> Run:
    return make_run(phases={name: round(ms * MS)})


def gc_run(ms: int) -> Run:
    return make_run(gc=[(20, ms * MS)])


def preempted(ms: int) -> Run:
    return make_run(preemptions=[Preemption(20, 30, forward_ns=ms * MS)])


def prefilled(ms: int, mixed: bool = False) -> Run:
    return make_run(prefills=[Prefill(20, 400, mixed=mixed, forward_ns=ms * MS)])


def idling(ms: float) -> Run:
    """4 requests of 40 tokens work for 1396.3 ms before the engine idles."""
    return make_run(output_tokens=40, idle=[(45, round(ms * MS))])


def pending(share: float) -> Run:
    """Half of the run is idle; a request is outside the engine for a share of that."""
    run = idling(2000)
    row = run.steps[-1]
    arrival = row.end_ns - round(share * row.wall_ns)
    run.requests.append(RequestRecord(99, arrival, 10, queued_ns=row.end_ns))
    return run


def forward_run(forward_ms: float, twin_ms: float = 4, gemm: float = 120e9) -> Run:
    ceilings = make_ceilings(twin_ns=round(twin_ms * MS), gemm_flops=gemm)
    return make_run(phases={"forward": round(forward_ms * MS)}, ceilings=ceilings)


BANDWIDTH = ("bandwidth_bound", "weights")

CASES = [
    ("insufficient_data", "", make_run(decode_steps=20), make_run(decode_steps=21)),
    ("pause_bound", "gc", gc_run(222), gc_run(221)),
    ("kv_pressure_bound", "", preempted(221), preempted(220)),
    ("prefill_stall_bound", "", prefilled(221), prefilled(220)),
    ("prefill_stall_bound", "", prefilled(225, mixed=True), prefilled(215, mixed=True)),
    ("no_load", "", idling(1397), idling(1395)),
    ("host_bound", "schedule", with_phase("schedule", 25.5), with_phase("schedule", 25.2)),
    ("host_bound", "detok", with_phase("detok", 25.6), with_phase("detok", 25.2)),
    ("sampling_bound", "", with_phase("sample", 25.9), with_phase("sample", 25.7)),
    ("copy_bound", "gather", with_phase("gather", 25.9), with_phase("gather", 25.7)),
    ("launch_bound", "", forward_run(53, twin_ms=25.9), forward_run(53, twin_ms=25.7)),
    ("kernel_inefficient", "", forward_run(55.8), forward_run(55.4)),
    ("compute_bound", "", forward_run(31, gemm=40e9), forward_run(31, gemm=46e9)),
]


@pytest.mark.parametrize(
    ("name", "sub", "above", "below"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_triggers_and_just_below(name: str, sub: str, above: Run, below: Run) -> None:
    assert verdict(above) == (name, sub)
    assert verdict(below) == BANDWIDTH


def test_frontend_bound_needs_requests_outside_for_half_of_the_idle_time() -> None:
    assert verdict(pending(0.51))[0] == "frontend_bound"
    assert verdict(pending(0.49))[0] == "no_load"


def test_idle_with_waiting_requests_is_not_no_load() -> None:
    run = idling(2000)
    run.steps[-1].num_waiting = 1
    assert verdict(run) == BANDWIDTH


def test_bandwidth_names_kv_where_the_cache_outweighs_the_weights() -> None:
    # 538 MB of weights / 46,080 B per token = 11,677 tokens
    long = make_run(prompt_tokens=3000, phases={"forward": 60 * MS})
    short = make_run(prompt_tokens=2800, phases={"forward": 60 * MS})
    assert verdict(long) == ("bandwidth_bound", "kv")
    assert verdict(short) == BANDWIDTH
    assert "--kv-cache-dtype" in analyze(long).verdict.advice


def test_a_pause_needs_more_than_half_of_the_excess() -> None:
    run = gc_run(400)
    event = run.events[0]
    run.events = [replace(event, end_ns=event.begin_ns + 190 * MS)]
    assert verdict(run) == BANDWIDTH
    run.events = [replace(event, end_ns=event.begin_ns + 210 * MS)]
    assert verdict(run) == ("pause_bound", "gc")


def test_preemption_at_a_full_cache_is_pressure_even_without_recomputation() -> None:
    def run(used: int) -> Run:
        found = make_run(phases_at=lambda i: {"schedule": 400 * MS} if i == 20 else {})
        row = next(s for s in found.steps if s.wall_ns > 400 * MS)
        row.num_preempted, row.kv_used_pages, row.kv_total_pages = 1, used, 100
        return found

    assert verdict(run(98))[0] == "kv_pressure_bound"
    assert verdict(run(97)) == BANDWIDTH


def test_without_ceilings_the_verdict_says_what_to_do() -> None:
    analysis = analyze(make_run(ceilings=None))
    assert analysis.verdict.name == "undetermined"
    assert "stepscope ceilings" in analysis.verdict.advice
    assert analysis.card.read_bytes_per_s is None
    assert all(s.floor_ns is None and s.mbu is None for s in analysis.steps)
    assert any("no ceilings" in why for _, why in analysis.not_available)


def test_what_a_clock_measured_decides_without_ceilings() -> None:
    run = make_run(phases={"schedule": 40 * MS}, ceilings=None)
    assert verdict(run) == ("host_bound", "schedule")
    assert analyze(prefilled(221)).verdict.name == "prefill_stall_bound"


def test_without_a_twin_dispatch_and_inefficiency_are_not_told_apart() -> None:
    no_twin = make_ceilings(twin=())
    assert verdict(make_run(phases={"forward": 60 * MS}, ceilings=no_twin))[0] == "undetermined"
    assert verdict(make_run(phases={"forward": 40 * MS}, ceilings=no_twin)) == BANDWIDTH


def test_harmless_prefills_do_not_fire_the_tail_branch() -> None:
    many = [Prefill(i, 16, mixed=True, forward_ns=10 * MS) for i in range(3, 58, 2)]
    analysis = analyze(make_run(prefills=many))
    assert analysis.verdict.name == "compute_bound"  # of 20 tokens per step, and no stall
    assert len(analysis.stalls) == len(many)
    assert not any(s.harmful for s in analysis.stalls)


def test_prefills_while_nothing_decodes_are_not_stalls() -> None:
    run = make_run(output_tokens=30, prefills=[Prefill(50, 4000), Prefill(52, 4000)])
    analysis = analyze(run)
    assert analysis.stalls == []
    assert analysis.verdict.name != "prefill_stall_bound"


def test_unexplained_long_steps_are_not_given_a_tail_verdict() -> None:
    run = make_run(phases_at=lambda i: {"forward": 900 * MS} if i == 20 else {})
    analysis = analyze(run)
    assert analysis.verdict.name not in ("pause_bound", "kv_pressure_bound", "prefill_stall_bound")
    assert analysis.stalls[0].cause == "unknown"


def test_steps_have_their_own_verdicts() -> None:
    run = make_run(
        prefills=[Prefill(10, 1400)],
        gc=[(20, 100 * MS)],
        preemptions=[Preemption(30, 35, forward_ns=90 * MS)],
        phases_at=lambda i: {"sample": 50 * MS} if i == 45 else {},
        idle=[(50, 5 * MS)],
    )
    names = [s.verdict for s in analyze(run).steps]
    assert names.count("prefill_stall_bound") == 1
    assert names.count("pause_bound") == 1
    assert names.count("kv_pressure_bound") == 1
    assert names.count("sampling_bound") == 1
    assert names.count("no_load") == 1
    assert names.count("bandwidth_bound") > 50


def test_thresholds_can_be_replaced() -> None:
    run = prefilled(220)
    assert analyze(run, Thresholds(tail_share=0.09)).verdict.name == "prefill_stall_bound"
    assert analyze(run, Thresholds(min_decode_steps=100)).verdict.name == "insufficient_data"


def test_the_verdict_shows_three_numbers_gain_advice_and_how_to_falsify() -> None:
    found = analyze(make_run()).verdict
    assert [e.value for e in found.evidence] == pytest.approx([76.3, 5.17, 22.0], rel=1e-2)
    assert found.gain.startswith("33.8 -> 20.9 ms")
    assert found.advice and found.falsify
    assert found.runners_up[0][0] == "launch_bound"
    assert found.runners_up[0][1] == pytest.approx(4 / 33.8)


def test_at_the_roof_there_is_nothing_to_fix() -> None:
    found = analyze(forward_run(29.9)).verdict
    assert found.gain.startswith("at the roof, nothing to fix")
    assert "at_roofline" in found.flags


def test_events_of_no_duration_explain_nothing() -> None:
    run = make_run(phases_at=lambda i: {"other": 900 * MS} if i == 20 else {})
    row = next(s for s in run.steps if s.wall_ns > 900 * MS)
    run.events = [Event(row.begin_ns + US, row.begin_ns + US, "gc")]
    assert analyze(run).stalls[0].cause == "unknown"


class TestAnswers:
    def test_bandwidth(self) -> None:
        bound, cache, prefills = analyze(make_run()).answers
        assert bound.short == "bandwidth-bound"
        assert "76 %" in bound.sentence and "dispatch 12 %" in bound.sentence
        assert cache.sentence.startswith("Weights: 538 MB of 567 MB read per step (95 %)")
        assert prefills.sentence == "No: no prefill ran while others decoded."

    def test_neither(self) -> None:
        bound = analyze(forward_run(70)).answers[0]
        assert bound.sentence.startswith("Neither first: 55 %")
        assert "kernel inefficiency" in bound.sentence

    def test_yes_names_culprit_victims_time_and_step(self) -> None:
        sentence = analyze(make_run(prefills=[Prefill(10, 1400)])).answers[2].sentence
        assert sentence.startswith(
            "Yes: request 4's 1,400-token prefill held up 4 requests for 211 ms (step 11)"
        )

    def test_the_chunks_of_one_prompt_are_one_prefill(self) -> None:
        run = make_run(prefills=[Prefill(20, 1400, mixed=True, chunks=2)])
        assert "request 4's 1,400-token prefill" in analyze(run).answers[2].sentence
        assert "(steps 21 and 22)" in analyze(run).answers[2].sentence

    def test_no_gives_the_worst_cost(self) -> None:
        run = make_run(prefills=[Prefill(20, 20, mixed=True, forward_ns=4 * MS)])
        assert analyze(run).answers[2].sentence == (
            "No: 1 step prefilled while others decoded; the worst cost 4.00 ms over the "
            "decode-only median."
        )

    def test_cannot_tell(self) -> None:
        answers = analyze(make_run(0, 0)).answers
        assert all(a.sentence.startswith("Cannot tell") for a in answers)
        assert analyze(make_run(ceilings=None)).answers[0].short == "cannot tell"

    def test_without_a_twin_the_floor_is_still_told(self) -> None:
        run = make_run(phases={"forward": 60 * MS}, ceilings=make_ceilings(twin=()))
        sentence = analyze(run).answers[0].sentence
        assert "no twin was measured" in sentence
        assert "reading weights and cache at the measured ceiling takes 41 %" in sentence


def test_short_prefills_that_cost_little_are_called_a_little() -> None:
    short = make_run(decode_steps=100, prefills=[Prefill(50, 40, mixed=True, forward_ns=40 * MS)])
    assert analyze(short).answers[2].sentence.startswith("A little: request")
    long = make_run(decode_steps=100, prefills=[Prefill(50, 40, mixed=True, forward_ns=140 * MS)])
    assert analyze(long).answers[2].sentence.startswith("Yes: request")


def test_a_run_that_is_chunked_is_not_told_to_chunk() -> None:
    long = Prefill(20, 1400, mixed=True, chunks=4, forward_ns=200 * MS)

    def advice(policy: str) -> str:
        run = make_run(decode_steps=60, prefills=[long])
        run.meta.policy = policy
        found = analyze(run).verdict
        assert found.name == "prefill_stall_bound"
        return found.advice + found.falsify

    assert "chunk=256" in advice("prefill-first")
    assert "chunk=175" in advice("chunked,chunk=350")
    assert "chunk=256" not in advice("chunked,chunk=350")
