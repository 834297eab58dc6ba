"""The verdict of a run and of each step: the first branch that fires, in it the largest share."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.analyze.advice import CHUNK_FALSIFY, KV_ADVICE, chunk_advice, is_chunked
from stepscope.analyze.budget import TERMS, Budget, Split, ranking
from stepscope.analyze.frame import Frame, idle_with_pending, is_compiled
from stepscope.analyze.model import Evidence, Stall, Verdict
from stepscope.analyze.rules import RULES
from stepscope.analyze.tail import Delay, Tail, verdict_of_delay
from stepscope.records import HOST_PHASES
from stepscope.text import listing, ms, percent, plural

TAIL_CAUSES = {
    "prefill_stall_bound": ("prefill", "recompute"),
    "kv_pressure_bound": ("recompute", "preemption"),
    "pause_bound": ("gc", "compile", "alloc", "capture"),
}


@dataclass(frozen=True, slots=True)
class Findings:
    """What the branches look at."""

    frame: Frame
    budget: Budget
    tail: Tail
    stalls: list[Stall]


@dataclass(frozen=True, slots=True)
class _Decided:
    name: str
    sub: str
    share: float | None
    sentence: str
    evidence: tuple[Evidence, ...]
    gain: str
    advice: str = ""  # "" = the rule's
    falsify: str = ""


def judge_run(found: Findings) -> Verdict:
    """The branches in order. What printing needs beyond the decision comes from RULES."""
    decided = (
        _too_little(found) or _tail_branch(found) or _idle_branch(found) or _decomposition(found)
    )
    rule = RULES[decided.name]
    return Verdict(
        decided.name,
        decided.sub,
        decided.share,
        decided.sentence + _noise_remark(found.frame),
        decided.evidence,
        decided.gain,
        decided.advice or rule.advice,
        decided.falsify or rule.falsify,
        (),
        _runners_up(found, decided.name),
    )


def _noise_remark(frame: Frame) -> str:
    """A verdict from a disturbed run says so itself."""
    noisy = sum(frame.rows[i].wall_ns for i in frame.working if i in frame.noisy)
    share = noisy / frame.working_ns if frame.working_ns else 0.0
    if share < frame.limits.contention_time:
        return ""
    return (
        f" Other processes took the cores during {percent(share)} of the time: on an idle machine "
        "the shares may differ."
    )


def _runners_up(found: Findings, primary: str) -> tuple[tuple[str, float], ...]:
    """Other terms by share of time; a stall's share overlaps the terms its step consists of."""
    shares = dict(found.budget.ranking())
    shares.update({k: v for k, v in found.tail.by_verdict.items() if k != "unexplained"})
    shares.pop(primary, None)
    return tuple(sorted(shares.items(), key=lambda pair: -pair[1]))


def decoding_steps(frame: Frame) -> int:
    return sum(frame.rows[i].kind in ("decode", "mixed") for i in frame.working)


def _too_little(found: Findings) -> _Decided | None:
    frame = found.frame
    n, least = decoding_steps(frame), frame.limits.min_decode_steps
    if n >= least:
        return None
    return _Decided(
        "insufficient_data",
        "",
        None,
        f"Not enough data: {plural(n, 'decode step')} after warm-up, and a verdict takes {least}.",
        (Evidence("decode steps after warm-up", n, "steps", f">= {least}"),),
        "n/a: nothing was judged",
    )


def _tail_branch(found: Findings) -> _Decided | None:
    frame, tail = found.frame, found.tail
    name = tail.primary() if tail.share >= frame.limits.tail_share else None
    if name is None:
        return None
    share = tail.by_verdict[name]
    if name == "pause_bound" and share <= frame.limits.pause_share * tail.share:
        return None
    worst = next((s for s in found.stalls if s.harmful and s.cause in TAIL_CAUSES[name]), None)
    sub = (
        tail.pause_kinds.most_common(1)[0][0] if tail.pause_kinds and name == "pause_bound" else ""
    )
    return _Decided(
        name,
        sub,
        share,
        _tail_sentence(name, sub, share, worst),
        _tail_evidence(found, name, share, worst),
        _gain(found.budget.mean_ns, share, "none of it had happened"),
        chunk_advice(frame) if name == "prefill_stall_bound" else "",
        CHUNK_FALSIFY if name == "prefill_stall_bound" and is_chunked(frame) else "",
    )


