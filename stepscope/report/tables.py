"""Steps and requests as plain tables: CSV, Markdown and JSON for other tools."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table
from rich.text import Text

from stepscope.analyze.model import Analysis, StepView
from stepscope.records import PHASES, RequestRecord, Run
from stepscope.text import NA, ms, percent, printable, sig, size

ABSENT = "-"  # what a row of this kind does not have, as opposed to what was not observed


GATHER_HEAD = (
    "context",
    "batch",
    "steps",
    "gathered MB",
    "gather ms",
    "forward ms",
    "gathered GB/s",
)


def grid(*columns: tuple[str, str], padding: int = 2) -> Table:
    """An empty table of (head, "left" or "right") columns."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, padding, 0, 0))
    for head, justify in columns:
        table.add_column(plain(head), justify="left" if justify == "left" else "right")
    return table


def plain(text: str) -> Text:
    """Exactly these characters: never markup, never a control sequence."""
    return Text(printable(text))


def add(table: Table, *cells: str) -> None:
    table.add_row(*map(plain, cells))


def step_dict(view: StepView) -> dict[str, Any]:
    """Every field, the phases by name."""
    raw = asdict(view)
    phases = raw.pop("phases")
    return {**raw, **{f"{p}_ns": ns for p, ns in zip(PHASES, phases, strict=True)}}


def steps_text(views: Sequence[StepView], fmt: str) -> str:
    rows = [step_dict(v) for v in views]
    return _csv(rows) if fmt == "csv" else _markdown(rows)


def requests_csv(run: Run) -> str:
    return _csv([asdict(r) for r in run.requests], [f.name for f in fields(RequestRecord)])


def step_table(view: StepView) -> Table:
    """One step, a line per phase in the order in which they ran."""
    table = grid((f"step {view.step}, {view.kind}", "left"), ("ms", "right"), ("share", "right"))
    for name, ns in zip(PHASES, view.phases, strict=True):
        share = None if ns is None or not view.wall_ns else ns / view.wall_ns
        absent = phase_ms(view, ns) == ABSENT
        add(table, name, phase_ms(view, ns), ABSENT if absent else percent(share))
    add(table, "wall", ms(view.wall_ns), "100 %")
    for label, value in (
        ("batch", str(view.batch)),
        ("context tokens", f"{view.context_tokens:,}"),
        ("prefill tokens", f"{view.prefill_tokens:,}"),
        ("weights read", size(view.weight_bytes)),
        ("KV read", size(view.kv_bytes)),
        ("floor ms (measured ceilings)", ms(view.floor_ns)),
        ("dispatch ms (twin)", ms(view.twin_ns)),
        ("MBU", percent(view.mbu)),
        ("verdict", view.verdict.replace("_", "-")),
    ):
        add(table, label, value, "")
    return table


def phase_ms(view: StepView, ns: int | None) -> str:
    """A phase in ms; an idle row has only the phases in which something was waited for."""
    return ABSENT if view.kind == "idle" and not ns else ms(ns)


def gather_rows(analysis: Analysis) -> list[list[str]]:
    """The cells under GATHER_HEAD; none where only one length of context was seen."""
    if len(analysis.gathers) < 2:
        return []
    return [
        [
            f"{p.context:,.0f}",
            f"{p.batch:g}",
            f"{p.n:,}",
            sig(None if p.gather_bytes is None else p.gather_bytes / 1e6),
            ms(p.gather_ns),
            ms(p.forward_ns),
            sig(None if p.bytes_per_s is None else p.bytes_per_s / 1e9),
        ]
        for p in analysis.gathers
    ]


def _csv(rows: Sequence[dict[str, Any]], names: Sequence[str] = ()) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(
        out, names or list(rows[0]) if rows or names else [], lineterminator="\n"
    )
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def _markdown(rows: Sequence[dict[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        cells = (NA if row[n] is None else str(row[n]).replace("|", "\\|") for n in names)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
