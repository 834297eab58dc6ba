"""Run + Analysis -> the plain numbers a page draws from: integers in columns, None where missing.

Columns travel as gzip + base64 of JSON and are decoded in the browser by DecompressionStream.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

from stepscope.analyze.model import Analysis, StepView
from stepscope.records import PHASES, Run
from stepscope.text import plural

MOST_STEPS = 200_000  # rows; above it, groups are shown by their median step
MOST_GAPS = 1200  # points of one ITL distribution

Row = tuple[StepView, int, int, int, int]  # the step shown, begin, end, steps, longest wall


def script_json(value: Any) -> str:
    """JSON that stays inert inside a <script> element whatever the strings in it say."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def pack(columns: dict[str, Any]) -> str:
    """gzip (no timestamp, so that equal data gives an equal page) and base64."""
    raw = json.dumps(columns, separators=(",", ":"), allow_nan=False).encode()
    return base64.b64encode(gzip.compress(raw, 6, mtime=0)).decode()


def reduce_steps(
    views: Sequence[StepView], keep: set[int], most: int = MOST_STEPS
) -> tuple[list[Row], str]:
    """At most about `most` rows, and the sentence that says what was reduced ("" if nothing).

    A group is a run of neighbouring steps of one kind and is shown by its median step by wall time,
    with its longest; the steps in `keep` stay single.
    """
    if len(views) <= most:
        return [(v, v.begin_ns, v.end_ns, 1, v.wall_ns) for v in views], ""
    size = math.ceil(len(views) / max(1, most - 2 * len(keep)))  # each cuts a group in two
    rows: list[Row] = []
    group: list[StepView] = []
    for view in views:
        alone = view.step in keep
        if group and (alone or view.kind != group[0].kind or len(group) == size):
            rows.append(_row(group))
            group = []
        if alone:
            rows.append(_row([view]))
        else:
            group.append(view)
    if group:
        rows.append(_row(group))
    return rows, (
        f"{plural(len(views), 'step')} are drawn as {len(rows):,} rows: up to {size} neighbouring "
        f"steps of one kind share the row of their median step; the {len(keep):,} steps that "
        "stand out are drawn by themselves."
    )


def standing_out(analysis: Analysis, most: int = MOST_STEPS // 8) -> set[int]:
    """Stalls, and the steps longer than 1.5 times their baseline, the worst first."""
    long = sorted(
        (v for v in analysis.steps if v.excess_ns * 3 > v.wall_ns), key=lambda v: -v.excess_ns
    )
    return {v.step for v in long[:most]} | {s.step for s in analysis.stalls[:most]}


def _row(group: list[StepView]) -> Row:
    ordered = sorted(group, key=lambda v: v.wall_ns)
    middle = ordered[(len(ordered) - 1) // 2]
    return middle, group[0].begin_ns, group[-1].end_ns, len(group), ordered[-1].wall_ns


def whole(value: float | None, scale: float = 1.0) -> int | None:
    return None if value is None or math.isnan(value) else round(value * scale)


def codes(values: Sequence[str]) -> tuple[list[str], list[int]]:
    names = sorted(set(values))
    index = {name: i for i, name in enumerate(names)}
    return names, [index[v] for v in values]


def step_columns(run: Run, rows: Sequence[Row]) -> dict[str, Any]:
    """One list per column; `mbu` in units of 1e-4."""
    views = [row[0] for row in rows]
    kinds, kind = codes([v.kind for v in views])
    verdicts, verdict = codes([v.verdict for v in views])
    columns: dict[str, Any] = {
        "kinds": kinds,
        "kind": kind,
        "verdicts": verdicts,
        "verdict": verdict,
        "begin": [row[1] for row in rows],
        "end": [row[2] for row in rows],
        "wall": [v.wall_ns for v in views],
        "count": [row[3] for row in rows],
        "longest": [row[4] for row in rows],
        "phases": {name: [v.phases[i] for v in views] for i, name in enumerate(PHASES)},
        "mbu": [whole(v.mbu, 1e4) for v in views],
        "warmup": [int(v.warmup) for v in views],
    }
    for name in ("step", "decode_requests", "prefill_tokens", "batch", "context_tokens"):
        columns[name] = [getattr(v, name) for v in views]
    for name in ("output_tokens", "weight_bytes", "kv_bytes", "flops", "excess_ns", "floor_ns"):
        columns[name] = [whole(getattr(v, name)) for v in views]
    for name in ("waiting", "running", "kv_used_pages", "twin_ns"):
        columns[name] = [whole(getattr(v, name)) for v in views]
    return columns | _device_lane(run, views)


def _device_lane(run: Run, views: Sequence[StepView]) -> dict[str, Any]:
    """Device spans of the steps shown, where the run has a device timeline at all."""
    spans = {
        s.step: (s.dev_begin_ns, s.dev_end_ns) for s in run.steps if s.dev_begin_ns is not None
    }
    if not spans:
        return {}
    shown = [spans.get(v.step, (None, None)) for v in views]
    return {"dev_begin": [s[0] for s in shown], "dev_end": [s[1] for s in shown]}


def gaps(itl_ns: Sequence[int], most: int = MOST_GAPS) -> list[list[int]]:
    """The distribution as (gap, how many are at most that long), the longest 200 all kept."""
    ordered = sorted(itl_ns)
    n = len(ordered)
    if n <= most:
        ranks = list(range(n))
    else:
        body = most - 200
        ranks = sorted(
            {round(i * (n - 1) / (body - 1)) for i in range(body)} | set(range(n - 200, n))
        )
    return [[ordered[r], r + 1] for r in ranks]


def ttft_columns(run: Run) -> dict[str, list[int]]:
    """Per request that got a first token, in order of arrival: time queued, then computing."""
    done = [
        (r, r.admitted_ns, r.first_token_ns)
        for r in sorted(run.requests, key=lambda r: r.arrival_ns)
        if r.admitted_ns is not None and r.first_token_ns is not None
    ]
    return {
        "id": [r.id for r, _, _ in done],
        "arrival": [r.arrival_ns for r, _, _ in done],
        "prompt": [r.prompt_tokens for r, _, _ in done],
        "queue": [admitted - r.arrival_ns for r, admitted, _ in done],
        "prefill": [first - admitted for _, admitted, first in done],
    }


def total_pages(run: Run) -> int | None:
    totals = [s.kv_total_pages for s in run.steps if s.kv_total_pages is not None]
    return max(totals, default=None)


def run_data(label: str, run: Run, analysis: Analysis) -> dict[str, Any]:
    """Everything the figures of one run need."""
    rows, reduced = reduce_steps(analysis.steps, standing_out(analysis))
    worst = analysis.stalls[0].step if analysis.stalls else None
    return {
        "label": label,
        "stamp": run.meta.stamp,
        "reduced": reduced,
        "phases": list(PHASES),
        "select": worst,
        "kv_total_pages": total_pages(run),
        "packed": pack({"steps": step_columns(run, rows), "ttft": ttft_columns(run)}),
        "gaps": gaps(analysis.itl_ns),
        "gap_count": len(analysis.itl_ns),
        "batches": [
            [b.batch, b.n, *map(whole, (b.p50_ns, b.p10_ns, b.p90_ns, b.floor_ns, b.twin_ns))]
            for b in analysis.batches
        ],
        "read_rate": whole(analysis.card.read_bytes_per_s),
        "gemm_rate": whole(analysis.card.gemm_flops),
    }
