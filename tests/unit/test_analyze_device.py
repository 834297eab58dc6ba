"""Runs with a device timeline: time counts once, as the device's or as what it waited for."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze import analyze
from stepscope.analyze.device import has_device, seen_from_device
from stepscope.analyze.frame import build_frame
from stepscope.analyze.thresholds import Thresholds
from stepscope.records import PHASES, Run, StepRecord
from tests.synthetic import make_run
from tests.synthetic_device import MS, US


@dataclass(frozen=True)
class Work:
    """One step: what the host does before launching it and after its tokens came; the device."""

    schedule: int = 300 * US
    launch: int = 400 * US
    device: int = 9 * MS
    commit: int = 200 * US
    detok: int = 100 * US
    lag: int = 20 * US  # from the begin of launching to the device's
    sample: int = 500 * US


def simulate(works: list[Work], overlap: bool) -> list[StepRecord]:
    """The loop and a device beside it. The device computes in order, the host waits for results."""
    rows: list[StepRecord] = []
    now, free = 0, 0
    ends: list[int] = []
    for i, work in enumerate(works):
        row = StepRecord(i, "decode", now, now)
        now += work.schedule
        begin = max(free, now + work.lag)
        now += work.launch
        free = begin + work.device
        ends.append(free)
        row.dev_begin_ns, row.dev_end_ns = begin, free
        row.dev_sample_ns, row.dev_forward_ns = work.sample, work.device - work.sample
        due = i - 1 if overlap else i
        wait = max(0, ends[due] - now) if due >= 0 else 0
        now += wait
        phases = {
            "schedule": work.schedule,
            "forward": work.launch,
            "d2h_wait": wait,
            "commit": work.commit,
            "detok": work.detok,
        }
        if due < 0:
            phases |= {"commit": 0, "detok": 0}
        for name in PHASES:
            setattr(row, f"{name}_ns", phases.get(name, 0))
        now += phases["commit"] + phases["detok"]
        row.end_ns = now
        row.host_cpu_ns = row.wall_ns - wait
        if due >= 0:
            row.result_step, row.emitted_ns, row.num_output_tokens = due, now, 4
        row.num_decode_requests, row.sum_decode_kv_tokens = 4, 400
        rows.append(row)
    return rows


def check(seen: list[StepRecord], rows: list[StepRecord]) -> None:
    """Exclusive, contiguous, nothing lost: like the rows of a run with one timeline."""
    assert seen[0].begin_ns == rows[0].begin_ns
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(seen))
    for row in seen:
        assert sum(row.phase_ns(name) or 0 for name in PHASES) == row.wall_ns
        assert all((row.phase_ns(name) or 0) >= 0 for name in PHASES)


def test_without_overlap_the_host_phases_are_exposed() -> None:
    rows = simulate([Work()] * 30, overlap=False)
    seen = seen_from_device(rows)
    check(seen, rows)
    for row in seen[1:]:
        assert (row.schedule_ns, row.commit_ns, row.detok_ns) == (300 * US, 200 * US, 100 * US)
        assert (row.forward_ns, row.sample_ns) == (8_500 * US, 500 * US)
        assert row.other_ns == 20 * US, "the first launch, for which the device waits"
        assert row.d2h_wait_ns == 0 and row.wall_ns == 9 * MS + 620 * US


def test_with_overlap_they_are_hidden() -> None:
    rows = simulate([Work()] * 30, overlap=True)
    seen = seen_from_device(rows)
    check(seen, rows)
    for row in seen[2:]:
        assert row.wall_ns == 9 * MS
        assert row.schedule_ns == row.commit_ns == row.detok_ns == row.other_ns == 0


def test_with_overlap_only_what_exceeds_the_device_is_exposed() -> None:
    """The host needs 10 ms a step and the device 9: one is seen, and which phase it is."""
    rows = simulate([Work(schedule=9_300 * US)] * 30, overlap=True)
    seen = seen_from_device(rows)
    check(seen, rows)
    for row in seen[2:]:
        exposed = row.wall_ns - 9 * MS
        assert exposed == 1 * MS + 20 * US - 20 * US
        assert row.schedule_ns and row.schedule_ns > 0.9 * exposed


def test_a_long_step_is_its_own_and_not_its_neighbours() -> None:
    works = [Work()] * 10 + [Work(device=50 * MS)] + [Work()] * 10
    rows = simulate(works, overlap=True)
    assert rows[11].wall_ns > 40 * MS, "on the host it is the next iteration that waits"
    walls = [row.wall_ns for row in seen_from_device(rows)]
    assert walls[10] == 50 * MS and walls[11] == walls[9] == 9 * MS


def test_tokens_keep_the_step_that_made_them() -> None:
    rows = simulate([Work()] * 6, overlap=True)
    seen = seen_from_device(rows)
    assert [row.result_step for row in seen] == [0, 1, 2, 3, 4, None]
    assert seen[2].emitted_ns == rows[3].emitted_ns and seen[5].emitted_ns is None


def test_idle_rows_count_only_while_the_device_is_idle() -> None:
    rows = simulate([Work()] * 4, overlap=True)
    last = rows[-1]
    idle = StepRecord(4, "idle", last.end_ns, (last.dev_end_ns or 0) + 30 * MS, d2h_wait_ns=8 * MS)
    seen = seen_from_device([*rows, idle])
    check(seen, rows)
    assert seen[-1].wall_ns == seen[-1].recv_ns == 30 * MS


def test_a_step_without_device_times_is_unknown() -> None:
    rows = simulate([Work()] * 4, overlap=False)
    rows[2].dev_begin_ns = rows[2].dev_end_ns = None
    assert has_device(rows)
    seen = seen_from_device(rows)
    assert all(seen[2].phase_ns(name) is None for name in PHASES)
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(seen))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_nothing_is_lost_whatever_the_times(seed: int, overlap: bool) -> None:
    random = Random(seed)

    def some(most: int) -> int:
        return random.choice([0, random.randrange(most), most])

    works = []
    for _ in range(random.randrange(1, 12)):
        device = some(30_000)
        works.append(
            Work(some(9_000), some(9_000), device, some(900), some(900), some(300), device // 7)
        )
    rows = simulate(works, overlap)
    seen = seen_from_device(rows)
    check(seen, rows)
    assert seen[-1].end_ns >= (rows[-1].dev_end_ns or 0)


def test_a_step_that_waited_for_the_tokens_of_the_last_is_charged_to_its_own_phases() -> None:
    """With penalties the loop lands first: what the device waits for came after the tokens."""
    spent = {"d2h_wait": 9 * MS, "detok": 1 * MS, "schedule": 2 * MS, "prepare": 3 * MS}
    first = StepRecord(0, "decode", 0, 0, dev_begin_ns=0, dev_end_ns=9 * MS)
    row = StepRecord(1, "decode", 0, 15 * MS, dev_begin_ns=15 * MS, dev_end_ns=20 * MS)
    for name, ns in spent.items():
        setattr(row, f"{name}_ns", ns)
    row.result_step, row.emitted_ns = 0, 10 * MS
    seen = seen_from_device([first, row])[1]
    assert (seen.detok_ns, seen.schedule_ns, seen.prepare_ns) == (1 * MS, 2 * MS, 3 * MS)
    assert seen.d2h_wait_ns == 0 and seen.wall_ns == 11 * MS


def damage(rows: list[StepRecord], random: Random) -> None:
    """What no engine writes and a file may still say."""
    for row in rows:
        begin, end = row.dev_begin_ns or 0, row.dev_end_ns or 0
        changes: list[dict[str, int | str | None]] = [
            {"dev_begin_ns": None},
            {"dev_begin_ns": None, "dev_end_ns": None},
            {"dev_begin_ns": end, "dev_end_ns": begin},
            {"dev_end_ns": begin},
            {"dev_begin_ns": begin - 40_000},
            {"dev_end_ns": end + 40_000},
            {"dev_forward_ns": random.choice([None, 0, -7, 10**9]), "dev_gather_ns": 5},
            {"kind": random.choice(["idle", "prefill", "mixed"])},
            {"result_step": random.choice([None, 0, 10**6]), "emitted_ns": None},
            {"schedule_ns": random.choice([None, -5, 10**9])},
            {"end_ns": row.begin_ns},
            {"begin_ns": row.begin_ns + 20_000},
            *[{}] * 12,
        ]
        for name, value in random.choice(changes).items():
            setattr(row, name, value)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 100_000), st.booleans())
def test_damaged_rows_still_sum(seed: int, overlap: bool) -> None:
    random = Random(seed)
    rows = simulate([Work()] * random.randrange(1, 20), overlap)
    damage(rows, random)
    rows.sort(key=lambda row: row.begin_ns)
    seen = seen_from_device(rows)
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(seen))
    for row in seen:
        spent = [row.phase_ns(name) for name in PHASES]
        assert row.wall_ns >= 0 and all(ns is None or ns >= 0 for ns in spent)
        assert set(spent) == {None} or sum(ns or 0 for ns in spent) == row.wall_ns
    run = make_run(len(rows))
    run.steps = rows
    analyze(run)


# ------------------------------------------------------------------ verdicts


def served(works: list[Work], overlap: bool = False) -> Run:
    """The simulated rows as a run of the synthetic model."""
    run = make_run(len(works))
    run.steps = simulate(works, overlap)
    for part in run.parts:
        part.last_step = min(part.last_step, len(works) - 1)
    return run


BYTES_MS = 538_060_032 / 22e9 * 1e3  # the synthetic model's weights at its read ceiling


def bound(device_ms: float, overlap: bool = False, **changes: int) -> str:
    work = Work(device=round(device_ms * MS), **changes)
    return analyze(served([work] * 40, overlap)).verdict.name


def test_a_device_at_the_ceiling_is_bandwidth_bound() -> None:
    assert bound(BYTES_MS + 5) == "bandwidth_bound"


@pytest.mark.parametrize("schedule,name", [(30, "host_bound"), (22, "bandwidth_bound")])
def test_a_host_that_the_device_waits_for_longest_is_the_bound(schedule: int, name: str) -> None:
    assert bound(BYTES_MS + 5, schedule=schedule * MS) == name


@pytest.mark.parametrize("overlap,name", [(False, "host_bound"), (True, "bandwidth_bound")])
def test_overlap_hides_the_host(overlap: bool, name: str) -> None:
    """The ablation: the same work, one flag."""
    assert bound(BYTES_MS + 5, overlap, schedule=27 * MS) == name


@pytest.mark.parametrize("sample,name", [(40, "sampling_bound"), (20, "bandwidth_bound")])
def test_sampling_on_the_device_is_told(sample: int, name: str) -> None:
    assert bound(BYTES_MS + 5 + sample, sample=sample * MS) == name


def test_a_waiting_engine_thread_is_no_contention() -> None:
    result = analyze(served([Work(device=40 * MS)] * 40, overlap=True))
    assert "cpu_contention" not in {flag.name for flag in result.flags}
    assert any("device did them" in note for note in result.notes)


def test_the_frame_is_seen_from_the_device() -> None:
    frame = build_frame(served([Work()] * 40, overlap=True), Thresholds())
    assert frame.two_timelines
    assert all(frame.rows[i].wall_ns == 9 * MS for i in frame.working[3:])


def flags(works: list[Work], overlap: bool = False) -> set[str]:
    return {name for name, _ in analyze(served(works, overlap)).flags}


@pytest.mark.parametrize("launch,paced", [(9, True), (7, False)])
def test_launching_that_sets_the_pace_is_told(launch: int, paced: bool) -> None:
    """The device ends with the last launch; what differs is how much of the step that takes."""
    work = Work(launch=launch * MS, device=launch * MS, lag=0, schedule=(10 - launch) * MS)
    assert ("launch_paced" in flags([work] * 40)) == paced


def test_a_device_that_works_on_after_the_last_launch_is_not_paced_by_it() -> None:
    work = Work(launch=9 * MS, device=11 * MS, lag=0, schedule=100 * US)
    assert "launch_paced" not in flags([work] * 40)


def test_one_timeline_says_nothing_about_launching() -> None:
    assert "launch_paced" not in {name for name, _ in analyze(make_run(40)).flags}
