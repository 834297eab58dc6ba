"""Gather against context: what is grouped, when it is shown, and what stands there without it."""

from __future__ import annotations

import pytest
from rich.console import Console

from stepscope.analyze import analyze
from stepscope.analyze.model import GatherPoint
from stepscope.records import Run
from stepscope.report import console, html, markdown
from tests.synthetic import MS, make_run

TITLE = "Gather against context"


def growing(first: int = 100, last: int = 3000, bytes_per_token: int = 1000) -> Run:
    """Two requests; the second half of the steps has `last` tokens of context instead of `first`.

    Gather takes 1 us per token of context.
    """
    run = make_run(decode_steps=60, batch=2)
    decodes = [row for row in run.steps if row.kind == "decode"]
    for i, row in enumerate(decodes):
        context = 2 * (first if i < len(decodes) // 2 else last)
        row.sum_decode_kv_tokens, row.kv_gather_bytes = context, context * bytes_per_token
        moved = context * 1000 - (row.gather_ns or 0)
        row.gather_ns, row.forward_ns = context * 1000, (row.forward_ns or 0) - moved
    return run


def in_place(run: Run) -> Run:
    for row in run.steps:
        row.forward_ns = (row.forward_ns or 0) + (row.gather_ns or 0)
        row.gather_ns = row.kv_gather_bytes = None
    return run


def shown(run: Run) -> tuple[str, str, str]:
    analysis = analyze(run)
    terminal = Console(width=80, record=True, force_terminal=False)
    with terminal.capture() as captured:
        console.show(terminal, run, analysis, "next")
    pages = [render.page([("run", run, analysis)], None) for render in (markdown, html)]
    return captured.get(), pages[0], pages[1]


def test_steps_are_grouped_by_the_context_of_a_request() -> None:
    short, long = analyze(growing()).gathers
    assert isinstance(short, GatherPoint)
    assert (short.context, short.batch) == (100, 2) and (long.context, long.batch) == (3000, 2)
    assert short.n + long.n == 59, "one decode step was warm-up, beside the prefill"
    assert (short.gather_ns, long.gather_ns) == (200_000, 6 * MS)
    assert long.gather_bytes == 6_000_000 and long.bytes_per_s == pytest.approx(1e9)
    assert (short.forward_ns or 0) > (long.forward_ns or 0), "the steps took equally long"


def test_bytes_that_were_not_counted_are_not_zero() -> None:
    run = growing()
    for row in run.steps:
        row.kv_gather_bytes = None
    [short, _] = analyze(run).gathers
    assert short.gather_ns == 200_000 and short.gather_bytes is None and short.bytes_per_s is None


def test_the_table_is_in_every_report() -> None:
    terminal, plain, page = shown(growing())
    assert "gathered" in terminal and "3,000" in terminal
    assert f"## {TITLE}" in plain and "| 3,000 | 2 |" in plain and "6.00" in plain
    assert f"<h2>{TITLE}</h2>" in page and "from 0.200 to 6.00 ms" in page


def test_a_terminal_shows_it_only_where_contexts_differ_much() -> None:
    terminal, plain, page = shown(growing(100, 300))
    assert "gathered" not in terminal and TITLE in plain and TITLE in page


@pytest.mark.parametrize("run", [growing(100, 100), in_place(growing())], ids=["equal", "in place"])
def test_no_table_without_two_lengths_or_without_a_gather(run: Run) -> None:
    terminal, plain, page = shown(run)
    assert "gathered" not in terminal and TITLE not in plain and TITLE not in page


def test_why_there_is_no_gather() -> None:
    run = in_place(growing())
    assert dict(analyze(run).not_available)["gather"] == "no step tells it apart"
    run.meta.engine["attention"] = "paged"
    analysis = analyze(run)
    assert dict(analysis.not_available)["gather"] == "attention = paged reads K and V in place"
    assert analysis.gathers == [] and "gather" not in {line.key for line in analysis.budget}
    assert "gather: n/a (attention = paged reads K and V in place)" in shown(run)[1]
    assert "gather" not in dict(analyze(growing()).not_available)
