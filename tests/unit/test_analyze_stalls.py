"""Who was held up, by whom, and by how much."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.analyze.model import Stall
from stepscope.records import Run
from tests.synthetic import MS, Preemption, Prefill, make_run

DECODE_NS = 33_800_000


def stalls(run: Run) -> list[Stall]:
    return analyze(run).stalls


def test_a_blocking_prefill_delays_by_all_of_itself() -> None:
    (found,) = stalls(make_run(prefills=[Prefill(10, 1400)]))
    assert found.cause == "prefill" and found.harmful
    assert found.culprits == (4,)
    assert found.victims == (0, 1, 2, 3)
    assert found.excess_ns == found.wall_ns == 1400 * 150_000 + 1_300_000
    assert found.baseline_ns == DECODE_NS
    assert found.prefill_tokens == 1400


def test_a_mixed_step_delays_by_what_exceeds_the_decode_only_median() -> None:
    (found,) = stalls(make_run(prefills=[Prefill(10, 400, mixed=True)]))
    assert found.excess_ns == 400 * 150_000
    assert found.culprits == (4,) and found.victims == (0, 1, 2, 3)


def test_the_excess_is_what_the_victims_gaps_grew_by() -> None:
    run = make_run(prefills=[Prefill(10, 500), Prefill(30, 500, mixed=True)])
    analysis = analyze(run)
    grown = sorted(g - DECODE_NS for g in analysis.itl_ns if g > DECODE_NS)
    assert grown == sorted(4 * [round(s.excess_ns) for s in analysis.stalls])


@pytest.mark.parametrize(("added_ms", "harmful"), [(16, False), (17, True)])
def test_harmful_above_half_of_the_median(added_ms: int, harmful: bool) -> None:
    prefill = Prefill(10, 100, mixed=True, forward_ns=added_ms * MS)
    assert [s.harmful for s in stalls(make_run(prefills=[prefill]))] == [harmful]


def test_below_the_absolute_limit_nothing_is_harmful() -> None:
    tiny = dict.fromkeys(("forward", "gather", "sample"), 40000)
    prefill = Prefill(10, 100, mixed=True, forward_ns=900_000)
    (found,) = stalls(make_run(phases=tiny, prefills=[prefill]))
    assert found.excess_ns > 0.5 * found.baseline_ns
    assert not found.harmful


def test_small_prefills_in_a_row_are_judged_as_one_gap() -> None:
    one = [Prefill(10, 60)]  # 10.3 ms: less than half of 33.8
    assert not any(s.harmful for s in stalls(make_run(prefills=one)))
    row = [Prefill(10, 60), Prefill(10, 60), Prefill(10, 60)]
    found = stalls(make_run(prefills=row))
    assert [s.harmful for s in found] == [True, True, True]
    assert sorted(s.culprits for s in found) == [(4,), (5,), (6,)]


def test_a_finished_request_is_no_victim() -> None:
    run = make_run(prefills=[Prefill(5, 200, output_tokens=8), Prefill(20, 400)])
    last = max(stalls(run), key=lambda s: s.step)
    assert last.culprits == (5,) and last.victims == (0, 1, 2, 3)


def test_recomputation_names_itself() -> None:
    run = make_run(preemptions=[Preemption(20, 30, forward_ns=100 * MS)])
    (found,) = stalls(run)
    assert found.cause == "recompute"
    assert found.culprits == (3,) and found.victims == (0, 1, 2)


@pytest.mark.parametrize(("kind", "cause"), [("gc", "gc"), ("noise", "noise")])
def test_events_explain_long_decode_steps(kind: str, cause: str) -> None:
    run = make_run(**{kind: [(20, 90 * MS)]})  # type: ignore[arg-type]
    (found,) = stalls(run)
    assert found.cause == cause and found.harmful
    assert found.culprits == () and found.victims == (0, 1, 2, 3)


def test_harmful_first_then_by_excess() -> None:
    prefills = [Prefill(10, 20, mixed=True), Prefill(20, 300), Prefill(30, 900), Prefill(40, 10)]
    found = stalls(make_run(prefills=prefills))
    assert [s.harmful for s in found] == [True, True, False, False]
    excesses = [s.excess_ns for s in found]
    assert excesses[:2] == sorted(excesses[:2], reverse=True)
    assert excesses[2:] == sorted(excesses[2:], reverse=True)


def test_the_baseline_is_of_the_same_batch() -> None:
    """16 requests that join make every step slower: that is not a stall."""
    joined = [Prefill(30, 10, output_tokens=1000) for _ in range(4)]

    def slower(i: int) -> dict[str, int]:
        return {"forward": 90 * MS} if i >= 30 else {}

    run = make_run(phases_at=slower, prefills=joined)
    assert not [s for s in stalls(run) if s.step > 36]


def test_without_a_decode_only_step_nothing_is_called_a_stall() -> None:
    prefills = [Prefill(i, 50, mixed=True) for i in range(40)]
    analysis = analyze(make_run(40, prefills=prefills))
    assert analysis.stalls == []
    assert ("stalls", "there is no decode-only step after warm-up to compare with") in (
        analysis.not_available
    )
    assert analysis.answers[2].short == "cannot tell"


def test_long_gaps_are_attributed() -> None:
    run = make_run(
        prefills=[Prefill(10, 1400)], gc=[(40, 300 * MS)], preemptions=[Preemption(20, 30)]
    )
    (note,) = [n for n in analyze(run).notes if "token gap" in n]
    assert note.startswith("9 token gaps above 4 x")
    assert "8 contain a harmful stall, 1 follow a preemption, 0 are unexplained" in note
