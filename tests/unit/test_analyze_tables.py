"""The tables of rules, flags and metrics, and the flags themselves."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from stepscope.analyze import analyze
from stepscope.analyze.budget import TERMS, VERDICT_OF
from stepscope.analyze.rules import FLAGS, METRICS, RULES, SHARES, Thresholds, rule_text
from stepscope.records import Run
from tests.synthetic import MS, Preemption, Prefill, make_ceilings, make_run

NAMES = {f.name for f in fields(Thresholds)}


@pytest.mark.parametrize("name", RULES)
def test_rules_name_every_threshold_they_use(name: str) -> None:
    rule = RULES[name]
    assert set(re.findall(r"\{(\w+)\}", rule.rule)) == set(rule.thresholds) <= NAMES
    assert "{" not in rule_text(name)
    assert rule.falsify and rule.advice and rule.told_apart and rule.evidence


def test_rule_text_prints_the_numbers_in_force() -> None:
    assert "1.5 x the decode-only median for at least 10 %" in rule_text("prefill_stall_bound")
    assert "Fewer than 7 steps" in rule_text("insufficient_data", Thresholds(min_decode_steps=7))


def test_every_budget_line_speaks_for_a_rule() -> None:
    assert set(VERDICT_OF.values()) == set(TERMS) <= set(RULES)
    assert SHARES <= NAMES


def test_flags_name_existing_thresholds() -> None:
    for flag in FLAGS.values():
        assert set(filter(None, flag.threshold.split(", "))) <= NAMES


def test_metrics_cover_the_latencies_and_say_which_way_is_better() -> None:
    assert set(analyze(make_run()).latency) <= set(METRICS)
    assert all(m.better in ("lower", "higher", "") and m.unit for m in METRICS.values())
    assert "gen_ai.server.time_to_first_token" in METRICS["ttft"].other_names


def flags(run: Run) -> dict[str, str]:
    found = dict(analyze(run).flags)
    assert {name.split(":")[0] for name in found} <= set(FLAGS)
    return found


def hol(prompt: int) -> Run:
    """A short request waits 6 steps; a long prompt is computed in most of them."""
    return make_run(prefills=[Prefill(20, prompt), Prefill(22, 50, late_by=3)])


CASES = [
    ("mixed", make_run(phases={"forward": 50 * MS}), make_run(phases={"forward": 40 * MS})),
    ("low_mbu", make_run(phases={"forward": 70 * MS}), make_run(phases={"forward": 55 * MS})),
    ("at_roofline", make_run(phases={"forward": 30 * MS}), make_run()),
    (
        "kv_dominant",
        make_run(prompt_tokens=3000, phases={"forward": 60 * MS}),
        make_run(prompt_tokens=2800, phases={"forward": 60 * MS}),
    ),
    ("host_gap", make_run(phases={"prepare": 4 * MS}), make_run(phases={"prepare": 3 * MS})),
    (
        "top_host_phase:prepare",
        make_run(phases={"prepare": 2 * MS}),
        make_run(phases={"prepare": 1 * MS}),
    ),
    (
        "batch_insensitive",
        make_run(prefills=[Prefill(30, 10, output_tokens=99) for _ in range(4)]),
        make_run(prefills=[Prefill(30, 10, output_tokens=99) for _ in range(3)]),
    ),
    ("kv_full", make_run(kv_pages=48), make_run(kv_pages=52)),
    ("recompute_after_preemption", make_run(preemptions=[Preemption(20, 30)]), make_run()),
    (
        "decode_not_scheduled",
        make_run(prefills=[Prefill(20, 10)]),
        make_run(prefills=[Prefill(20, 10, mixed=True)]),
    ),
    (
        "chunk_budget_too_large",
        make_run(prefills=[Prefill(i, 300, mixed=True) for i in (10, 20, 30)]),
        make_run(prefills=[Prefill(i, 200, mixed=True) for i in (10, 20, 30)]),
    ),
    ("head_of_line", hol(3000), hol(90)),
    ("cpu_contention", make_run(noise=[(20, 240 * MS)]), make_run(noise=[(20, 200 * MS)])),
    ("cpu_contention", make_run(cpu_share=0.79), make_run(cpu_share=0.81)),
    ("gc_gen2", make_run(gc=[(20, 1 * MS)]), make_run()),
]


@pytest.mark.parametrize(
    ("name", "raised", "not_raised"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)]
)
def test_flag_and_just_below(name: str, raised: Run, not_raised: Run) -> None:
    assert name in flags(raised)
    assert name not in flags(not_raised)


def test_young_collections_are_not_full_ones() -> None:
    run = make_run(gc=[(20, 1 * MS)])
    for detail in ("generation 1", "gen 0, 2 objects", ""):
        run.events[0].detail = detail
        assert "gc_gen2" not in flags(run)
    run.events[0].detail = "gen2"
    assert "gc_gen2" in flags(run)


def test_a_flag_without_its_data_is_not_raised() -> None:
    run = make_run(kv_pages=48, cpu_share=0.5)
    for row in run.steps:
        row.kv_total_pages = row.host_cpu_ns = None
    assert not {"kv_full", "cpu_contention"} & set(flags(run))
    assert "low_mbu" not in flags(make_run(phases={"forward": 900 * MS}, ceilings=None))


def test_graph_misses_and_compilations_in_serving() -> None:
    run = make_run(gc=[(20, 5 * MS)])
    run.events[0].kind = "compile"
    for i, row in enumerate(run.steps):
        row.graph_hit = int(i != 30)
    assert {"graph_miss", "jit_in_serving"} <= set(flags(run))


def test_requests_that_wait_for_pages() -> None:
    run = make_run(kv_pages=48)
    for row in run.steps:
        row.num_waiting = 1
    assert "kv_admission_limited" in flags(run)
    for row in run.steps:
        row.num_waiting = 0
    assert "kv_admission_limited" not in flags(run)


def test_the_verdict_carries_the_flags_names() -> None:
    analysis = analyze(make_run(ceilings=make_ceilings(read_bytes_per_s=80e9)))
    assert analysis.verdict.flags == tuple(name for name, _ in analysis.flags)
    assert "low_mbu" in analysis.verdict.flags
