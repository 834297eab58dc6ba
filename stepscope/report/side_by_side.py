"""Several runs on a terminal: a column per run, or a row per run where columns would not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepscope.analyze.model import Comparison, MetricRow
from stepscope.report.tables import add, grid
from stepscope.text import NA, printable, sig

MOST_COLUMNS = 3  # runs side by side
METRIC_WIDTH, RUN_WIDTH = 22, 10
LABEL_WIDTH = 24  # longer ones are folded
# What is shown of many runs unless others are asked for.
KEY_METRICS = (
    *("p50_ttft_ms", "p99_ttft_ms", "p50_itl_ms", "p99_itl_ms", "goodput_per_s"),
    *("output_tokens_per_s", "stall_total_ms"),
)


def comparison(
    console: Console, result: Comparison, metrics: list[str] | None, changed: bool
) -> None:
    """Runs side by side; the first is the baseline of every delta."""
    columns = _fits(console, result)
    verdict = "comparable: yes" if not result.differences else "comparable: no"
    same = "" if columns or len(set(result.stamps)) > 1 else f"   {result.stamps[0]}"
    console.print(Text(verdict + same, style="bold"))
    for difference in result.differences:
        console.print(Text(f"  {printable(difference)}"))
    rows = [
        row
        for row in result.rows
        if (not metrics or row.metric in metrics) and not (changed and not _moved(row))
    ]
    if columns:
        console.print(_column_per_run(result, rows))
    else:
        wanted = rows if metrics else [row for row in rows if row.metric in KEY_METRICS]
        for number, block in enumerate(_blocks(wanted, console.width)):
            if number:
                console.print()
            console.print(_row_per_run(result, block))
        if len(wanted) < len(rows):
            console.print(Text("more: --metric NAME, or all with --format md", style="dim"))
    for note in result.notes:
        console.print(Text(printable(note), style="dim"))


def _fits(console: Console, result: Comparison) -> bool:
    runs = len(result.labels)
    needed = METRIC_WIDTH + RUN_WIDTH * (2 * runs - 1)  # and a delta for each but the first
    return runs <= MOST_COLUMNS and needed <= console.width


def _column_per_run(result: Comparison, rows: Sequence[MetricRow]) -> Table:
    table = grid(
        ("metric", "left"),
        *(
            (f"{_one_line(label)}\n{stamp}", "right")
            for label, stamp in zip(result.labels, result.stamps, strict=True)
        ),
        *(("delta", "right") for _ in result.labels[1:]),
    )
    table.columns[0].no_wrap = True
    for row in rows:
        add(
            table,
            row.metric,  # carries its unit
            *(sig(v) for v in row.values),
            *(NA if d is None else f"{d * 100:+.1f} %" for d in row.deltas[1:]),
        )
    return table


def _row_per_run(result: Comparison, rows: Sequence[MetricRow]) -> Table:
    """Values alone: which of many is the baseline is the reader's choice."""
    table = grid(("run", "left"), *((_head(row), "right") for row in rows))
    table.columns[0].width = min(LABEL_WIDTH, max(3, *map(len, _runs(result))))
    table.columns[0].overflow = "fold"
    for column in table.columns[1:]:
        column.no_wrap = True
    for number, run in enumerate(_runs(result)):
        add(table, run, *(sig(row.values[number]) for row in rows))
    return table


def _runs(result: Comparison) -> list[str]:
    """Labels, with the stamps where they are not all the same."""
    labels = [_one_line(label) for label in result.labels]
    if len(set(result.stamps)) == 1:
        return labels
    return [f"{label} {stamp}" for label, stamp in zip(labels, result.stamps, strict=True)]


def _head(row: MetricRow) -> str:
    """A word a line: p50 / ttft / ms."""
    return row.metric.replace("_", "\n")


def _blocks(rows: Sequence[MetricRow], width: int) -> Iterator[list[MetricRow]]:
    """As many columns at a time as fit beside the labels."""
    block: list[MetricRow] = []
    left = width - LABEL_WIDTH - 2
    for row in rows:
        needed = 2 + max(map(len, (*row.metric.split("_"), *map(sig, row.values))))
        if block and needed > left:
            yield block
            block, left = [], width - LABEL_WIDTH - 2
        block.append(row)
        left -= needed
    if block:
        yield block


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _moved(row: MetricRow) -> bool:
    return any(d is None or d != 0 for d in row.deltas[1:])
