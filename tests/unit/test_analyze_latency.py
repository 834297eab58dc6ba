"""Latencies, by hand."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.analyze.frame import build_frame
from stepscope.analyze.latency import long_gaps, token_times
from stepscope.analyze.thresholds import Thresholds
from stepscope.records import Event, Part, RequestRecord, Run, StepRecord
from tests.synthetic import MS, Prefill, make_run


def hand_made() -> Run:
    """Steps of 10 ms; tokens are out 1 ms before the end of a step.

    Request 0 (arrived at 2 ms): prefill in step 1, decodes 2 and 3, is preempted, computed again
    in step 5 (which gives its 4th token), decodes 6. Request 1 has one token, in step 1.
    """
    run = make_run(0, 0)
    run.steps = [
        StepRecord(i, "decode", i * 10 * MS, (i + 1) * 10 * MS, emitted_ns=(i * 10 + 9) * MS)
        for i in range(8)
    ]
    run.parts = [
        Part(0, "recompute", 5, 5, 30, 1),
        Part(0, "decode", 6, 6, 1, 1),
        Part(0, "prefill", 1, 1, 20, 1),
        Part(0, "decode", 2, 3, 1, 2),
        Part(1, "prefill", 0, 0, 8, 0),
        Part(1, "prefill", 1, 1, 4, 1),
    ]
    first = RequestRecord(0, 2 * MS, 20, queued_ns=10 * MS, admitted_ns=10 * MS)
    first.first_token_ns, first.finished_ns = 19 * MS, 69 * MS
    first.output_tokens, first.preemptions, first.finish_reason = 5, 1, "length"
    second = RequestRecord(1, 0, 12, queued_ns=0, admitted_ns=0, first_token_ns=19 * MS)
    second.finished_ns, second.output_tokens, second.finish_reason = 19 * MS, 1, "eos"
    run.requests = [first, second]
    return run


def test_by_hand_with_a_preemption() -> None:
    analysis = analyze(hand_made())
    assert analysis.itl_ns == [10 * MS, 10 * MS, 20 * MS, 10 * MS]
    found = analysis.latency
    assert (found["ttft"].n, found["ttft"].max, found["ttft"].p50) == (2, 19 * MS, 18 * MS)
    assert found["queue"].mean == 4 * MS  # 8 and 0
    assert found["prefill"].mean == 14 * MS  # 9 and 19
    assert found["tpot"].n == 1 and found["tpot"].p50 == (69 - 19) / 4 * MS
    assert "1 request had one token: n/a" in found["tpot"].note
    assert found["e2e"].max == 67 * MS
    assert found["normalized"].mean == (67 / 5 + 19) / 2 * MS


def test_a_request_that_was_swapped_out_comes_back_with_a_decode() -> None:
    """Only the event tells that its pause was a preemption: it decodes in 2, 3 and again in 6."""

    def gap(preempted_in: int | None) -> bool:
        run = hand_made()
        run.parts = [
            Part(0, "prefill", 1, 1, 20, 1),
            Part(0, "decode", 2, 3, 1, 2),
            Part(0, "decode", 6, 6, 1, 1),
        ]
        if preempted_in is not None:
            moment = preempted_in * 10 * MS + 9 * MS
            run.events = [Event(moment, moment, "preempt", 0)]
        (found,) = long_gaps(token_times(build_frame(run, Thresholds())), 2.5)
        return found.preempted

    assert gap(4) and gap(5)
    assert not gap(None) and not gap(1), "then it was blocked"


def test_under_overlap_a_token_is_out_when_its_result_is_committed() -> None:
    run = hand_made()
    for row in run.steps:
        row.result_step = row.step - 1 if row.step else None
    run.steps[0].emitted_ns = None
    assert analyze(run).itl_ns == [10 * MS, 10 * MS, 20 * MS, 10 * MS]
    run.steps[3].emitted_ns = run.steps[3].emitted_ns + 5 * MS  # of step 2's tokens
    assert analyze(run).itl_ns == [15 * MS, 5 * MS, 20 * MS, 10 * MS]


def test_percentiles_carry_n_and_say_when_they_mean_little() -> None:
    few = analyze(hand_made()).latency["itl"]
    assert few.n == 4 and "p99 of 4 values" in few.note
    many = analyze(make_run()).latency["itl"]
    assert many.n == 240 and many.note == ""
    none = analyze(make_run(0, 0)).latency["itl"]
    assert (none.n, none.p50, none.max) == (0, None, None)


def test_goodput_judges_both_slos() -> None:
    def attained(**slo: float) -> tuple[int, int]:
        run = hand_made()
        run.meta.slo = slo
        found = analyze(run).goodput
        assert found.requests_per_s == found.attained / 0.08
        return found.attained, found.judged

    assert attained(ttft_ms=19) == (2, 2)
    assert attained(ttft_ms=18) == (1, 2)
    assert attained(itl_ms=20) == (2, 2)
    assert attained(itl_ms=19) == (1, 2)  # the p99 of 10, 10, 20, 10 is 19.7; one token has none
    assert attained(ttft_ms=18, itl_ms=19) == (0, 2)


def test_failed_requests_are_judged_aborted_ones_are_not() -> None:
    run = hand_made()
    run.meta.slo = {"ttft_ms": 1000}
    run.requests[0].error, run.requests[0].finish_reason = "prompt too long", "error"
    run.requests[1].finish_reason = "aborted"
    analysis = analyze(run)
    assert (analysis.goodput.attained, analysis.goodput.judged) == (0, 1)
    assert analysis.failures == [(0, "prompt too long")]
    assert analysis.finish_reasons == {"error": 1, "aborted": 1}
    assert analysis.latency["e2e"].n == 0


def test_without_an_slo_goodput_is_not_available() -> None:
    found = analyze(hand_made()).goodput
    assert (found.slo, found.judged, found.requests_per_s) == ({}, 0, None)


@pytest.mark.parametrize(("late_by", "late"), [(0, False), (1, False), (2, True), (5, True)])
def test_late_admission(late_by: int, late: bool) -> None:
    """Arrived during iteration i: begun by the end of i + 1 is on time."""
    run = make_run(prefills=[Prefill(20, 50, late_by=late_by)])
    found = analyze(run).late_admissions
    assert [r for r, _ in found] == ([4] if late else [])
    if late:
        assert found[0][1] == pytest.approx((late_by + 0.5) * 33.8 * MS)


def test_cached_tokens_are_not_computed_ones() -> None:
    run = make_run(prefills=[Prefill(20, 50)])
    assert analyze(run).prefix_hit_tokens is None and analyze(run).prefix_hit_share is None
    plain = analyze(run).throughput.total_tokens_per_s
    for row in run.steps:
        row.prefix_hit_tokens = 150 if row.sum_prefill_tokens == 50 else 0
    computed = sum(row.sum_prefill_tokens or 0 for row in run.steps)
    found = analyze(run)
    assert found.prefix_hit_tokens == 150
    assert found.prefix_hit_share == 150 / (150 + computed)
    assert found.throughput.total_tokens_per_s == plain


def test_throughput_counts_idle_time() -> None:
    run = make_run(30, idle=[(10, 1000 * MS)])
    found = analyze(run).throughput
    assert found.idle_ns == 1000 * MS
    assert found.output_tokens == 4 * 31
    assert found.output_tokens_per_s == pytest.approx(found.output_tokens / found.wall_ns * 1e9)
    assert found.mean_step_ns == 33.8 * MS


def test_one_long_gap_misses_an_itl_slo_however_many_short_ones_there_are() -> None:
    run = make_run(decode_steps=300, batch=1, prefills=[Prefill(100, 1400)], slo={"itl_ms": 100})
    assert analyze(run).goodput.attained == 1  # the prefill's own request, which had no gap
    assert analyze(make_run(decode_steps=300, batch=1, slo={"itl_ms": 100})).goodput.attained == 1
