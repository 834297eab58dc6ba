"""The written parts of the HTML page, its policy, its order and its size."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from typing import Any

import pytest

from stepscope.analyze import analyze, compare
from stepscope.analyze.model import Comparison, MetricRow
from stepscope.records import Sample
from stepscope.report import html, palette
from tests.synthetic import Prefill, make_run

HOSTILE = "</script><img src=x onerror=alert(1)>"


def page(**knobs: Any) -> str:
    run = make_run(**knobs)
    return html.page([(run.meta.label, run, analyze(run))], None)


def test_the_policy_allows_one_script_by_its_hash() -> None:
    text = page()
    (script,) = re.findall(r"<script>(.*)</script>", text, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert f"script-src 'sha256-{digest}'" in policy[1]


def test_nothing_refers_to_the_network() -> None:
    assert not re.search(r"https?://|src=|@import|url\(|fetch\(|XMLHttp", page())


def test_the_order_of_the_page() -> None:
    text = page(decode_steps=80, prefills=[Prefill(at=30, tokens=400, mixed=True)])
    marks = [
        'class="stamp measured"',
        'class="sentence"',
        'class="answers"',
        "<h2>Evidence",
        "<h2>Key numbers",
        "<h2>Where the time goes",
        "<h2>Ceilings",
        'data-figure="timeline"',
        'data-figure="roofline"',
        'data-figure="batch"',
        'data-figure="itl"',
        'data-figure="ttft"',
        'data-figure="traffic"',
        "<h2>Stalls",
        "<h2>What was generated",
        "<h2>Limits of this run",
        "<h2>How to read it",
    ]
    places = [text.index(mark) for mark in marks]
    assert places == sorted(places)


def test_strings_from_a_run_are_escaped() -> None:
    run = make_run(label=HOSTILE, policy=HOSTILE, scenario=HOSTILE)
    run.meta.samples = [Sample(0, HOSTILE, "{{script}}" + HOSTILE)]
    run.meta.engine["x"] = HOSTILE
    other = make_run(label="b" + HOSTILE)
    pairs = [(r.meta.label, r, analyze(r)) for r in (run, other)]
    text = html.page(pairs, compare(pairs))
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert "{{script}}&lt;/script&gt;" in text


def test_an_unknown_verdict_is_grey_and_missing_is_not_zero() -> None:
    run = make_run(ceilings=None)
    found = analyze(run)
    found.verdict = replace(found.verdict, name="never_heard_of", share=None)
    text = html.page([("x", run, found)], None)
    assert "var(--v-never_heard_of,var(--neutral))" in text
    assert "<dd>n/a</dd><dt>MBU</dt>" in text


@pytest.mark.parametrize("complete", [True, False])
def test_an_incomplete_run_has_a_badge(complete: bool) -> None:
    assert ("incomplete run" in page(complete=complete)) is not complete


def test_the_page_without_data_is_small() -> None:
    assert len(page(decode_steps=0, batch=0).encode()) < 150_000


def test_stamps_never_share_a_comparison_table() -> None:
    rows = [MetricRow("p99_itl", "ms", "lower", (1.0, 2.0, 3.0), (None, 1.0, 2.0), (9, 9, 9))]
    stamps = ["MEASURED", "MODELLED", "MEASURED"]
    text = html._comparison(Comparison(["a", "b", "c"], stamps, ["device"], rows, []))
    first, second = re.findall(r"<table.*?</table>", text)
    assert ">a<" in first and ">c<" in first and ">b<" not in first
    assert "+200.0 %" in first and "%" not in second
    assert "comparable: no" in text


def test_the_budget_bar_fills_the_whole_width() -> None:
    widths = re.findall(r'style="width:([\d.]+)%', page())
    assert sum(map(float, widths)) == pytest.approx(100, abs=0.01)


def hue(colour: str) -> float:
    """0 to 360; None-like greys are excluded by the caller."""
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    top, spread = max(r, g, b), max(r, g, b) - min(r, g, b)
    if top == r:
        return (g - b) / spread % 6 * 60
    return ((b - r) / spread + 2) * 60 if top == g else ((r - g) / spread + 4) * 60


@pytest.mark.parametrize("theme", [0, 1])
def test_phases_are_cool_verdicts_warm_and_all_have_contrast(theme: int) -> None:
    background = palette.PAGE["light" if theme == 0 else "dark"]
    for table in (palette.PHASE, palette.VERDICT, palette.BUDGET):
        for name, pair in table.items():
            assert palette.contrast(pair[theme], background) >= 3, name
    assert all(80 < hue(pair[theme]) < 230 for pair in palette.PHASE.values())
    assert not any(60 < hue(pair[theme]) < 255 for pair in palette.VERDICT.values())
    for table in (palette.PHASE, palette.VERDICT):
        assert len({pair[theme] for pair in table.values()}) == len(table)


def test_contrast_of_black_and_white_is_21() -> None:
    assert palette.contrast("#000000", "#ffffff") == pytest.approx(21)
