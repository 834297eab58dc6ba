"""What a page carries: whole numbers, unpacked as packed, reduced only above the limit."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import pytest

from stepscope.analyze import analyze
from stepscope.records import PHASES
from stepscope.report import embed
from tests.synthetic import Prefill, make_run


def unpack(text: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(gzip.decompress(base64.b64decode(text)))
    return loaded


def test_columns_are_integers_and_phases_sum_to_the_wall_time() -> None:
    run = make_run(prefills=[Prefill(at=20, tokens=300, mixed=True)], ceilings=None)
    steps = unpack(embed.run_data("x", run, analyze(run))["packed"])["steps"]
    assert steps["step"] == [s.step for s in run.steps]
    assert steps["wall"] == [s.wall_ns for s in run.steps]
    assert steps["mbu"] == [None] * len(run.steps)  # unknown is null, never 0
    for name, values in steps.items():
        if isinstance(values, list) and name not in ("kinds", "verdicts"):
            assert all(v is None or type(v) is int for v in values), name
    for i, wall in enumerate(steps["wall"]):
        assert sum(steps["phases"][p][i] or 0 for p in PHASES) == wall


def test_packing_is_reproducible() -> None:
    assert embed.pack({"a": [1, None]}) == embed.pack({"a": [1, None]})
    assert unpack(embed.pack({"a": [1, None]})) == {"a": [1, None]}


def test_script_json_cannot_close_its_element() -> None:
    hostile = "</script><!--&\u2028"
    text = embed.script_json({"k": hostile})
    assert "<" not in text and ">" not in text and "&" not in text
    assert json.loads(text) == {"k": hostile}


def test_few_steps_are_all_kept_and_nothing_is_announced() -> None:
    views = analyze(make_run(decode_steps=30)).steps
    rows, sentence = embed.reduce_steps(views, set())
    assert [row[0] for row in rows] == views
    assert sentence == ""


def test_many_steps_become_groups_that_keep_what_stands_out() -> None:
    run = make_run(decode_steps=900, prefills=[Prefill(at=400, tokens=300, mixed=True)])
    found = analyze(run)
    keep = embed.standing_out(found)
    assert keep
    rows, sentence = embed.reduce_steps(found.steps, keep, most=100)
    assert len(rows) <= 100
    assert sum(row[3] for row in rows) == len(found.steps)
    assert keep <= {row[0].step for row in rows if row[3] == 1}
    assert (rows[0][1], rows[-1][2]) == (found.steps[0].begin_ns, found.steps[-1].end_ns)
    assert f"{len(found.steps)} steps" in sentence and f"{len(rows)} rows" in sentence


def test_a_group_shows_its_median_step_and_knows_its_longest() -> None:
    ns = [30, 90, 50, 70, 40]
    run = make_run(decode_steps=5, phases_at=lambda i: {"forward": ns[i] * 1_000_000})
    views = [v for v in analyze(run).steps if v.kind == "decode"]
    (row,), _ = embed.reduce_steps(views, set(), most=1)
    walls = sorted(v.wall_ns for v in views)
    assert (row[0].wall_ns, row[3], row[4]) == (walls[2], 5, walls[-1])


@pytest.mark.parametrize("n", [0, 1, 5, 5000])
def test_gaps_end_at_the_longest_and_keep_the_tail(n: int) -> None:
    points = embed.gaps([n - i for i in range(n)], most=1200)
    assert len(points) <= 1200
    assert points[-200:] == [[i, i] for i in range(max(1, n - 199), n + 1)]
    assert points == sorted(points)


def test_ttft_splits_add_up_and_leave_out_the_unfinished() -> None:
    run = make_run(prefills=[Prefill(at=20, tokens=300, late_by=2)])
    run.requests[0].first_token_ns = None
    columns = embed.ttft_columns(run)
    assert run.requests[0].id not in columns["id"]
    by_id = {r.id: r for r in run.requests}
    for i, request in enumerate(columns["id"]):
        record = by_id[request]
        assert record.first_token_ns is not None
        total = record.first_token_ns - record.arrival_ns
        assert columns["queue"][i] + columns["prefill"][i] == total
