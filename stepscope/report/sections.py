"""The written parts of the HTML page for one run. Every string from a run goes through `esc`."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from stepscope.analyze.model import Analysis, Evidence, Latency, Stall
from stepscope.records import Run
from stepscope.report import findings
from stepscope.report.tables import GATHER_HEAD, gather_rows
from stepscope.text import NA, listing, ms, percent, plural, printable, sig, size

MOST_STALLS = 40
MOST_SAMPLES = 6


def esc(value: object) -> str:
    return html.escape(printable(str(value)), quote=True)


def prose(text: str) -> str:
    """Escaped, and a number stays on one line with its per cent sign."""
    return esc(text).replace(" %", "&nbsp;%")


def rows(cells: Iterable[Sequence[str]], tag: str = "td") -> str:
    """Table rows from ready markup; the first cell is the row's header."""
    return "".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{c}</th>' if i == 0 and tag == "td" else f"<{tag}>{c}</{tag}>"
            for i, c in enumerate(row)
        )
        + "</tr>"
        for row in cells
    )


def table(
    head: Sequence[str], body: Iterable[Sequence[str]], caption: str = "", cls: str = ""
) -> str:
    """A table that scrolls inside itself on a narrow screen. Cells are ready markup."""
    title = f"<caption>{esc(caption)}</caption>" if caption else ""
    top = "".join(f'<th scope="col">{esc(h)}</th>' for h in head)
    return (
        f'<div class="scroll"><table class="{cls}">{title}<thead><tr>{top}</tr></thead>'
        f"<tbody>{rows(body)}</tbody></table></div>"
    )


def masthead(run: Run) -> str:
    meta = run.meta
    badge = "" if meta.complete else '<span class="badge warn">incomplete run</span>'
    facts = [
        findings.model(run),
        "on " + findings.device(run),
        f"policy {meta.policy}",
        f"scenario {meta.scenario}",
        f"seed {meta.seed}",
    ]
    facts = [f"<span>{esc(f)}</span>" for f in facts]
    command = f"<code>{esc(' '.join(meta.command))}</code>" if meta.command else ""
    return (
        f'<header class="run-head"><h1>{esc(meta.scenario)}: {esc(meta.label)}</h1>'
        f'<span class="stamp {esc(meta.stamp.lower())}">{esc(meta.stamp)}</span>{badge}'
        f'<p class="facts">{"".join(facts)}</p>'
        f'<p class="facts dim"><span>{esc(meta.run_id)}</span><span>{esc(meta.created_utc)}</span>'
        f"{command}</p></header>"
    )


def verdict(analysis: Analysis) -> str:
    found = analysis.verdict
    cards = "".join(
        f'<li><p class="q">{i}. {esc(a.question)}</p><p class="short">{esc(a.short)}</p>'
        f"<p>{prose(a.sentence)}</p></li>"
        for i, a in enumerate(analysis.answers, 1)
    )
    return (
        f'<section class="verdict" style="--mark:var(--v-{esc(found.name)},var(--neutral))">'
        f'<p class="kicker">verdict <b>{esc(findings.headline(analysis))}</b></p>'
        f'<p class="sentence">{prose(found.sentence)}</p></section>'
        f'<ol class="answers">{cards}</ol>'
    )


def evidence(analysis: Analysis) -> str:
    found = analysis.verdict
    body = [(esc(e.label), esc(_value(e)), esc(e.threshold or "-")) for e in found.evidence]
    others = listing([f"{findings.name(n)} {percent(s)}" for n, s in found.runners_up if s >= 0.02])
    notes = [("gain", found.gain), ("advice", found.advice), ("wrong if", found.falsify)]
    if others:
        notes.append(("next", others))
    terms = "".join(f"<dt>{k}</dt><dd>{prose(v or NA)}</dd>" for k, v in notes)
    flags = "".join(f"<dt>{esc(f)}</dt><dd>{esc(s)}</dd>" for f, s in analysis.flags)
    flagged = f'<details><summary>{plural(len(analysis.flags), "flag")}</summary><dl class="flags">'
    return (
        '<section class="two"><div><h2>Evidence</h2>'
        + table(["", "value", "held against"], body, cls="evidence")
        + (f"{flagged}{flags}</dl></details>" if flags else "")
        + f'</div><div><h2>What to do about it</h2><dl class="todo">{terms}</dl></div></section>'
    )


def _value(e: Evidence) -> str:
    return NA if e.value is None else f"{sig(e.value)} {e.unit}".strip()


