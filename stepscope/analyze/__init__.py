"""Run -> Analysis. No I/O, no torch, no drawing.

The parts, in the order they build on each other: thresholds, rules, metrics and flags (tables);
cost (bytes and FLOPs of a step), frame (the rows sorted), budget (where time went), tail and
stalls (who waited for what), latency, summary, verdict, answers; compare puts analyses side by
side.
"""

from __future__ import annotations

from dataclasses import replace

from stepscope.analyze.answers import Material, three_answers
from stepscope.analyze.budget import Split, budget_of, clamped, phase_totals, split_all
from stepscope.analyze.compare import compare
from stepscope.analyze.flags import FlagInput, find_flags
from stepscope.analyze.frame import Frame, bucket, build_frame, prefill_tokens
from stepscope.analyze.latency import (
    Tokens,
    all_gaps,
    failures,
    finish_reasons,
    goodput,
    late_admissions,
    latencies,
    long_gaps,
    token_times,
)
from stepscope.analyze.model import Analysis, Stall, StepView
from stepscope.analyze.stalls import contains_any, find_stalls, step_spans
from stepscope.analyze.summary import (
    batch_points,
    card,
    gather_points,
    prefix_hits,
    throughput,
    utilization,
    what_ifs,
)
from stepscope.analyze.tail import Delay, find_delays, summarize_tail
from stepscope.analyze.thresholds import Thresholds
from stepscope.analyze.verdict import Findings, judge_run, judge_step, missing_inputs
from stepscope.records import PHASES, Run
from stepscope.text import plural

__all__ = ["analyze", "compare"]


def analyze(run: Run, limits: Thresholds | None = None) -> Analysis:
    """Everything that is concluded from one run.

    Raises StepscopeError when the run does not describe its model.
    """
    frame = build_frame(run, limits or Thresholds())
    splits = split_all(frame)
    budget = budget_of(splits[i] for i in frame.working)
    decode_budget = budget_of(splits[i] for i in frame.decode_only)
    delays = find_delays(frame)
    stalls = find_stalls(frame, delays)
    tokens = token_times(frame)
    gaps = all_gaps(tokens)
    batches = batch_points(frame)
    verdict = judge_run(Findings(frame, budget, summarize_tail(frame, delays), stalls))
    flags = find_flags(FlagInput(frame, decode_budget, verdict.name, budget.ranking(), batches))
    hits, hit_share = prefix_hits(frame)
    return Analysis(
        answers=three_answers(Material(frame, decode_budget, stalls)),
        verdict=replace(verdict, flags=tuple(name for name, _ in flags)),
        budget=budget.lines(),
        phase_totals=phase_totals(frame),
        steps=_views(frame, splits, delays),
        stalls=stalls,
        latency=latencies(frame, tokens, gaps),
        throughput=throughput(frame),
        goodput=goodput(frame, tokens),
        batches=batches,
        what_ifs=what_ifs(frame, decode_budget),
        card=card(frame),
        flags=flags,
        late_admissions=late_admissions(frame),
        finish_reasons=finish_reasons(run.requests),
        failures=failures(run.requests),
        preemptions=sum(r.preemptions for r in run.requests),
        recomputed_tokens=sum(r.recompute_tokens or 0 for r in frame.rows),
        itl_ns=gaps,
        not_available=_not_available(frame, gaps),
        notes=frame.notes + _notes(frame, stalls, tokens),
        prefix_hit_tokens=hits,
        prefix_hit_share=hit_share,
        gathers=gather_points(frame),
    )


def _views(frame: Frame, splits: list[Split], delays: list[Delay]) -> list[StepView]:
    by_index = {d.index: d for d in delays}
    return [_view(frame, i, splits[i], by_index.get(i)) for i in range(len(frame.rows))]


