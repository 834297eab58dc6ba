"""One matplotlib function per figure. Each draws into the axes it is given: (axes, run, analysis).

The sentences above the figures are those of the HTML page (`findings`). Only the drawing is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stepscope.analyze.model import Analysis, StepView
from stepscope.records import PHASES, Run
from stepscope.report import embed, findings, palette
from stepscope.text import percent, size

MOST_BARS = 700  # columns of a timeline; more steps than that share a column

INK, DIM, GRID = "#1b2129", "#5a6472", "#e4e8ed"


def light(pair: tuple[str, str]) -> str:
    return pair[0]


def style(axes: Any, title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, parse_math=False)
    axes.set_xlabel(x, fontsize=8, color=DIM, loc="right")
    axes.set_ylabel(y, fontsize=8, color=DIM)
    axes.tick_params(labelsize=8, colors=DIM, length=0)
    axes.set_axisbelow(True)
    axes.grid(color=GRID, linewidth=0.7)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(DIM)


def empty(axes: Any, title: str, why: str) -> None:
    style(axes, title)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, why, ha="center", va="center", transform=axes.transAxes, fontsize=8.5,
              color=DIM, wrap=True)  # fmt: skip


def legend(axes: Any, **place: Any) -> None:
    axes.legend(fontsize=7.5, frameon=False, handlelength=1.4, labelcolor=DIM, **place)


def logarithmic(axes: Any) -> None:
    """Both axes, with plain numbers at 1, 2 and 5 of each decade while they fit."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=10))
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,g}"))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())


def working(analysis: Analysis) -> list[StepView]:
    return [v for v in analysis.steps if v.kind != "idle"]


def columns(views: Sequence[StepView], most: int = MOST_BARS) -> list[list[StepView]]:
    """Steps that share a pixel column: equal stretches of time, none empty."""
    if len(views) <= most:
        return [[v] for v in views]
    start = views[0].begin_ns
    width = max(1, views[-1].end_ns - start) / most
    found: dict[int, list[StepView]] = {}
    for view in views:
        middle = (view.begin_ns + view.end_ns) / 2
        found.setdefault(min(most - 1, int((middle - start) / width)), []).append(view)
    return list(found.values())


def spans(groups: Sequence[Sequence[StepView]]) -> tuple[list[float], list[float]]:
    """Where each column begins and how wide it is, in seconds."""
    left = [group[0].begin_ns / 1e9 for group in groups]
    return left, [(group[-1].end_ns - group[0].begin_ns) / 1e9 for group in groups]