def numbers(analysis: Analysis) -> str:
    through, good = analysis.throughput, analysis.goodput
    goodput = NA if not good.judged else f"{good.attained:,} of {good.judged:,}"
    tiles = [
        ("output tokens/s", sig(through.output_tokens_per_s)),
        ("all tokens/s", sig(through.total_tokens_per_s)),
        ("requests/s", sig(through.requests_per_s)),
        ("step p50, ms", ms(through.p50_step_ns)),
        ("MBU", percent(through.mbu)),
        ("MFU", percent(through.mfu)),
        ("meet the SLO", goodput),
        ("preemptions", f"{analysis.preemptions:,}"),
    ]
    shown = "".join(f"<div><dd>{esc(v)}</dd><dt>{esc(k)}</dt></div>" for k, v in tiles)
    head = ["ms", "mean", "p50", "p90", "p95", "p99", "max", "n", ""]
    body = [_latency(found) for found in analysis.latency.values()]
    return (
        f'<section><h2>Key numbers</h2><dl class="tiles">{shown}</dl>'
        + table(head, body, cls="num notes")
        + f'<p class="dim">{esc(_outcome(analysis))}</p></section>'
    )


def _latency(found: Latency) -> list[str]:
    values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
    note = f'<span class="note">{esc(found.note)}</span>'
    return [esc(found.metric), *map(ms, values), f"{found.n:,}", note]


def _outcome(analysis: Analysis) -> str:
    ended = listing([f"{n:,} {reason}" for reason, n in analysis.finish_reasons.items()], 6)
    parts = [f"Requests ended by: {ended}." if ended else "No request ended."]
    if analysis.goodput.slo:
        targets = [f"{k} {sig(v)}" for k, v in analysis.goodput.slo.items()]
        parts.append(f"SLO: {listing(targets)}.")
    parts += [f"Request {r} failed: {why}." for r, why in analysis.failures[:5]]
    parts += [f"Request {r} waited {ms(ns)} ms." for r, ns in analysis.late_admissions[:1]]
    return " ".join(parts)


def budget(analysis: Analysis) -> str:
    lines = analysis.budget
    if not lines:
        return '<section><h2>Where the time goes</h2><p class="dim">No working steps.</p></section>'
    steps = max(1, analysis.throughput.steps)
    bar = "".join(
        f'<i class="{"est" if b.estimated else ""}" style="width:{b.share * 100:.3f}%;'
        f'--c:var(--b-{esc(b.key)},var(--neutral))" title="{esc(b.label)} {percent(b.share)}">'
        f"{_bar_label(b.label, b.share)}</i>"
        for b in lines
        if b.share > 0
    )
    body = [
        (
            f'<i class="swatch {"est" if b.estimated else ""}" '
            f'style="--c:var(--b-{esc(b.key)},var(--neutral))"></i>{esc(b.label)}',
            ms(b.ns / steps),
            f"{b.share * 100:.1f}",
            "estimated" if b.estimated else "clock",
        )
        for b in lines
    ]
    total = ("all working steps", ms(sum(b.ns for b in lines) / steps))
    body.append((*total, f"{sum(b.share for b in lines) * 100:.1f}", ""))
    said = ", ".join(f"{b.label} {percent(b.share)}" for b in lines)
    return (
        '<section><h2>Where the time goes</h2><p class="finding">Share of the time of all working '
        "steps. Hatched parts are estimated from the ceilings and the twin; plain ones were "
        f'clocked.</p><div class="bar" role="img" aria-label="{esc(said)}">{bar}</div>'
        + table(["part", "ms per step", "%", "from"], body, cls="num total")
        + "</section>"
    )


def _bar_label(label: str, share: float) -> str:
    return f"<b>{esc(label)} {percent(share)}</b>" if share > 0.0068 * len(label) + 0.03 else ""


def ceilings(run: Run, analysis: Analysis) -> str:
    card = analysis.card
    gflops = None if card.gemm_flops is None else card.gemm_flops / 1e9
    per_second = [
        f"{size(r)}/s" if r else NA for r in (card.read_bytes_per_s, card.gemv_bytes_per_s)
    ]
    by = ", by F.linear" if run.meta.engine.get("products") in ("plain", "onednn") else ""
    left = [
        ("weights a step reads", size(card.weight_bytes)),
        ("KV cache per token", size(card.kv_bytes_per_token)),
        ("read rate at that working set", per_second[0]),
        (f"matrix-vector products{by} reach", per_second[1]),
        ("matrix products, GFLOP/s", sig(gflops)),
    ]
    right = [
        ("bound: weights / read rate, ms", ms(card.bound_ns)),
        ("that is, tokens/s at batch 1", sig(card.bound_tokens_per_s)),
        ("dispatch at batch 1 (twin), ms", ms(card.twin_ns)),
        ("compute takes over at batch", sig(card.critical_batch)),
        (
            "MBU / MFU of this run",
            f"{percent(analysis.throughput.mbu)} / {percent(analysis.throughput.mfu)}",
        ),
    ]
    lists = "".join(
        '<dl class="card">' + "".join(f"<dt>{k}</dt><dd>{esc(v)}</dd>" for k, v in part) + "</dl>"
        for part in (left, right)
    )
    return (
        f"<section><h2>Ceilings <small>{esc(ceiling_basis(run, analysis))}</small></h2>"
        f'<div class="two">{lists}</div>{_what_ifs(analysis)}</section>'
    )


