"""The budget sums to the time of the working steps, whatever the phases are."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.records import PHASES, Run
from tests.synthetic import MS, Prefill, make_ceilings, make_run, make_spec

phase_times = st.fixed_dictionaries({name: st.integers(0, 10**9) for name in PHASES})


def working_ns(run: Run) -> int:
    return sum(s.wall_ns for s in run.steps if s.kind != "idle" and not s.warmup)


@settings(max_examples=40, deadline=None)
@given(st.lists(phase_times, min_size=1, max_size=8), st.booleans(), st.booleans())
def test_sums_exactly(rows: list[Mapping[str, int]], ceilings: bool, mixed: bool) -> None:
    run = make_run(
        30,
        phases_at=lambda i: rows[i % len(rows)],
        prefills=[Prefill(5, 300, mixed=mixed)],
        idle=[(7, 12345)],
        ceilings=make_ceilings() if ceilings else None,
    )
    analysis = analyze(run)
    assert sum(line.ns for line in analysis.budget) == working_ns(run)
    assert sum(analysis.phase_totals.values()) == working_ns(run)
    assert all(line.ns >= 0 for line in analysis.budget)
    if working_ns(run):
        assert sum(line.share for line in analysis.budget) == pytest.approx(1, abs=1e-9)


def lines(run: Run) -> dict[str, float]:
    return {line.key: line.ns for line in analyze(run).budget}


def test_forward_is_split_into_floor_dispatch_and_rest() -> None:
    run = make_run(21)  # 20 working steps
    found = lines(run)
    forward = 20 * 31 * MS
    parts = [found[k] for k in ("weights", "kv", "dispatch", "inefficient")]
    assert sum(parts) == forward
    assert found["dispatch"] == 20 * 4 * MS
    # 538,060,032 B (less nothing: every step samples) at 22 GB/s
    assert found["weights"] / 20 == pytest.approx(538_060_032 / 22e9 * 1e9, rel=1e-6)


def test_time_that_no_phase_claims_is_other() -> None:
    run = make_run(30)
    for row in run.steps:
        row.other_ns = row.emit_ns = None
    found = lines(run)
    assert found["other"] == sum(65_000 for s in run.steps if not s.warmup)
    assert sum(found.values()) == working_ns(run)


def test_without_phases_the_time_is_unknown_not_other() -> None:
    run = make_run(30)
    for row in run.steps:
        for name in PHASES:
            setattr(row, f"{name}_ns", None)
    analysis = analyze(run)
    assert [line.key for line in analysis.budget] == ["unknown"]
    assert analysis.phase_totals == {}
    assert analysis.verdict.name == "undetermined"


def test_floor_first_then_twin_and_a_note_where_they_exceed_forward() -> None:
    run = make_run(31, phases={"forward": 27 * MS})
    found = lines(run)
    assert found["inefficient"] == 0
    assert 0 < found["dispatch"] / 30 < 4 * MS
    notes = " ".join(analyze(run).notes)
    assert "In 30 of 30 steps floor plus twin exceed the measured forward" in notes
    assert "exceed the measured" not in " ".join(analyze(make_run()).notes)


def test_the_head_is_read_only_by_steps_that_sample() -> None:
    spec = make_spec()
    run = make_run(prefills=[Prefill(10, 300, chunks=2)])
    first, last = [s for s in analyze(run).steps if s.kind == "prefill"][1:]
    assert (first.output_tokens, last.output_tokens) == (0, 1)
    assert last.weight_bytes == spec.weight_bytes
    assert spec.weight_bytes - first.weight_bytes == 49152 * 576 * 4
    assert last.kv_bytes == 300 * spec.kv_bytes_per_token


def test_mbu_is_bytes_over_time_over_the_read_rate() -> None:
    step = analyze(make_run()).steps[10]
    total = step.weight_bytes + step.kv_bytes
    assert step.mbu == pytest.approx(total / (33.8e-3) / 22e9)


def test_a_profiled_step_is_left_out() -> None:
    run = make_run(30)
    run.steps[10].sampled = 1
    assert sum(line.ns for line in analyze(run).budget) == working_ns(run) - run.steps[10].wall_ns


def test_what_ifs_follow_from_the_budget() -> None:
    found = {w.change: w for w in analyze(make_run()).what_ifs}
    assert found["dispatch gone"].after_ns == pytest.approx(29.8 * MS)
    weights_ms = 538_060_032 / 22e9 * 1e3
    assert found["weights halved"].after_ns == pytest.approx((33.8 - weights_ms / 2) * MS, rel=1e-3)
    doubled = found["batch doubled"]
    assert doubled.per_token and doubled.before_ns == pytest.approx(33.8 * MS / 4)
    assert doubled.before_ns / 2 < doubled.after_ns < doubled.before_ns
    assert all(w.sentence.startswith("Estimated") for w in found.values())
    assert analyze(make_run(ceilings=None)).what_ifs == []


def test_card() -> None:
    card = analyze(make_run()).card
    assert card.weight_bytes == 538_060_032
    assert card.kv_bytes_per_token == 46_080
    assert card.bound_ns == pytest.approx(24.457 * MS, rel=1e-4)
    assert card.twin_ns == 4 * MS
    # 120 GFLOP/s x 4 bytes per weight / (2 x 22 GB/s) = 10.9
    assert card.critical_batch == pytest.approx(10.9, rel=1e-2)


def test_batches_hold_decode_only_steps() -> None:
    run = make_run(40, prefills=[Prefill(20, 200, output_tokens=100, mixed=True)])
    points = {p.batch: p for p in analyze(run).batches}
    assert set(points) == {4, 5}
    assert points[5].n == 19
    assert points[4].p50_ns == 33.8 * MS
    assert points[4].tokens_per_s == pytest.approx(4 / 33.8e-3)
