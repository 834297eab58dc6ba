"""What each figure shows, as a sentence: caption, aria-label and Markdown say the same thing."""

from __future__ import annotations

from stepscope.analyze.model import Analysis
from stepscope.records import Run
from stepscope.text import ms, percent, plural, sig, size


def name(verdict: str) -> str:
    """bandwidth_bound -> bandwidth-bound."""
    return verdict.replace("_", "-")


def headline(analysis: Analysis) -> str:
    verdict = analysis.verdict
    sub = f" ({name(verdict.sub)})" if verdict.sub else ""
    share = "" if verdict.share is None else f", {percent(verdict.share)} of the time"
    return f"{name(verdict.name)}{sub}{share}"


def device(run: Run) -> str:
    info = run.meta.device
    threads = info.get("threads")
    label = str(info.get("name") or info.get("kind") or "unknown device")
    return f"{label} ({plural(int(threads), 'thread')})" if threads else label


def model(run: Run) -> str:
    info = run.meta.model
    return " ".join(str(info[k]) for k in ("name", "dtype") if info.get(k)) or "unknown model"


def timeline(analysis: Analysis) -> str:
    working = [s for s in analysis.steps if s.kind != "idle"]
    if not working:
        return "The run has no steps."
    slowest = max(working, key=lambda s: s.wall_ns)
    return (
        f"{plural(len(working), 'step')}; the typical one takes "
        f"{ms(analysis.throughput.p50_step_ns)} ms, the slowest {ms(slowest.wall_ns)} ms "
        f"(step {slowest.step}, {slowest.kind})."
    )


def roofline(analysis: Analysis) -> str:
    card, through = analysis.card, analysis.throughput
    if not any(s.flops for s in analysis.steps):
        return "No step has FLOPs: nothing to place on a roofline."
    if card.read_bytes_per_s is None:
        return "No ceilings were measured: the points stand without a roof."
    peak = "" if card.gemm_flops is None else f" and {sig(card.gemm_flops / 1e9)} GFLOP/s"
    return (
        f"Against {size(card.read_bytes_per_s)}/s{peak}, the steps reach "
        f"{percent(through.mbu)} of the bandwidth (MBU) and {percent(through.mfu)} of the "
        "arithmetic (MFU)."
    )


def batch(analysis: Analysis) -> str:
    points = analysis.batches
    if not points:
        return "No decode-only steps: no batch size to compare."
    if len(points) == 1:
        return f"Every decode-only step ran at batch {points[0].batch}: {ms(points[0].p50_ns)} ms."
    first, last = points[0], points[-1]
    return (
        f"From batch {first.batch} to {last.batch} a decode step goes from {ms(first.p50_ns)} to "
        f"{ms(last.p50_ns)} ms while throughput goes from {sig(first.tokens_per_s)} to "
        f"{sig(last.tokens_per_s)} tokens/s."
    )


def gather(analysis: Analysis) -> str:
    first, last = analysis.gathers[0], analysis.gathers[-1]
    return (
        f"From a context of {first.context:,.0f} tokens to {last.context:,.0f}, assembling K and V "
        f"goes from {ms(first.gather_ns)} to {ms(last.gather_ns)} ms of a decode-only step."
    )


def itl(analysis: Analysis) -> str:
    found = analysis.latency.get("itl")
    if found is None or not found.n or not found.p50 or found.p99 is None:
        return "No request emitted two tokens: there is no gap between tokens."
    return (
        f"Half of the {found.n:,} gaps between tokens are at most {ms(found.p50)} ms; p99 is "
        f"{ms(found.p99)} ms, {sig(found.p99 / found.p50, 2)}x the median."
    )


def ttft(analysis: Analysis) -> str:
    queue, prefill = analysis.latency.get("queue"), analysis.latency.get("prefill")
    if queue is None or prefill is None or not queue.n:
        return "No request reached its first token."
    return (
        f"At the median a request waits {ms(queue.p50)} ms for admission and {ms(prefill.p50)} ms "
        "from there to its first token."
    )


def traffic(analysis: Analysis) -> str:
    working = [s for s in analysis.steps if s.weight_bytes or s.kv_bytes]
    if not working:
        return "No step has byte counts."
    weights = sum(s.weight_bytes for s in working)
    kv = sum(s.kv_bytes for s in working)
    return (
        f"A step reads {size(weights / len(working))} of weights and {size(kv / len(working))} of "
        f"KV cache on average: weights are {percent(weights / (weights + kv))} of the bytes."
    )


def stalls(analysis: Analysis) -> str:
    harmful = [s for s in analysis.stalls if s.harmful]
    if not harmful:
        return "No step held up running decodes beyond the threshold."
    excess = sum(s.excess_ns for s in harmful)
    return (
        f"{plural(len(harmful), 'step')} held up running decodes, {ms(excess)} ms in all beyond "
        "the decode-only median of the same batch."
    )


def recorder(run: Run) -> str:
    cost = run.meta.recorder.get("ns_per_step")
    if not isinstance(cost, int | float):
        return "Recorder cost: n/a (this run does not state it)."
    laps = run.meta.recorder.get("laps_per_step")
    count = f" for {laps} lap marks" if laps else ""
    return f"Recorder cost: {sig(cost / 1e3, 2)} us per step{count}."