def _tail_sentence(name: str, sub: str, share: float, worst: Stall | None) -> str:
    what = {
        "prefill_stall_bound": "steps that prefill while others decode",
        "kv_pressure_bound": "computing preempted tokens again",
        "pause_bound": f"pauses ({sub or 'gc, compile, alloc, capture'})",
    }[name]
    head = f"{_title(name)}: {what} made running requests wait for {percent(share)} of the time"
    if worst is None:
        return head + "."
    return f"{head}; the worst, step {worst.step}, cost {ms(worst.excess_ns)} ms."


def _tail_evidence(
    found: Findings, name: str, share: float, worst: Stall | None
) -> tuple[Evidence, ...]:
    frame, tail = found.frame, found.tail
    limit = percent(frame.limits.tail_share)
    rows = [
        Evidence("excess of long steps", tail.share * 100, "% of time", f">= {limit}"),
        Evidence(f"of it {RULES[name].title}", share * 100, "% of time"),
    ]
    if name == "kv_pressure_bound":
        again = sum(frame.rows[i].recompute_tokens or 0 for i in frame.working)
        rows.append(Evidence("tokens computed again", again, "tokens"))
    elif worst is not None:
        label = f"excess of the worst step ({worst.step})"
        over = f"> {frame.limits.tail_factor - 1:g} x {ms(worst.baseline_ns)} ms"
        rows.append(Evidence(label, worst.excess_ns / 1e6, "ms", over))
    return tuple(rows)


def _idle_branch(found: Findings) -> _Decided | None:
    frame = found.frame
    idle, wall = frame.idle_ns, frame.wall_ns
    if not wall or idle < frame.limits.idle_share * wall:
        return None
    outside = idle_with_pending(frame)
    waiting = any(r.num_waiting for r in frame.rows if r.kind == "idle")
    if waiting and not outside:
        return None
    name = "frontend_bound" if outside >= 0.5 * idle else "no_load"
    why = (
        "while requests had arrived and were not queued" if name == "frontend_bound"
        else "because no request was there"
    )  # fmt: skip
    return _Decided(
        name,
        "",
        idle / wall,
        f"{_title(name)}: the engine idled for {percent(idle / wall)} of the run {why}.",
        (
            Evidence(
                "idle", idle / wall * 100, "% of run", f">= {percent(frame.limits.idle_share)}"
            ),
            Evidence("idle with requests outside", outside / 1e6, "ms"),
            Evidence("mean step while working", found.budget.mean_ns / 1e6, "ms"),
        ),
        f"{ms(wall)} -> {ms(wall - idle)} ms of run time without idling (estimated)",
    )


def _decomposition(found: Findings) -> _Decided:
    terms = found.budget.ranking()
    name, share = terms[0] if terms else ("undetermined", 0.0)
    if name == "undetermined":
        return _undetermined(found, share)
    sub = _sub(name, found.budget.ns)
    advice = KV_ADVICE if sub == "kv" else ""
    return _Decided(
        name,
        sub,
        share,
        _sentence(found, name, sub, share),
        _evidence(found, name, sub, share),
        _gain_of(found, name, share),
        advice,
    )


def _sub(name: str, ns: Split) -> str:
    if name == "bandwidth_bound":
        return "kv" if ns.get("kv", 0) > ns.get("weights", 0) else "weights"
    if name == "host_bound":
        return max((*HOST_PHASES, "d2h_wait"), key=lambda k: ns.get(k, 0))
    return "gather" if name == "copy_bound" else ""


def missing_inputs(frame: Frame) -> list[str]:
    """What keeps the forward pass from being split."""
    if frame.ceilings is None:
        return ["no ceilings were measured on this device"]
    missing = []
    if not frame.ceilings.read_curve:
        missing.append("no read bandwidth was measured")
    if not frame.ceilings.twin:
        missing.append("no twin was measured, so dispatch and inefficiency look alike")
    elif is_compiled(frame):
        missing.append(
            "compiled steps have no twin, as other kernels would be generated for it, so dispatch "
            "and inefficiency look alike"
        )
    return missing


def _undetermined(found: Findings, share: float) -> _Decided:
    why = missing_inputs(found.frame)
    if not why:
        no_work = not found.budget.total
        why = ["no time was recorded" if no_work else "phases or work columns were not recorded"]
    known = [
        f"{RULES[n].title} {percent(s)}" for n, s in found.budget.ranking() if n != "undetermined"
    ]
    tail = f" Known without it: {listing(known)}." if known else ""
    advice = "" if missing_inputs(found.frame) else "Record the run with this version of stepscope."
    if is_compiled(found.frame):
        advice = "Run the same scenario with --graphs eager: there dispatch has a twin."
    return _Decided(
        "undetermined",
        "",
        share or None,
        f"Cannot tell what bounds {percent(share)} of the time: {listing(why)}.{tail}",
        (
            Evidence("time not split", share * 100, "% of time"),
            Evidence("mean step", found.budget.mean_ns / 1e6, "ms"),
        ),
        "n/a: the cost is not known",
        advice,
    )


