"""The result on a terminal: stamp, the three answers, verdict, latencies, bound. 80 columns."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stepscope.analyze.model import Analysis, Comparison, Latency, MetricRow, StepView
from stepscope.records import PHASES, Run, RunMeta
from stepscope.text import NA, ms, percent, plural, printable, sig, size

LATENCIES = ("ttft", "itl", "tpot")
MOST_STALLS = 5
MOST_SAMPLES = 3
SAMPLE_CHARS = 220


def show(console: Console, run: Run, analysis: Analysis, next_command: str) -> None:
    """The whole result, the three answers first."""
    _headline(console, run.meta, analysis)
    _answers(console, analysis)
    _verdict(console, analysis)
    _latency(console, analysis)
    _step_lines(console, run, analysis)
    _stalls(console, analysis)
    _remarks(console, run, analysis)
    console.print(Text(f"next: {next_command}", style="dim"))


def _headline(console: Console, meta: RunMeta, analysis: Analysis) -> None:
    model, device = meta.model, meta.device
    through = analysis.throughput
    left = f"{model['name']} {model['dtype']} on {device.get('kind', '?')}"
    if device.get("threads"):
        left += f" ({plural(device['threads'], 'thread')})"
    requests = sum(analysis.finish_reasons.values())
    line = Text(left, style="bold")
    line.append(f"   policy {meta.label}", style="not bold")
    line.append(
        f"   {plural(requests, 'request')}   {plural(through.steps, 'step')}   "
        f"{sig(through.wall_ns / 1e9)} s   ",
        style="not bold",
    )
    line.append(meta.stamp, style="bold reverse")
    if not meta.complete:
        line.append(" INCOMPLETE: the run was interrupted", style="bold")
    console.print(line)


def _answers(console: Console, analysis: Analysis) -> None:
    console.print()
    for number, answer in enumerate(analysis.answers, 1):
        console.print(Text.assemble((f"{number} {answer.question}", "bold")))
        console.print(Text(f"  {answer.sentence}"))


def _verdict(console: Console, analysis: Analysis) -> None:
    verdict = analysis.verdict
    console.print()
    name = verdict.name.replace("_", "-") + (f" ({verdict.sub})" if verdict.sub else "")
    share = "" if verdict.share is None else f"   {percent(verdict.share)} of time"
    console.print(Text.assemble(("verdict  ", "bold"), (name, "bold"), share))
    console.print(Text(f"         {verdict.sentence}"))
    numbers = [
        f"{e.label} {sig(e.value)} {e.unit}".strip() + (f" ({e.threshold})" if e.threshold else "")
        for e in verdict.evidence[:3]
    ]
    if numbers:
        console.print(Text("         " + "; ".join(numbers)))
    if verdict.runners_up:
        console.print(
            Text(
                "         next: "
                + ", ".join(f"{n.replace('_', '-')} {percent(s)}" for n, s in verdict.runners_up[:3])
            )
        )
    for label, text in (("gain", verdict.gain), ("try", verdict.advice), ("wrong if", verdict.falsify)):
        if text:
            console.print(Text.assemble((f"{label:<9}", "dim"), text))
    console.print(Text(f"         stepscope explain {verdict.name}", style="dim"))


def _latency(console: Console, analysis: Analysis) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("")
    for head in ("p50", "p90", "p99", "max", "n"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for name in LATENCIES:
        row = analysis.latency.get(name)
        if row is not None:
            table.add_row(f"{name} ms", *_percentiles(row), f"{row.n:,}", row.note)
    console.print()
    console.print(table)


def _percentiles(row: Latency) -> list[str]:
    return [ms(v) for v in (row.p50, row.p90, row.p99, row.max)]


def _step_lines(console: Console, run: Run, analysis: Analysis) -> None:
    through, card = analysis.throughput, analysis.card
    total = sum(line.ns for line in analysis.budget)
    console.print()
    parts = "  ".join(
        f"{line.label} {percent(line.share)}{'*' if line.estimated else ''}"
        for line in sorted(analysis.budget, key=lambda x: -x.ns)
        if total and line.share >= 0.005
    )
    console.print(Text.assemble(("step     ", "bold"), f"{ms(through.mean_step_ns)} ms mean   {parts}"))
    if card.bound_ns is not None:
        share = card.bound_ns / through.mean_step_ns if through.mean_step_ns else None
        console.print(
            Text.assemble(
                ("bound    ", "bold"),
                f"{ms(card.bound_ns)} ms to stream {size(card.weight_bytes)} of weights at "
                f"{size(card.read_bytes_per_s)}/s (measured)   {percent(share)} of the mean step",
            )
        )
    console.print(
        Text.assemble(
            ("rate     ", "bold"),
            f"{sig(through.output_tokens_per_s)} output tok/s   MBU {percent(through.mbu)}   "
            f"MFU {percent(through.mfu)}   recorder "
            f"{sig(run.meta.recorder.get('ns_per_step', float('nan')) / 1e3)} us/step",
        )
    )
    if any(line.estimated for line in analysis.budget):
        console.print(Text("         * from ceilings and twin, not from a clock around it", "dim"))
    for what in analysis.what_ifs:
        console.print(Text.assemble(("what if  ", "bold"), what.sentence))


def _stalls(console: Console, analysis: Analysis) -> None:
    harmful = [s for s in analysis.stalls if s.harmful]
    if not harmful:
        return
    console.print()
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("stall at step", "excess ms", "cause", "culprit", "waited"):
        table.add_column(head, justify="left" if head in ("cause", "culprit") else "right")
    for stall in harmful[:MOST_STALLS]:
        culprits = ", ".join(f"#{c}" for c in stall.culprits[:3]) or NA
        cause = f"{stall.cause}, {stall.prefill_tokens:,} tokens" if stall.prefill_tokens else stall.cause
        table.add_row(
            f"{stall.step:,}", ms(stall.excess_ns), cause, culprits, plural(len(stall.victims), "request")
        )
    console.print(table)
    left = len(harmful) - MOST_STALLS
    if left > 0:
        console.print(Text(f"and {left:,} more; the report lists them", style="dim"))


def _remarks(console: Console, run: Run, analysis: Analysis) -> None:
    lines = [f"failed   {error}" for _, error in analysis.failures[:MOST_STALLS]]
    if len(analysis.failures) > MOST_STALLS:
        lines.append(f"         and {len(analysis.failures) - MOST_STALLS} more failed requests")
    if analysis.late_admissions:
        request, waited = analysis.late_admissions[0]
        count = plural(len(analysis.late_admissions), "request")
        lines.append(
            f"late     {count} admitted more than one step after arrival; "
            f"the worst, #{request}, after {ms(waited)} ms"
        )
    if analysis.preemptions:
        lines.append(
            f"preempt  {plural(analysis.preemptions, 'preemption')}, "
            f"{analysis.recomputed_tokens:,} tokens computed again"
        )
    lines += [f"note     {note}" for note in [*run.meta.notes, *analysis.notes]]
    if lines:
        console.print()
    for line in lines:
        console.print(Text(printable(line)))


def samples(console: Console, meta: RunMeta) -> None:
    """What a few requests said."""
    for sample in meta.samples[:MOST_SAMPLES]:
        text = printable(sample.text.strip()).replace("\n", " ")
        cut = text[:SAMPLE_CHARS] + ("..." if len(text) > SAMPLE_CHARS else "")
        prompt = printable(sample.prompt.strip()).replace("\n", " ")[:70]
        console.print(Text.assemble((f"#{sample.request} {prompt}", "bold")))
        console.print(Text(f"   {cut}"))
    if meta.samples:
        console.print()


def steps_table(views: Iterable[StepView]) -> Table:
    """One line per step: kind, batch, wall time and its largest phases in ms."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads = ("step", "kind", "batch", "context", "ms", "forward", "gather", "sample", "rest", "verdict")
    for head in heads:
        table.add_column(head, justify="left" if head in ("kind", "verdict") else "right")
    named = [PHASES.index(p) for p in ("forward", "gather", "sample")]
    for view in views:
        rest = sum(ns or 0 for i, ns in enumerate(view.phases) if i not in named)
        table.add_row(
            str(view.step),
            view.kind,
            str(view.batch),
            f"{view.context_tokens:,}",
            ms(view.wall_ns),
            *(ms(view.phases[i]) for i in named),
            ms(rest),
            view.verdict.replace("_", "-"),
        )
    return table


