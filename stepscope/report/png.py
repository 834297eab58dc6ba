"""The run as one picture: the verdict, the answers and the figures; or one figure by its name."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from stepscope.analyze.model import Analysis, Comparison
from stepscope.errors import UsageError
from stepscope.records import Run
from stepscope.report import figures, findings
from stepscope.text import ms, percent, printable, sig

FIGURES = tuple(figures.FIGURES)

Labelled = tuple[str, Run, Analysis]


def write(
    runs: list[Labelled], comparison: Comparison | None, path: Path | str, figure: str | None = None
) -> None:
    """Write the first run's summary, or one of FIGURES, as PNG (or what the suffix says).

    Raises UsageError for an unknown figure.
    """
    if figure is not None and figure not in figures.FIGURES:
        raise UsageError(f"no figure is called {figure!r}; choose one of {', '.join(FIGURES)}")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"hatch.linewidth": 0.6, "hatch.color": "white"}):
        drawn = _summary(pyplot, runs, comparison) if figure is None else _one(pyplot, runs, figure)
        drawn.savefig(path, dpi=140, facecolor="white", metadata=None)
        pyplot.close(drawn)


def _one(pyplot: Any, runs: list[Labelled], name: str) -> Any:
    label, run, analysis = runs[0]
    drawn, axes = pyplot.subplots(figsize=(9, 4.6), layout="constrained")
    figures.FIGURES[name](axes, run, analysis)
    _footer(drawn, label, run)
    return drawn


def _summary(pyplot: Any, runs: list[Labelled], comparison: Comparison | None) -> Any:
    label, run, analysis = runs[0]
    drawn = pyplot.figure(figsize=(12, 15), layout="constrained")
    head, body = drawn.subfigures(2, 1, height_ratios=[2.9, 12])
    _head(head, label, run, analysis, comparison)
    axes = body.subplot_mosaic(
        [["timeline"] * 2, ["budget"] * 2, ["verdicts", "batch"], ["roofline", "itl"],
         ["ttft", "traffic"]],
        height_ratios=[1.25, 0.34, 1, 1, 1],
    )  # fmt: skip
    for name, draw in figures.FIGURES.items():
        draw(axes[name], run, analysis)
    return drawn


def _head(
    part: Any, label: str, run: Run, analysis: Analysis, comparison: Comparison | None
) -> None:
    """Texts placed by hand, in lines from the top; the strip holds about 14 of them."""
    place = {"ha": "left", "va": "top", "parse_math": False}
    state = run.meta.stamp + ("" if run.meta.complete else ", incomplete run")
    facts = f"{findings.model(run)} on {findings.device(run)}   scenario {run.meta.scenario}"
    part.text(0.015, 0.97, _plain(label, 70), fontsize=15, fontweight="bold", **place)
    part.text(0.985, 0.96, state, fontsize=10, fontweight="bold", parse_math=False, ha="right",
              va="top", color=figures.INK, bbox={"boxstyle": "round", "fc": "none"})  # fmt: skip
    part.text(0.015, 0.85, _plain(facts, 130), fontsize=9, color=figures.DIM, **place)
    sentence = "\n".join(textwrap.wrap(_plain(analysis.verdict.sentence, 230), 105))
    part.text(0.015, 0.75, sentence, fontsize=13, **place)
    for i, answer in enumerate(analysis.answers):
        x = 0.015 + i * 0.33
        question = "\n".join(textwrap.wrap(f"{i + 1}. {_plain(answer.question, 100)}", 52))
        part.text(x, 0.52, question, fontsize=8.5, color=figures.DIM, linespacing=1.25, **place)
        part.text(x, 0.37, _plain(answer.short, 44), fontsize=11, fontweight="bold", **place)
    part.text(0.015, 0.23, _numbers(analysis), fontsize=9.5, **place)
    part.text(0.015, 0.13, _compared(comparison), fontsize=8.5, color=figures.DIM, **place)


def _numbers(analysis: Analysis) -> str:
    through = analysis.throughput
    parts = []
    for name in ("ttft", "itl", "tpot"):
        found = analysis.latency.get(name)
        if found is not None:
            parts.append(f"{name} ms  p50 {ms(found.p50)}  p99 {ms(found.p99)}  n {found.n:,}")
    parts.append(f"{sig(through.output_tokens_per_s)} tokens/s")
    return "      ".join([*parts, f"MBU {percent(through.mbu)}", f"MFU {percent(through.mfu)}"])


COMPARED = ("p99_ttft_ms", "p99_itl_ms", "max_itl_ms", "output_tokens_per_s")


def _compared(comparison: Comparison | None) -> str:
    """A line per metric over the runs of the first one's stamp; other stamps never join it."""
    if comparison is None or len(comparison.labels) < 2:
        return ""
    mine = [i for i, s in enumerate(comparison.stamps) if s == comparison.stamps[0]][:5]
    return "\n".join(
        f"{row.metric}:   "
        + "   ".join(f"{_plain(comparison.labels[i], 22)} {sig(row.values[i])}" for i in mine)
        for row in comparison.rows
        if row.metric in COMPARED
    )


def _footer(drawn: Any, label: str, run: Run) -> None:
    text = (
        f"{_plain(label, 60)}   {findings.model(run)} on {findings.device(run)}   {run.meta.stamp}"
    )
    drawn.supxlabel(text, fontsize=8, color=figures.DIM, x=0.01, ha="left", parse_math=False)


def _plain(text: str, most: int) -> str:
    line = " ".join(printable(text).split())
    return line if len(line) <= most else line[: most - 1] + "…"
