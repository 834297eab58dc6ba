"""The run as Markdown: verdict, answers, numbers, stalls and comparison, for an issue or a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stepscope.analyze.model import Analysis, Comparison, Evidence, MetricRow
from stepscope.records import Run
from stepscope.report import findings
from stepscope.report.tables import GATHER_HEAD, gather_rows
from stepscope.text import NA, listing, ms, percent, plural, printable, sig, size

MOST_STALLS = 10

Labelled = tuple[str, Run, Analysis]


def page(runs: list[Labelled], comparison: Comparison | None) -> str:
    """All runs one after the other, then their comparison."""
    blocks = [_run(*entry) for entry in runs]
    if comparison is not None:
        blocks.append(_comparison(comparison))
    return "\n\n".join(blocks) + "\n"


def esc(value: object) -> str:
    """One line in which nothing is markup, so that a prompt or a label cannot become any."""
    line = " ".join(printable(str(value)).split())
    for char in "\\`*_[]|#~":
        line = line.replace(char, "\\" + char)
    return line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The first column is text, the rest align right."""
    lines = ["| " + " | ".join(esc(h) for h in head) + " |"]
    lines.append("|" + " --- |" + " ---: |" * (len(head) - 1))
    lines += ["| " + " | ".join(esc(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def _run(label: str, run: Run, analysis: Analysis) -> str:
    state = run.meta.stamp + ("" if run.meta.complete else ", incomplete run")
    facts = f"{findings.model(run)} on {findings.device(run)}, policy {run.meta.policy}"
    return "\n\n".join(
        [
            f"# {esc(label)} ({esc(state)})",
            esc(f"{facts}, scenario {run.meta.scenario}, seed {run.meta.seed}"),
            f"**{esc(findings.headline(analysis))}**: {esc(analysis.verdict.sentence)}",
            *_answers(analysis),
            *_evidence(analysis),
            *_numbers(analysis),
            *_budget(analysis),
            *_gathering(analysis),
            *_stalls(analysis),
            *_limits(run, analysis),
        ]
    )


def _answers(analysis: Analysis) -> list[str]:
    return [
        "\n".join(
            f"{i}. {esc(a.question)} **{esc(a.short)}**. {esc(a.sentence)}"
            for i, a in enumerate(analysis.answers, 1)
        )
    ]


def _evidence(analysis: Analysis) -> list[str]:
    found = analysis.verdict
    terms = (("gain", found.gain), ("advice", found.advice), ("wrong if", found.falsify))
    rows = [(e.label, _value(e), e.threshold or "-") for e in found.evidence]
    return [
        "## Evidence",
        table(["what", "value", "held against"], rows),
        "\n".join(f"* {key}: {esc(text or NA)}" for key, text in terms),
    ]


def _value(e: Evidence) -> str:
    return NA if e.value is None else f"{sig(e.value)} {e.unit}".strip()


def _numbers(analysis: Analysis) -> list[str]:
    through = analysis.throughput
    rows = [
        (f.metric, *map(ms, (f.mean, f.p50, f.p90, f.p95, f.p99, f.max)), f"{f.n:,}")
        for f in analysis.latency.values()
    ]
    line = (
        f"{sig(through.output_tokens_per_s)} output tokens/s, step p50 {ms(through.p50_step_ns)} "
        f"ms, MBU {percent(through.mbu)}, MFU {percent(through.mfu)}, "
        f"weights {size(analysis.card.weight_bytes)} per step, "
        f"bound {ms(analysis.card.bound_ns)} ms"
    )
    head = ["ms", "mean", "p50", "p90", "p95", "p99", "max", "n"]
    return ["## Numbers", esc(line), table(head, rows)]


def _budget(analysis: Analysis) -> list[str]:
    if not analysis.budget:
        return []
    steps = max(1, analysis.throughput.steps)
    rows = [
        (b.label, ms(b.ns / steps), f"{b.share * 100:.1f}", "estimated" if b.estimated else "clock")
        for b in analysis.budget
    ]
    return ["## Where the time goes", table(["part", "ms per step", "%", "from"], rows)]


def _gathering(analysis: Analysis) -> list[str]:
    rows = gather_rows(analysis)
    if not rows:
        return []
    return ["## Gather against context", esc(findings.gather(analysis)), table(GATHER_HEAD, rows)]


def _stalls(analysis: Analysis) -> list[str]:
    harmful = [s for s in analysis.stalls if s.harmful]
    blocks = ["## Stalls", esc(findings.stalls(analysis))]
    if harmful:
        rows = [
            (s.step, ms(s.wall_ns), ms(s.excess_ns), s.cause, f"{s.prefill_tokens:,}",
             listing([str(i) for i in s.culprits]) or "-", len(s.victims))
            for s in harmful[:MOST_STALLS]
        ]  # fmt: skip
        head = ["step", "ms", "excess ms", "cause", "prefill tokens", "culprits", "victims"]
        blocks.append(table(head, rows))
    rest = len(analysis.stalls) - min(len(harmful), MOST_STALLS)
    if rest:
        harmless = len(analysis.stalls) - len(harmful)
        blocks.append(
            f"{plural(rest, 'more')}, {harmless:,} of them harmless.".replace("mores", "more")
        )
    return blocks


def _limits(run: Run, analysis: Analysis) -> list[str]:
    lines = [f"* {esc(what)}: n/a ({esc(why)})" for what, why in analysis.not_available]
    lines += [f"* {esc(n)}" for n in [*analysis.notes, *run.meta.notes]]
    return ["## Limits", "\n".join([f"* {esc(findings.recorder(run))}", *lines])]


def _comparison(found: Comparison) -> str:
    """One table per stamp: measured and modelled numbers never share one."""
    same = "comparable: yes" if not found.differences else "comparable: no"
    blocks = [f"# Comparison ({same})", *("* " + esc(d) for d in found.differences)]
    for stamp in dict.fromkeys(found.stamps):
        mine = [i for i, s in enumerate(found.stamps) if s == stamp]
        rows = [
            (row.metric, row.unit, *(_cell(row, i, stamp == found.stamps[0]) for i in mine))
            for row in found.rows
        ]
        blocks.append(
            f"{stamp}:\n\n" + table(["metric", "unit", *(found.labels[i] for i in mine)], rows)
        )
    return "\n\n".join([*blocks, *("* " + esc(n) for n in found.notes)])


def _cell(row: MetricRow, i: int, same_stamp: bool) -> str:
    value, delta = row.values[i], row.deltas[i]
    if value is None or delta is None or i == 0 or not same_stamp:
        return sig(value)
    return f"{sig(value)} ({delta * 100:+.1f} %)"