def token_table(run: Run, analysis: Analysis) -> Table:
    """The inside of one sentence: each token with the phases of the step that made it."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    heads = ("token", "ms", "host", "gather", "forward", "sample", "detok+emit")
    for head in heads:
        table.add_column(head, justify="left" if head == "token" else "right")
    sample = run.meta.samples[0]
    views = [v for v in analysis.steps if v.output_tokens]
    for piece, view in zip(sample.pieces, views, strict=False):
        ns = dict(zip(PHASES, view.phases, strict=True))
        host = sum(ns[p] or 0 for p in ("recv", "schedule", "prepare", "d2h_wait", "commit", "other"))
        table.add_row(
            repr(piece)[1:-1] or "(held back)",
            ms(view.wall_ns),
            ms(host),
            ms(ns["gather"]),
            ms(ns["forward"]),
            ms(ns["sample"]),
            ms((ns["detok"] or 0) + (ns["emit"] or 0)),
        )
    return table


def comparison(console: Console, result: Comparison, metrics: list[str] | None, changed: bool) -> None:
    """Runs side by side; the first is the baseline of every delta."""
    verdict = "comparable: yes" if not result.differences else "comparable: no"
    console.print(Text(verdict, style="bold"))
    for difference in result.differences:
        console.print(Text(f"  {difference}"))
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("metric", no_wrap=True)
    for label, stamp in zip(result.labels, result.stamps, strict=True):
        table.add_column(f"{label}\n{stamp}", justify="right")
    for _ in result.labels[1:]:
        table.add_column("delta", justify="right")
    for row in result.rows:
        if (not metrics or row.metric in metrics) and not (changed and not _moved(row)):
            table.add_row(
                f"{row.metric} {row.unit}".strip(),
                *(sig(v) for v in row.values),
                *(NA if d is None else f"{d * 100:+.1f} %" for d in row.deltas[1:]),
            )
    console.print(table)
    for note in result.notes:
        console.print(Text(note, style="dim"))


def _moved(row: MetricRow) -> bool:
    return any(d is None or d != 0 for d in row.deltas[1:])
