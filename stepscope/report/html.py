"""One offline HTML file: the verdict first, then its evidence, the figures and the data.

The page carries its own script, style and data, and a policy that forbids everything else: no
request leaves it, and a script that is not ours does not run, whatever a prompt contains.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from stepscope.analyze.model import Analysis, Comparison, MetricRow
from stepscope.records import Run
from stepscope.report import embed, findings, palette, sections
from stepscope.report.sections import esc, prose, table
from stepscope.text import NA, sig

SCRIPTS = ("data.js", "chart.js", "timeline.js", "gantt.js", "figures.js", "tables.js", "page.js")

Labelled = tuple[str, Run, Analysis]


def page(runs: list[Labelled], comparison: Comparison | None) -> str:
    """The page as text. `runs` holds at least one (label, run, analysis); the first is shown."""
    script = "\n".join(_asset(name) for name in SCRIPTS)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    label, run, analysis = runs[0]
    parts = {
        "policy": (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
            "base-uri 'none'; form-action 'none'"
        ),
        "title": esc(f"{label}: {findings.headline(analysis)} ({run.meta.stamp}) - stepscope"),
        "style": _colours() + _asset("page.css"),
        "runs": _switch(runs),
        "body": "".join(_run(i, *entry) for i, entry in enumerate(runs)),
        "comparison": "" if comparison is None else _comparison(comparison),
        "data": embed.script_json({"runs": [embed.run_data(*entry) for entry in runs]}),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (files("stepscope.report") / "assets" / name).read_text(encoding="utf-8")


def _colours() -> str:
    """Both themes as variables; `data-theme` on the root element overrides the system's choice."""
    keys = {**palette.PHASE, **palette.VERDICT, **palette.BUDGET}
    budget = ["".join(f"--b-{k}:{pair[theme]};" for k, pair in keys.items()) for theme in (0, 1)]
    light, dark = (budget[theme] + palette.css(theme) for theme in (0, 1))
    return (
        f":root{{{light}}}:root[data-theme=dark]{{{dark}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light]){{{dark}}}}}\n"
    )


def _switch(runs: list[Labelled]) -> str:
    if len(runs) < 2:
        return ""
    buttons = "".join(
        f'<button role="tab" data-show="{i}" aria-selected="{"true" if i == 0 else "false"}" '
        f'aria-controls="run-{i}"><i class="swatch" style="--c:var(--r-{i % len(palette.RUNS)})">'
        f"</i>{esc(label)}</button>"
        for i, (label, _, _) in enumerate(runs)
    )
    return f'<div class="tabs" role="tablist" aria-label="Runs">{buttons}</div>'


def _run(index: int, label: str, run: Run, analysis: Analysis) -> str:
    hidden = "" if index == 0 else " hidden"
    wide = [
        _figure("timeline", "Steps over time", findings.timeline(analysis), TIMELINE),
        _figure("gantt", "One step", "", GANTT),
    ]
    pairs = [
        _figure("roofline", "Roofline", findings.roofline(analysis), _roof_note(run, analysis)),
        _figure("batch", "Batch size and step time", findings.batch(analysis), BATCH),
        _figure("itl", "Gaps between tokens (ITL)", findings.itl(analysis), ITL),
        _figure("ttft", "Time to the first token", findings.ttft(analysis), TTFT),
    ]
    return (
        f'<main class="run" id="run-{index}" role="tabpanel"{hidden} data-run="{index}">'
        + sections.masthead(run)
        + sections.verdict(analysis)
        + sections.evidence(analysis)
        + sections.numbers(analysis)
        + sections.budget(analysis)
        + sections.ceilings(run, analysis)
        + "".join(wide)
        + f'<div class="grid">{"".join(pairs)}</div>'
        + _figure("traffic", "Weights and KV cache", findings.traffic(analysis), TRAFFIC)
        + sections.gathering(analysis)
        + sections.stalls(analysis)
        + sections.samples(run)
        + sections.limits(run, analysis)
        + "</main>"
    )