def _view(frame: Frame, index: int, split: Split, delay: Delay | None) -> StepView:
    row, cost = frame.rows[index], frame.costs[index]
    return StepView(
        step=row.step,
        kind=row.kind,
        begin_ns=row.begin_ns,
        end_ns=row.end_ns,
        warmup=bool(row.warmup),
        phases=tuple(row.phase_ns(name) for name in PHASES),
        decode_requests=row.num_decode_requests or 0,
        prefill_tokens=prefill_tokens(row),
        batch=bucket(row),
        context_tokens=cost.context_tokens,
        output_tokens=row.num_output_tokens or 0,
        weight_bytes=cost.weight_bytes,
        kv_bytes=cost.kv_bytes,
        flops=cost.flops,
        floor_ns=cost.floor_ns,
        memory_ns=cost.memory_ns,
        compute_ns=cost.compute_ns,
        twin_ns=cost.twin_ns,
        mbu=utilization(frame, [index]),
        excess_ns=delay.excess_ns if delay else 0.0,
        verdict=judge_step(frame, index, split, delay),
        waiting=row.num_waiting,
        running=row.num_running,
        kv_used_pages=row.kv_used_pages,
    )


def _not_available(frame: Frame, gaps: list[int]) -> list[tuple[str, str]]:
    """(what, why) of everything that could not be derived from this run."""
    found = [("floor, dispatch and their shares", why) for why in missing_inputs(frame)]
    if frame.ceilings and frame.model.gemm_flops is None:
        found.append(("compute floor, MFU", f"no GEMM rate was measured for {frame.dtype}"))
    if frame.rows and not frame.two_timelines:
        found.append(
            ("device times", "host and device are one timeline here: forward is the model's time")
        )
    if frame.working and all(frame.rows[i].gather_ns is None for i in frame.working):
        in_place = frame.run.meta.engine.get("attention") == "paged"
        why = "attention = paged reads K and V in place" if in_place else "no step tells it apart"
        found.append(("gather", why))
    if frame.working and not frame.decode_only:
        found.append(("stalls", "there is no decode-only step after warm-up to compare with"))
    unknown = sum(
        frame.rows[i].num_decode_requests is None and frame.rows[i].sum_prefill_tokens is None
        for i in frame.working
    )
    if unknown:
        found.append(("bytes and FLOPs", f"{plural(unknown, 'step')} did not record their work"))
    if not frame.run.meta.slo:
        found.append(("goodput", "the scenario sets no SLO"))
    if not gaps:
        found.append(("itl", "no request has two tokens whose times are known"))
    return found


def _notes(frame: Frame, stalls: list[Stall], tokens: dict[int, Tokens]) -> list[str]:
    notes = []
    if not frame.run.meta.complete:
        notes.append("The run did not go to its end: this is its first part.")
    warmup = sum(row.kind != "idle" and bool(row.warmup) for row in frame.rows)
    if warmup:
        notes.append(f"{plural(warmup, 'warm-up step')} left out of all step statistics.")
    sampled = sum(bool(row.sampled) for row in frame.rows)
    if sampled:
        notes.append(f"{plural(sampled, 'profiled step')} left out of all step statistics.")
    over = sum(clamped(frame.rows[i], frame.costs[i]) for i in frame.working)
    if over:
        notes.append(
            f"In {over:,} of {plural(len(frame.working), 'step')} floor plus twin exceed the "
            "measured forward: the floor is charged first and dispatch gets what is left."
        )
    too_long = sum(
        sum(frame.rows[i].phase_ns(p) or 0 for p in PHASES) > frame.rows[i].wall_ns
        for i in frame.working
    )
    if too_long:
        notes.append(f"In {plural(too_long, 'step')} the phases add up to more than the wall time.")
    return notes + _gap_notes(frame, stalls, tokens)


def _gap_notes(frame: Frame, stalls: list[Stall], tokens: dict[int, Tokens]) -> list[str]:
    factor = frame.limits.itl_gap_factor
    found = long_gaps(tokens, factor)
    if not found:
        return []
    steps = step_spans(stalls)
    preempted = sum(g.preempted for g in found)
    stalled = sum(not g.preempted and contains_any(steps, g.first_step, g.last_step) for g in found)
    rest = len(found) - preempted - stalled
    return [
        f"{plural(len(found), 'token gap')} above {factor:g} x their request's median: "
        f"{stalled:,} contain a harmful stall, {preempted:,} follow a preemption, {rest:,} are "
        "unexplained."
    ]