def ceiling_basis(run: Run, analysis: Analysis) -> str:
    """Where the roof comes from; only a MEASURED run has a measured one."""
    if analysis.card.read_bytes_per_s is None:
        return "not measured"
    return {"MEASURED": "measured on this device", "MODELLED": "of the modelled device"}.get(
        run.meta.stamp, "given"
    )


def _what_ifs(analysis: Analysis) -> str:
    if not analysis.what_ifs:
        return ""
    body = [
        (
            esc(w.change),
            ms(w.before_ns),
            ms(w.after_ns),
            "token" if w.per_token else "step",
            esc(w.sentence),
        )
        for w in analysis.what_ifs
    ]
    return "<h3>What if <small>estimated from the budget, never measured</small></h3>" + table(
        ["change", "ms now", "ms then", "per", ""], body, cls="num prose"
    )


def gathering(analysis: Analysis) -> str:
    body = [[esc(cell) for cell in row] for row in gather_rows(analysis)]
    if not body:
        return ""
    found = f'<p class="finding">{prose(findings.gather(analysis))}</p>'
    return (
        f"<section><h2>Gather against context</h2>{found}"
        + table(GATHER_HEAD, body, cls="num")
        + "</section>"
    )


def stalls(analysis: Analysis) -> str:
    harmful = [s for s in analysis.stalls if s.harmful]
    harmless = [s for s in analysis.stalls if not s.harmful]
    out = f'<section><h2>Stalls</h2><p class="finding">{esc(findings.stalls(analysis))}</p>'
    if harmful:
        out += _stall_table(harmful)
    if harmless:
        title = f"{plural(len(harmless), 'harmless one')}: within the threshold"
        out += f"<details><summary>{title}</summary>{_stall_table(harmless)}</details>"
    return out + "</section>"


def _stall_table(found: Sequence[Stall]) -> str:
    body = [
        (
            f'<button class="step" data-step="{s.step}">step {s.step}</button>',
            sig(s.begin_ns / 1e9),
            ms(s.wall_ns),
            ms(s.baseline_ns),
            ms(s.excess_ns),
            esc(s.cause),
            f"{s.prefill_tokens:,}",
            esc(listing([str(i) for i in s.culprits]) or "-"),
            f'<span title="{listing([str(i) for i in s.victims], 40)}">{len(s.victims)}</span>',
            esc(s.detail),
        )
        for s in found[:MOST_STALLS]
    ]
    head = [
        "",
        "at s",
        "ms",
        "usual ms",
        "excess ms",
        "cause",
        "prefill tokens",
        "culprit requests",
    ]
    more = len(found) - len(body)
    note = f'<p class="dim">and {more:,} more, smaller ones.</p>' if more else ""
    return table([*head, "victims", ""], body, cls="num prose") + note


def samples(run: Run) -> str:
    shown = run.meta.samples[:MOST_SAMPLES]
    if not shown:
        return ""
    items = "".join(
        f'<article class="sample"><p class="dim">request {s.request}</p>'
        f'<pre><span class="prompt">{esc(s.prompt)}</span>\n{esc(s.text.strip())}</pre></article>'
        for s in shown
    )
    return f'<section><h2>What was generated</h2><div class="two">{items}</div></section>'


def limits(run: Run, analysis: Analysis) -> str:
    absent = "".join(f"<dt>{esc(w)}</dt><dd>n/a: {esc(y)}</dd>" for w, y in analysis.not_available)
    notes = "".join(f"<li>{esc(n)}</li>" for n in [*analysis.notes, *run.meta.notes])
    facts = [
        *((f"basis of {k}", v) for k, v in run.meta.basis.items()),
        *((f"clock {k}", v) for k, v in run.meta.clock.items()),
        *((f"engine {k}", v) for k, v in run.meta.engine.items()),
        *((f"device {k}", v) for k, v in run.meta.device.items()),
        *run.meta.versions.items(),
    ]
    body = [(esc(k), esc(v)) for k, v in facts]
    return (
        "<section><h2>Limits of this run</h2>"
        f'<p>{esc(findings.recorder(run))}</p><dl class="flags">{absent}</dl><ul>{notes}</ul>'
        "<details><summary>How it was run</summary>"
        + table(["", ""], body)
        + "</details></section>"
    )