def _title(name: str) -> str:
    title = RULES[name].title
    return title[0].upper() + title[1:]


def _sentence(found: Findings, name: str, sub: str, share: float) -> str:
    reasons = {
        "bandwidth_bound": f"reading {'the KV cache' if sub == 'kv' else 'weights'} (and "
        f"{'weights' if sub == 'kv' else 'KV cache'}) at the measured ceiling explains",
        "compute_bound": "arithmetic at the measured ceiling explains",
        "launch_bound": "dispatch, as measured on the twin, takes",
        "kernel_inefficient": "what neither bytes, arithmetic nor dispatch explain of forward is",
        "copy_bound": "gathering KV pages takes",
        "sampling_bound": "sampling takes",
        "cpu_starved": "waiting for cores that other processes took is",
        "host_bound": f"host phases, first of all {sub}, take",
    }
    mean = ms(found.budget.mean_ns)
    return f"{_title(name)}: {reasons[name]} {percent(share)} of a mean step of {mean} ms."


def _evidence(found: Findings, name: str, sub: str, share: float) -> tuple[Evidence, ...]:
    budget, model = found.budget, found.frame.model
    first = Evidence(TERMS[name], share * 100, "% of time", "largest term")
    mean = Evidence("mean step", budget.mean_ns / 1e6, "ms")
    if name == "bandwidth_bound":
        rate = model.read_rate(found.frame.spec.weight_bytes)
        kv = budget.ns.get("kv", 0) / max(budget.ns.get("kv", 0) + budget.ns.get("weights", 0), 1)
        return (
            first,
            Evidence("KV share of the bytes", kv * 100, "%", "> 50 %: kv"),
            Evidence("read ceiling", None if rate is None else rate / 1e9, "GB/s"),
        )
    if name == "compute_bound":
        rate = model.gemm_flops
        return first, Evidence("GEMM ceiling", rate and rate / 1e9, "GFLOP/s"), mean
    if name == "launch_bound":
        each = budget.ns.get("dispatch", 0) / budget.steps
        return first, Evidence("dispatch per step (twin)", each / 1e6, "ms"), mean
    if name == "kernel_inefficient":
        floor = budget.share("weights", "kv", "compute")
        inside = floor + budget.share("dispatch", "inefficient")
        return (
            first,
            Evidence("floor / forward", floor / inside * 100 if inside else None, "%"),
            Evidence("dispatch", budget.share("dispatch") * 100, "% of time"),
        )
    named = {"copy_bound": "gather", "sampling_bound": "sample", "cpu_starved": "noise"}
    key = named.get(name, sub)
    return (
        first,
        Evidence(f"{key} per step", budget.ns.get(key, 0) / budget.steps / 1e6, "ms"),
        mean,
    )


def _gain(mean_ns: float, share: float, what: str) -> str:
    return f"{ms(mean_ns)} -> {ms(mean_ns * (1 - share))} ms per step if {what} (estimated)"


def _gain_of(found: Findings, name: str, share: float) -> str:
    budget, limits = found.budget, found.frame.limits
    if name in ("bandwidth_bound", "compute_bound"):
        floor = budget.share("weights", "kv", "compute")
        model = floor + budget.share("dispatch", "inefficient", "forward")
        less = "bytes" if name == "bandwidth_bound" else "operations"
        gain = _gain(budget.mean_ns, share / 2, f"it took half the {less}")
        if floor >= limits.at_roofline * model:
            return f"at the roof, nothing to fix in the kernels; {gain}"
        return gain
    return _gain(budget.mean_ns, share, f"{TERMS[name]} cost nothing")


def judge_step(frame: Frame, index: int, split: Split, delay: Delay | None) -> str:
    """One step's verdict: why it made decodes wait if it did, else its largest term."""
    row = frame.rows[index]
    if row.kind == "idle":
        return "undetermined" if row.num_waiting else "no_load"
    if delay is not None and delay.long:
        name = verdict_of_delay(frame, delay)
        if name != "unexplained":
            return name
    terms = ranking(split)
    return terms[0][0] if terms else "undetermined"
