"""Runs beside each other on terminals of any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from stepscope.analyze import analyze, compare
from stepscope.analyze.model import Comparison
from stepscope.report.side_by_side import KEY_METRICS, comparison
from tests.synthetic import make_run

LABELS = ["chunked,chunk=512", "vtc", "deadline-chunk,ttft_ms=200,itl_ms=50", "sjf", "lpm", "edf"]


def compared(count: int, **changes: str) -> Comparison:
    runs = [make_run(20 + i, label=label) for i, label in enumerate(LABELS[:count])]
    for run in runs[1:]:
        run.meta.stamp = changes.get("stamp", run.meta.stamp)  # type: ignore[assignment]
    return compare([(run.meta.label, run, analyze(run)) for run in runs])


def shown(
    result: Comparison, width: int, metrics: list[str] | None = None, changed: bool = False
) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    comparison(console, result, metrics, changed)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


@pytest.mark.parametrize(
    ("count", "width", "rows"),
    [(2, 80, False), (3, 80, False), (4, 80, True), (6, 80, True), (4, 200, True), (3, 60, True)],
)
def test_many_runs_or_a_narrow_terminal_make_runs_rows(count: int, width: int, rows: bool) -> None:
    lines = shown(compared(count), width)
    assert any(line.startswith("run ") for line in lines) == rows
    assert any(line.startswith("metric ") for line in lines) == (not rows)
    assert any("delta" in line for line in lines) == (not rows)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits_and_every_value_is_whole(width: int) -> None:
    result = compared(6)
    lines = shown(result, width)
    assert all(len(line) <= width for line in lines)
    assert "…" not in "".join(lines)
    heads = " ".join(" ".join(line.split()) for line in lines)
    for word in ("ttft", "itl", "goodput", "output", "stall", "p50", "p99", *LABELS[3:]):
        assert word in heads
    assert "--format md" in heads and lines[0] == "comparable: yes   MEASURED"


def test_the_values_stand_by_their_run() -> None:
    result = compared(4)
    lines = shown(result, 120, ["p50_itl_ms", "mean_step_ms"])
    (row,) = (line.split() for line in lines if line.startswith("sjf "))
    found = {r.metric: r.values[3] for r in result.rows}
    assert row == ["sjf", f"{found['p50_itl_ms']:.1f}", f"{found['mean_step_ms']:.1f}"]
    assert not any("--format md" in line for line in lines), "nothing was left out"


def test_all_asked_for_metrics_come_in_blocks() -> None:
    result = compared(5)
    names = [row.metric for row in result.rows]
    lines = shown(result, 80, names)
    assert sum(line.startswith("run ") for line in lines) > 1
    assert sum(line.startswith("lpm ") for line in lines) == sum(
        line.startswith("run ") for line in lines
    )
    assert all(len(line) <= 80 for line in lines)


def test_only_what_changed_and_stamps_that_differ() -> None:
    lines = shown(compared(4, stamp="MODELLED"), 80, changed=True)
    text = "\n".join(lines)
    assert "comparable: no" in text and "vtc MODELLED" in text and "chunked,chunk=512" in text
    assert "preemptions" not in text


def test_the_key_metrics_are_metrics() -> None:
    assert set(KEY_METRICS) <= {row.metric for row in compared(2).rows}
