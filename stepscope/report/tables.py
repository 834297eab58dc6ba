"""Steps and requests as plain tables: CSV, Markdown and JSON for other tools."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from rich.table import Table

from stepscope.analyze.model import StepView
from stepscope.records import PHASES, RequestRecord, Run
from stepscope.text import NA, ms, percent, size


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
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column(f"step {view.step}, {view.kind}")
    table.add_column("ms", justify="right")
    table.add_column("share", justify="right")
    for name, ns in zip(PHASES, view.phases, strict=True):
        share = None if ns is None or not view.wall_ns else ns / view.wall_ns
        table.add_row(name, ms(ns), percent(share))
    table.add_row("wall", ms(view.wall_ns), "100 %")
    for label, value in (
        ("batch", str(view.batch)),
        ("context tokens", f"{view.context_tokens:,}"),
        ("prefill tokens", f"{view.prefill_tokens:,}"),
        ("weights read", size(view.weight_bytes)),
        ("KV read", size(view.kv_bytes)),
        ("floor (measured ceilings)", f"{ms(view.floor_ns)} ms"),
        ("dispatch (twin)", f"{ms(view.twin_ns)} ms"),
        ("MBU", percent(view.mbu)),
        ("verdict", view.verdict.replace("_", "-")),
    ):
        table.add_row(label, value, "")
    return table


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
