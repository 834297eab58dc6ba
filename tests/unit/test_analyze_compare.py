"""Runs side by side."""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepscope.analyze import analyze, compare
from stepscope.analyze.model import Comparison, MetricRow
from stepscope.records import Run, RunMeta
from tests.synthetic import MS, Prefill, make_run, make_spec


def compared(*runs: Run) -> Comparison:
    return compare([(f"run{i}", run, analyze(run)) for i, run in enumerate(runs)])


def row(comparison: Comparison, metric: str) -> MetricRow:
    (found,) = [r for r in comparison.rows if r.metric == metric]
    return found


def test_values_deltas_and_n() -> None:
    found = compared(make_run(), make_run(phases={"forward": 64_800_000}))
    itl = row(found, "p50_itl_ms")
    assert itl.values == (33.8, 67.6)
    assert itl.deltas == (0.0, pytest.approx(1.0))
    assert itl.n == (240, 240) and itl.unit == "ms" and itl.better == "lower"
    assert row(found, "output_tokens_per_s").better == "higher"
    assert found.differences == []
    assert any("without a claim of significance" in n for n in found.notes)


def test_stalls_have_no_relative_difference_from_zero() -> None:
    found = compared(make_run(), make_run(prefills=[Prefill(10, 1400)]))
    assert row(found, "stalls").values == (0.0, 1.0)
    assert row(found, "stalls").deltas == (0.0, None)
    assert row(found, "stall_total_ms").values[1] == pytest.approx(211.3)


def test_missing_is_none() -> None:
    found = compared(make_run(), make_run(0, 0))
    for metric in ("p50_ttft_ms", "goodput_per_s", "mean_step_ms", "stalls"):
        assert row(found, metric).values[1] is None
        assert row(found, metric).deltas[1] is None


DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("stamp", {"stamp": "MODELLED"}),
    ("device", {"device": {"kind": "cpu", "name": "another", "threads": 2}}),
    ("threads", {"device": {"kind": "cpu", "name": "synthetic cpu", "threads": 4}}),
    ("model (layers)", {"spec": make_spec(layers=12)}),
    ("workload", {"workload": {"sha256": "1" * 64}}),
    ("dtype", {"engine": {"dtype": "bf16"}}),
]


@pytest.mark.parametrize(("what", "change"), DIFFERENT, ids=[d[0] for d in DIFFERENT])
def test_what_makes_runs_incomparable(what: str, change: dict[str, Any]) -> None:
    (difference,) = compared(make_run(), make_run(**change)).differences
    assert difference.startswith(f"{what}: run0 ")


def test_an_unrecorded_workload_is_not_taken_for_the_same() -> None:
    bare = make_run(workload={})
    assert compared(bare, bare).differences == [
        "workload: no run recorded which requests it served"
    ]
    assert compared(bare).differences == []


def test_a_run_read_back_from_json_is_the_same_model() -> None:
    run = make_run()
    again = make_run()
    again.meta = RunMeta.from_dict(json.loads(json.dumps(run.meta.to_dict())))
    assert compared(run, again).differences == []


def test_a_field_that_an_older_run_does_not_know_makes_no_other_model() -> None:
    run, older = make_run(), make_run()
    del older.meta.model["source"]
    assert compared(run, older).differences == []
    newer = make_run()
    newer.meta.model["source"] = "hf:org/name@0123"
    assert compared(run, newer).differences == [
        "model (source): run0 None and run1 hf:org/name@0123"
    ]


def test_interrupted_and_noisy_runs_are_named() -> None:
    found = compared(make_run(), make_run(interrupted=True), make_run(noise=[(20, 400 * MS)]))
    assert any("Interrupted" in n and "run1" in n for n in found.notes)
    assert any("cores" in n and "run2" in n for n in found.notes)


def test_nothing_to_compare() -> None:
    assert compare([]).rows[0].values == ()


def test_what_was_set_otherwise_is_told() -> None:
    one, other = make_run(30), make_run(30)
    one.meta.engine |= {"overlap": False, "graphs": "eager"}
    other.meta.engine |= {"overlap": True, "graphs": "eager"}
    result = compare([("a", one, analyze(one)), ("b", other, analyze(other))])
    assert [note for note in result.notes if "engine" in note] == [
        "engine.overlap: a False and b True."
    ]
