"""Compiled steps have no twin: what is above the floor is not split, and the analysis says why."""

from __future__ import annotations

from stepscope.analyze import analyze
from stepscope.records import Run
from tests.synthetic import MS, Prefill, make_run

SLOW = {"forward": 80 * MS}


def compiled_run() -> Run:
    """20 compiled decode steps after warm-up, and a prefill, which is eager."""
    run = make_run(22, prefills=[Prefill(5, 300)], phases=SLOW)
    for row in run.steps:
        row.graph, row.graph_hit = ("compile", 1) if row.kind == "decode" else ("eager", None)
    return run


def test_dispatch_is_not_told_from_inefficiency() -> None:
    analysis = analyze(compiled_run())
    eager = analyze(make_run(22, prefills=[Prefill(5, 300)], phases=SLOW))
    found, before = ({line.key: line.ns for line in a.budget} for a in (analysis, eager))
    assert found["weights"] == before["weights"] and found["kv"] == before["kv"]
    explained = before["dispatch"] + before["inefficient"]
    of_the_prefill = found["dispatch"] + found["inefficient"]
    assert found["forward"] + of_the_prefill == explained
    assert of_the_prefill < explained / 20, "which has a twin, as it is eager"
    assert analysis.card is not None and analysis.card.twin_ns is None
    assert all(point.twin_ns is None for point in analysis.batches)


def test_a_sentence_says_why_and_what_to_do() -> None:
    analysis = analyze(compiled_run())
    assert analysis.verdict.name == "undetermined"
    assert "compiled steps have no twin" in analysis.verdict.sentence
    assert "--graphs eager" in analysis.verdict.advice


def test_an_eager_run_says_nothing_of_it() -> None:
    run = make_run(22)
    for row in run.steps:
        row.graph = "eager"
    assert "compiled" not in analyze(run).verdict.sentence