def middle_step(group: Sequence[StepView]) -> StepView:
    return sorted(group, key=lambda v: v.wall_ns)[(len(group) - 1) // 2]


def timeline(axes: Any, run: Run, analysis: Analysis) -> None:
    """Phases of the median step per column, with a whisker to the longest."""
    groups = columns(working(analysis))
    if not groups:
        empty(axes, "Steps over time", findings.timeline(analysis))
        return
    shown = [middle_step(group) for group in groups]
    left, width = spans(groups)
    base = [0.0] * len(shown)
    for i, name in enumerate(PHASES):
        part = [(v.phases[i] or 0) / 1e6 for v in shown]
        if any(part):
            axes.bar(left, part, width, bottom=base, align="edge", linewidth=0, label=name,
                     color=light(palette.phase(name)))  # fmt: skip
            base = [b + p for b, p in zip(base, part, strict=True)]
    for group, x, w, top in zip(groups, left, width, base, strict=True):
        longest = max(v.wall_ns for v in group) / 1e6
        if longest > top:
            axes.plot([x + w / 2] * 2, [top, longest], color=DIM, linewidth=0.6)
    style(axes, "Steps over time", "time since the start of the run, s", "step time, ms")
    axes.set_xlim(left[0], left[-1] + width[-1])
    axes.set_ylim(0, None)
    legend(axes, loc="upper left", bbox_to_anchor=(1.0, 1.02))


def verdicts(axes: Any, run: Run, analysis: Analysis) -> None:
    """Share of the time of all working steps by the verdict of the step."""
    total: dict[str, int] = {}
    for view in working(analysis):
        total[view.verdict] = total.get(view.verdict, 0) + view.wall_ns
    if not total:
        empty(axes, "Verdict by share of time", "The run has no steps.")
        return
    names = sorted(total, key=lambda n: total[n])
    shares = [total[n] / sum(total.values()) for n in names]
    axes.barh(range(len(names)), [s * 100 for s in shares], height=0.62,
              color=[light(palette.verdict(n)) for n in names])  # fmt: skip
    for i, share in enumerate(shares):
        axes.text(share * 100 + 1, i, f"{share * 100:.1f} %", va="center", fontsize=8, color=DIM)
    axes.set_yticks(range(len(names)), [findings.name(n) for n in names])
    style(axes, "Verdict by share of time", "%")
    axes.set_xlim(0, max(shares) * 118)
    axes.grid(axis="y", visible=False)


def budget(axes: Any, run: Run, analysis: Analysis) -> None:
    """One bar that sums to 100 %; estimated parts are hatched."""
    lines = [b for b in analysis.budget if b.share > 0]
    if not lines:
        empty(axes, "Where the time goes", "No working steps.")
        return
    at = 0.0
    for line in lines:
        colour = light(palette.budget(line.key))
        label = f"{line.label} {percent(line.share)}" if line.share >= 0.01 else "_"  # unnamed
        axes.barh([0], [line.share * 100], left=at, height=0.55, color=colour, edgecolor="white",
                  linewidth=0.8, hatch="////" if line.estimated else "",
                  label=label)  # fmt: skip
        at += line.share * 100
    style(axes, "Where the time of all working steps goes, % (hatched: estimated)")
    axes.set_yticks([])
    axes.set_xlim(0, 100)
    axes.grid(visible=False)
    legend(axes, loc="upper left", bbox_to_anchor=(0, -0.3), ncols=4, columnspacing=1.4)


def roofline(axes: Any, run: Run, analysis: Analysis) -> None:
    """Arithmetic intensity against FLOP/s; measured ceilings solid, others dashed."""
    points = [
        (v.flops / (v.weight_bytes + v.kv_bytes), v.flops / v.wall_ns, v.kind)
        for v in working(analysis)
        if v.flops and v.weight_bytes + v.kv_bytes and v.wall_ns
    ]
    if not points:
        empty(axes, "Roofline", findings.roofline(analysis))
        return
    for i, (kind, marker) in enumerate((("decode", "o"), ("mixed", "s"), ("prefill", "^"))):
        mine = [(x, y) for x, y, k in points if k == kind]
        if mine:
            axes.scatter(*zip(*mine, strict=True), s=11, marker=marker, alpha=0.55, linewidth=0,
                         color=light(palette.RUNS[i]), label=kind)  # fmt: skip
    logarithmic(axes)
    _roof(axes, run, analysis, [p[0] for p in points])
    style(axes, "Roofline", "FLOPs per byte read", "GFLOP/s")
    legend(axes, loc="best")


def _roof(axes: Any, run: Run, analysis: Analysis, xs: list[float]) -> None:
    card = analysis.card
    if card.read_bytes_per_s is None:
        return
    line = "-" if run.meta.stamp == "MEASURED" else "--"
    slope = card.read_bytes_per_s / 1e9
    peak = None if card.gemm_flops is None else card.gemm_flops / 1e9
    ridge = max(xs) * 2 if peak is None else peak / slope
    low, high = min([*xs, ridge]) / 3, max([*xs, ridge]) * 2
    grid = [low, min(ridge, high)]
    label = f"{size(card.read_bytes_per_s)}/s"
    axes.plot(grid, [slope * x for x in grid], line, color=INK, linewidth=1.5, label=label)
    if peak is not None and ridge < high:
        flat = [ridge, high]
        axes.plot(flat, [peak] * 2, line, color=DIM, linewidth=1.5, label=f"{peak:,.0f} GFLOP/s")


def batch(axes: Any, run: Run, analysis: Analysis) -> None:
    """Decode-only step time by batch size (p50, p10 to p90), the bound and the dispatch floor."""
    points = analysis.batches
    if not points:
        empty(axes, "Batch size and step time", findings.batch(analysis))
        return
    x = [p.batch for p in points]
    y = [p.p50_ns / 1e6 for p in points]
    spread = [
        [max(0.0, p.p50_ns - p.p10_ns) / 1e6 for p in points],
        [max(0.0, p.p90_ns - p.p50_ns) / 1e6 for p in points],
    ]
    axes.errorbar(x, y, yerr=spread, color=light(palette.phase("forward")), marker="o",
                  markersize=4, linewidth=1.4, label="decode step, p50")  # fmt: skip
    for label, key, mark in (("bound", "weights", "s-"), ("dispatch (twin)", "dispatch", "^:")):
        values = [p.floor_ns if key == "weights" else p.twin_ns for p in points]
        known = [(b, v / 1e6) for b, v in zip(x, values, strict=True) if v is not None]
        if known:
            axes.plot(*zip(*known, strict=True), mark, color=light(palette.budget(key)),
                      linewidth=1.5, markersize=3, label=label)  # fmt: skip
    style(axes, "Batch size and step time", "batch", "ms")
    axes.set_ylim(0, None)
    axes.xaxis.get_major_locator().set_params(integer=True)
    legend(axes, loc="best")


def itl(axes: Any, run: Run, analysis: Analysis) -> None:
    """The share of gaps between tokens that are longer, both axes logarithmic: the tail."""
    points = embed.gaps(analysis.itl_ns)
    if not points:
        empty(axes, "Gaps between tokens (ITL)", findings.itl(analysis))
        return
    n = len(analysis.itl_ns)
    longer = [(ns / 1e6, 100 * (n - rank + 1) / n) for ns, rank in points]
    axes.step(*zip(*longer, strict=True), where="post", color=light(palette.RUNS[0]), linewidth=1.6)
    logarithmic(axes)
    style(axes, "Gaps between tokens (ITL)", "ms", "% at least as long")


def ttft(axes: Any, run: Run, analysis: Analysis) -> None:
    """Time to the first token by request in order of arrival: queued, then computing."""
    found = embed.ttft_columns(run)
    n = len(found["id"])
    if not n:
        empty(axes, "Time to the first token", findings.ttft(analysis))
        return
    every = -(-n // 200)
    queue = [ns / 1e6 for ns in found["queue"]][::every]
    prefill = [ns / 1e6 for ns in found["prefill"]][::every]
    x = range(len(queue))
    axes.bar(x, queue, color=light(palette.NEUTRAL), hatch="////", edgecolor="white", linewidth=0,
             label="queued")  # fmt: skip
    axes.bar(x, prefill, bottom=queue, color=light(palette.phase("forward")), linewidth=0,
             label="admission to first token")  # fmt: skip
    shown = f"{n:,} requests in order of arrival" + (f", every {every}th" if every > 1 else "")
    style(axes, "Time to the first token", shown, "ms")
    axes.set_xticks([])
    axes.margins(y=0.22)
    legend(axes, loc="upper left", ncols=2)


def traffic(axes: Any, run: Run, analysis: Analysis) -> None:
    """Bytes a step reads over time: weights below, KV cache on top."""
    groups = columns([v for v in working(analysis) if v.weight_bytes or v.kv_bytes])
    if not groups:
        empty(axes, "Weights and KV cache", findings.traffic(analysis))
        return
    shown = [middle_step(group) for group in groups]
    left, width = spans(groups)
    weights = [v.weight_bytes / 1e6 for v in shown]
    cache = [v.kv_bytes / 1e6 for v in shown]
    place = {"width": width, "align": "edge", "linewidth": 0}
    axes.bar(left, weights, label="weights", color=light(palette.BUDGET["weights"]), **place)
    axes.bar(left, cache, bottom=weights, label="KV cache", color=light(palette.BUDGET["kv"]),
             **place)  # fmt: skip
    style(axes, "Weights and KV cache", "time since the start of the run, s", "MB per step")
    axes.margins(x=0, y=0.25)
    legend(axes, loc="upper left", ncols=2)


Draw = Callable[[Any, Run, Analysis], None]
FIGURES: dict[str, Draw] = {
    "timeline": timeline,
    "budget": budget,
    "verdicts": verdicts,
    "roofline": roofline,
    "batch": batch,
    "itl": itl,
    "ttft": ttft,
    "traffic": traffic,
}