TIMELINE = (
    "Each column stacks the phases of the median step in it; a thin line leads to the "
    "longest. The strip below shows verdicts by share of time; below it, what the scheduler "
    "held. Hover for numbers, click to open a step, drag to pan."
)
GANTT = (
    "Phases are the totals of the step, in loop order; they are exclusive and sum to its wall "
    "time. Left and right arrow keys go to the neighbouring step."
)
BATCH = (
    "Decode-only steps: median, with p10 to p90 as bars. The bound is the larger of bytes and "
    "FLOPs at the ceilings; dispatch is the twin's time."
)
ITL = (
    "Left: share of gaps at most that long. Right: share of gaps longer, on a log scale, where the "
    "tail is. Only runs of the same stamp share a plot."
)
TTFT = "Requests in order of arrival. Where several share a column, the one with the median TTFT."
TRAFFIC = "Bytes that a step reads, the median step per column, on the timeline's axis."


def _roof_note(run: Run, analysis: Analysis) -> str:
    return (
        f"Ceilings: {sections.ceiling_basis(run, analysis)} (solid if measured, else dashed). "
        "FLOP/s count the step's whole wall time, host included; both axes are logarithmic."
    )


def _figure(name: str, title: str, finding: str, note: str) -> str:
    buttons = TOOLS if name == "timeline" else ""
    focus = ' tabindex="0"' if name in ("timeline", "gantt") else ""
    return (
        f'<figure class="fig {name}" data-figure="{name}"><h2>{title}</h2>'
        f'<p class="finding">{prose(finding)}</p>{buttons}<div class="legend"></div>'
        f'<div class="stage"><canvas role="img"{focus} aria-label="{esc(f"{title}. {finding}")}">'
        f'</canvas><div class="tip" hidden></div></div><figcaption>{esc(note)}</figcaption>'
        '<details class="data"><summary>The data as a table</summary></details></figure>'
    )


TOOLS = (
    '<div class="tools" role="group" aria-label="View">'
    + "".join(
        f'<button data-key="{key}" title="key {key}"><kbd>{key}</kbd> {what}</button>'
        for key, what in (
            ("w", "zoom in"),
            ("s", "zoom out"),
            ("a", "earlier"),
            ("d", "later"),
            ("f", "fit"),
        )
    )
    + '<span class="dim view"></span></div>'
)


def _comparison(found: Comparison) -> str:
    same = "comparable: yes" if not found.differences else "comparable: no"
    why = "".join(f"<li>{esc(d)}</li>" for d in found.differences)
    tables = "".join(_stamped(found, stamp) for stamp in dict.fromkeys(found.stamps))
    notes = "".join(f"<li>{esc(n)}</li>" for n in found.notes)
    return (
        f'<section class="comparison" id="comparison"><h2>Comparison <small>{same}</small></h2>'
        f"<ul>{why}</ul>{tables}<ul class=dim>{notes}</ul></section>"
    )


def _stamped(found: Comparison, stamp: str) -> str:
    """Runs of one stamp in one table: measured and modelled numbers never share one."""
    columns = [i for i, s in enumerate(found.stamps) if s == stamp]
    body = [
        (
            esc(row.metric),
            esc(_unit(row)),
            *(_cell(row, i, stamp == found.stamps[0]) for i in columns),
        )
        for row in found.rows
    ]
    head = ["metric", "unit", *(found.labels[i] for i in columns)]
    return table(head, body, caption=stamp, cls="num compare")


def _unit(row: MetricRow) -> str:
    return f"{row.unit}, {row.better} is better" if row.better else row.unit


def _cell(row: MetricRow, i: int, same_stamp: bool) -> str:
    value, delta = row.values[i], row.deltas[i]
    count = f' title="n = {row.n[i]:,}"'
    if value is None:
        return f"<span{count}>{NA}</span>"
    if delta is None or i == 0 or not same_stamp:
        return f"<span{count}>{sig(value)}</span>"
    return f"<span{count}>{sig(value)} <small>{delta * 100:+.1f} %</small></span>"
