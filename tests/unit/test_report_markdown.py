"""The Markdown report, and the sentences that all reports share."""

from __future__ import annotations

import re

from stepscope.analyze import analyze, compare
from stepscope.analyze.model import Comparison, MetricRow
from stepscope.report import findings, markdown
from tests.synthetic import Prefill, make_run


def test_verdict_and_answers_come_first() -> None:
    run = make_run(decode_steps=80, prefills=[Prefill(at=30, tokens=400, mixed=True)])
    found = analyze(run)
    text = markdown.page([("base", run, found)], None)
    assert text.startswith("# base (MEASURED)\n")
    places = [text.index(t) for t in ("**bandwidth-bound", "1. ", "2. ", "3. ", "## Evidence")]
    assert places == sorted(places)
    assert f"| {found.stalls[0].step} |" in text


def test_every_table_has_as_many_cells_as_its_head() -> None:
    runs = [make_run(label="a|b"), make_run(label="c")]
    pairs = [(r.meta.label, r, analyze(r)) for r in runs]
    for block in markdown.page(pairs, compare(pairs)).split("\n\n"):
        if block.startswith("|"):
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.split("\n")}) == 1


def test_markup_in_strings_is_inert() -> None:
    assert markdown.esc("a|b <i>*x*</i>\n# [y](z)") == (
        "a\\|b &lt;i&gt;\\*x\\*&lt;/i&gt; \\# \\[y\\](z)"
    )


def test_stamps_never_share_a_table() -> None:
    rows = [MetricRow("m", "ms", "lower", (1.0, None), (None, None), (9, 0))]
    text = markdown._comparison(Comparison(["a", "b"], ["MEASURED", "MODELLED"], [], rows, []))
    assert "| metric | unit | a |" in text and "| metric | unit | b |" in text
    assert "| m | ms | n/a |" in text


def test_an_incomplete_empty_run_is_described() -> None:
    run = make_run(decode_steps=0, batch=0, complete=False, ceilings=None)
    text = markdown.page([("x", run, analyze(run))], None)
    assert "incomplete run" in text
    assert findings.timeline(analyze(run)) == "The run has no steps."


def test_the_sentences_carry_the_numbers() -> None:
    run = make_run(decode_steps=60, gc=[(30, 50_000_000)])
    found = analyze(run)
    slowest = max(found.steps, key=lambda s: s.wall_ns)
    assert f"(step {slowest.step}, {slowest.kind})" in findings.timeline(found)
    assert f"{len(found.itl_ns):,} gaps" in findings.itl(found)
    assert "22.0 GB/s" in findings.roofline(found)
    assert "No ceilings" in findings.roofline(analyze(make_run(ceilings=None)))
    assert findings.recorder(make_run(recorder={})).startswith("Recorder cost: n/a")
