"""The result on a terminal: stamp, the three answers, verdict, latencies, bound. 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepscope.analyze.model import Analysis, Latency, StepView
from stepscope.records import FORWARD, GATHER, PHASES, Run, RunMeta
from stepscope.report.tables import ABSENT, GATHER_HEAD, add, gather_rows, grid, phase_ms
from stepscope.text import NA, ms, percent, plural, printable, sig, size

LATENCIES = ("ttft", "itl", "tpot")
MOST_STALLS = 5
MOST_SAMPLES = 3
SAMPLE_CHARS = 220
INDENT = 10
CONTEXT_SPAN = 8  # longest over shortest context from which on the gather gets a table
LEAST_SHARE = 0.02  # smaller parts of the step are summed up as the rest


def show(console: Console, run: Run, analysis: Analysis, next_command: str) -> None:
    """The whole result, the three answers first."""
    _headline(console, run.meta, analysis)
    _answers(console, analysis)
    _verdict(console, analysis)
    _latency(console, analysis)
    _step_lines(console, run, analysis)
    _gathering(console, analysis)
    _stalls(console, analysis)
    _remarks(console, run, analysis)
    console.print(Text(f"next: {printable(next_command)}", "dim", no_wrap=True, overflow="ignore"))


def _line(console: Console, label: str, text: str, style: str = "") -> None:
    """`label    text`, folded with a hanging indent so that labels stand alone on the left."""
    rows = textwrap.wrap(
        printable(text), max(30, console.width - INDENT), break_on_hyphens=False
    ) or [""]
    for row in rows:
        console.print(Text.assemble((f"{label:<{INDENT}}", "bold"), (row, style)))
        label = ""


def _headline(console: Console, meta: RunMeta, analysis: Analysis) -> None:
    model, device, through = meta.model, meta.device, analysis.throughput
    threads = f" ({plural(device['threads'], 'thread')})" if device.get("threads") else ""
    name = f"{model['name']} {model['dtype']} on {device.get('kind') or NA}{threads}"
    console.print(
        Text.assemble(
            (_one_line(name), "bold"),
            f"   policy {_one_line(meta.label)}   ",
            (meta.stamp, "bold reverse"),
        )
    )
    requests = plural(sum(analysis.finish_reasons.values()), "request")
    text = f"{requests}   {plural(through.steps, 'step')}   {sig(through.wall_ns / 1e9)} s"
    if through.idle_ns:
        text += f", {sig(through.idle_ns / 1e9)} s of it idle"
    if not meta.complete:
        text += "   INCOMPLETE: it did not run to its end"
    console.print(Text(text))


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _answers(console: Console, analysis: Analysis) -> None:
    for number, answer in enumerate(analysis.answers, 1):
        console.print()
        console.print(Text(f"{number}  {answer.question}", "bold"))
        for row in textwrap.wrap(printable(answer.sentence), max(30, console.width - 3)):
            console.print(Text(f"   {row}"))


def _verdict(console: Console, analysis: Analysis) -> None:
    verdict = analysis.verdict
    console.print()
    name = verdict.name.replace("_", "-") + (f" ({verdict.sub})" if verdict.sub else "")
    share = "" if verdict.share is None else f"   {percent(verdict.share)} of time"
    _line(console, "verdict", name + share, "bold")
    _line(console, "", verdict.sentence)
    numbers = [
        f"{e.label} {sig(e.value)} {e.unit}".strip() + (f" ({e.threshold})" if e.threshold else "")
        for e in verdict.evidence[:3]
    ]
    if numbers:
        _line(console, "evidence", "; ".join(numbers))
    if verdict.runners_up:
        others = (f"{n.replace('_', '-')} {percent(s)}" for n, s in verdict.runners_up[:3])
        _line(console, "then", ", ".join(others))
    for label, text in (
        ("gain", verdict.gain),
        ("try", verdict.advice),
        ("wrong if", verdict.falsify),
        ("more", f"stepscope explain {verdict.name}"),
    ):
        if text:
            _line(console, label, text)


def _latency(console: Console, analysis: Analysis) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", min_width=INDENT - 1)
    for head in ("p50", "p90", "p99", "max", "n"):
        table.add_column(head, justify="right", no_wrap=True, min_width=7)
    table.add_column("", overflow="fold")
    for name in LATENCIES:
        row = analysis.latency.get(name)
        if row is not None:
            add(table, f"{name} ms", *_percentiles(row), f"{row.n:,}", row.note)
    console.print()
    console.print(table)


def _percentiles(row: Latency) -> list[str]:
    return [ms(v) for v in (row.p50, row.p90, row.p99, row.max)]


def _step_lines(console: Console, run: Run, analysis: Analysis) -> None:
    through, card = analysis.throughput, analysis.card
    console.print()
    if through.mean_step_ns is not None:
        _budget(console, analysis, through.mean_step_ns)
    if card.bound_ns is not None:
        share = card.bound_ns / through.mean_step_ns if through.mean_step_ns else None
        _line(
            console,
            "bound",
            f"{ms(card.bound_ns)} ms to read {size(card.weight_bytes)} of weights at "
            f"{size(card.read_bytes_per_s)}/s (measured): {percent(share)} of the mean step",
        )
    cost = run.meta.recorder.get("ns_per_step")
    _line(
        console,
        "rate",
        f"{sig(through.output_tokens_per_s)} output tok/s   MBU {percent(through.mbu)}   MFU "
        f"{percent(through.mfu)}   recorder {sig(cost / 1e3 if cost else None)} us/step",
    )
    for what in analysis.what_ifs:
        _line(console, "what if", what.sentence)


def _budget(console: Console, analysis: Analysis, mean_ns: float) -> None:
    lines = sorted(analysis.budget, key=lambda line: -line.ns)
    shown = [x for x in lines if x.share >= LEAST_SHARE]
    parts = [f"{x.label} {percent(x.share)}{'*' if x.estimated else ''}" for x in shown]
    if len(shown) < len(lines):
        parts.append(f"rest {percent(sum(x.share for x in lines if x not in shown))}")
    _line(console, "step", f"{ms(mean_ns)} ms mean: " + ", ".join(parts))
    if any(x.estimated for x in shown):
        _line(console, "", "* estimated from ceilings and twin, not from a clock around it", "dim")


def _gathering(console: Console, analysis: Analysis) -> None:
    points = analysis.gathers
    if not points or points[-1].context < CONTEXT_SPAN * points[0].context:
        return
    table = grid(*((head.replace(" ", "\n"), "right") for head in GATHER_HEAD))
    for row in gather_rows(analysis):
        add(table, *row)
    console.print()
    console.print(table)


def _stalls(console: Console, analysis: Analysis) -> None:
    harmful = [s for s in analysis.stalls if s.harmful]
    if not harmful:
        return
    console.print()
    table = grid(
        ("stall at step", "right"),
        ("excess ms", "right"),
        ("cause", "left"),
        ("culprit", "left"),
        ("waited", "right"),
    )
    for stall in harmful[:MOST_STALLS]:
        culprits = ", ".join(f"#{c}" for c in stall.culprits[:3]) or NA
        tokens = f", {plural(stall.prefill_tokens, 'token')}" if stall.prefill_tokens else ""
        waited = plural(len(stall.victims), "request")
        cause = stall.cause + tokens
        add(table, f"{stall.step:,}", ms(stall.excess_ns), cause, culprits, waited)
    console.print(table)
    left = len(harmful) - MOST_STALLS
    if left > 0:
        console.print(Text(f"and {left:,} more; the report lists them", "dim"))


def _remarks(console: Console, run: Run, analysis: Analysis) -> None:
    console.print()
    for _, error in analysis.failures[:MOST_STALLS]:
        _line(console, "failed", error)
    if len(analysis.failures) > MOST_STALLS:
        _line(console, "", f"and {len(analysis.failures) - MOST_STALLS} more failed requests")
    if analysis.late_admissions:
        request, waited = analysis.late_admissions[0]
        count = plural(len(analysis.late_admissions), "request")
        _line(
            console,
            "late",
            f"{count} admitted more than one step after arrival; the worst, #{request}, after "
            f"{ms(waited)} ms",
        )
    if analysis.preemptions:
        count = plural(analysis.preemptions, "preemption")
        _line(console, "preempt", f"{count}, {analysis.recomputed_tokens:,} tokens computed again")
    if analysis.prefix_hit_tokens is not None:
        share = percent(analysis.prefix_hit_share)
        _line(
            console,
            "prefix",
            f"{analysis.prefix_hit_tokens:,} tokens came from the prefix cache, {share} of those "
            "that prefills needed",
        )
    for flag, sentence in analysis.flags:
        _line(console, "flag", f"{flag}: {sentence}")
    for note in [*run.meta.notes, *analysis.notes]:
        _line(console, "note", note)


def samples(console: Console, meta: RunMeta) -> None:
    """What a few requests said."""
    spoken = [s for s in meta.samples if s.text.strip()]  # dummies have no tokenizer
    for sample in spoken[:MOST_SAMPLES]:
        text = " ".join(printable(sample.text).split())
        cut = text[:SAMPLE_CHARS] + ("..." if len(text) > SAMPLE_CHARS else "")
        prompt = " ".join(printable(sample.prompt).split())[:60] or "(synthetic prompt)"
        _line(console, f"#{sample.request}", prompt, "bold")
        _line(console, "", cut)
    if spoken:
        console.print()


def steps_table(views: Iterable[StepView]) -> Table:
    """One line per step: kind, tokens, wall time and its largest phases. 80 columns hold it all."""
    table = grid(
        ("step", "right"),
        ("kind", "left"),
        ("batch", "right"),
        ("context\ntokens", "right"),
        ("prompt\ntokens", "right"),
        ("wall\nms", "right"),
        ("forward\nms", "right"),
        ("gather\nms", "right"),
        ("verdict", "left"),
        padding=1,
    )
    for column in table.columns:
        column.no_wrap = True
    for view in views:
        add(
            table,
            str(view.step),
            view.kind,
            str(view.batch),
            f"{view.context_tokens:,}",
            f"{view.prefill_tokens:,}" if view.kind in ("prefill", "mixed") else ABSENT,
            ms(view.wall_ns),
            *(phase_ms(view, view.phases[i]) for i in (FORWARD, GATHER)),
            view.verdict.replace("_", "-"),
        )
    return table


def token_table(run: Run, analysis: Analysis) -> Table:
    """The inside of one sentence: each token with the phases of the step that made it."""
    sample = run.meta.samples[0]
    heads = ["ms", "host", "gather", "forward", "sample", "detok+emit"]
    heads += ["logprob"] if sample.logprobs else []  # only where they were asked for
    table = grid(("token", "left"), *((head, "right") for head in heads))
    views = [v for v in analysis.steps if v.output_tokens]
    logprobs = [f"{value:.3f}" for value in sample.logprobs]
    for i, (piece, view) in enumerate(zip(sample.pieces, views, strict=False)):
        ns = dict(zip(PHASES, view.phases, strict=True))
        host = sum(
            ns[p] or 0 for p in ("recv", "schedule", "prepare", "d2h_wait", "commit", "other")
        )
        add(
            table,
            repr(piece)[1:-1] or "(held back)",
            ms(view.wall_ns),
            ms(host),
            ms(ns["gather"]),
            ms(ns["forward"]),
            ms(ns["sample"]),
            ms((ns["detok"] or 0) + (ns["emit"] or 0)),
            *logprobs[i : i + 1],
        )
    return table
