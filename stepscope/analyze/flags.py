"""Flags: observations beside the verdict. Without its data a flag is neither raised nor denied."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from stepscope.analyze.budget import Budget
from stepscope.analyze.frame import Frame, bucket, prefill_tokens
from stepscope.analyze.model import BatchPoint
from stepscope.analyze.moments import EventIndex
from stepscope.analyze.summary import utilization
from stepscope.analyze.tail import blocks_decodes, kv_is_full
from stepscope.records import HOST_PHASES, RequestRecord, StepRecord
from stepscope.stats import median
from stepscope.text import listing, ms, percent, plural, sig

MOST_WAITS = 50  # head_of_line looks at the longest waits only


Found = Iterator[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FlagInput:
    frame: Frame
    decode_budget: Budget
    primary: str
    ranking: list[tuple[str, float]]
    batches: list[BatchPoint]


def find_flags(given: FlagInput) -> list[tuple[str, str]]:
    """(flag, one sentence with its numbers), in the order of the table above."""
    checks: tuple[Callable[[FlagInput], Found], ...] = (
        _mixed, _roof, _kv_dominant, _host, _batch_insensitive, _kv, _scheduling,
        _head_of_line, _events, _launching, _contention,
    )  # fmt: skip
    return [found for check in checks for found in check(given)]


def _mixed(given: FlagInput) -> Found:
    if len(given.ranking) < 2:
        return
    (first, a), (second, b) = given.ranking[:2]
    if a - b <= given.frame.limits.mixed_within:
        yield "mixed", f"{first} {percent(a)} and {second} {percent(b)} are close to each other."


def _roof(given: FlagInput) -> Found:
    frame, budget = given.frame, given.decode_budget
    mbu = utilization(frame, frame.decode_only)
    if mbu is not None and mbu < frame.limits.low_mbu:
        yield (
            "low_mbu",
            f"Decode-only steps reach {percent(mbu)} of the measured read bandwidth.",
        )
    floor = budget.share("weights", "kv", "compute")
    model = floor + budget.share("dispatch", "inefficient", "forward")
    if floor and floor >= frame.limits.at_roofline * model:
        yield (
            "at_roofline",
            f"The floor explains {percent(floor / model)} of the forward pass of decode-only "
            "steps: the kernels leave nothing to fix.",
        )


def _kv_dominant(given: FlagInput) -> Found:
    costs = [given.frame.costs[i] for i in given.frame.decode_only]
    kv, weights = sum(c.kv_bytes for c in costs), sum(c.weight_bytes for c in costs)
    if kv > weights:
        yield "kv_dominant", f"KV cache is {percent(kv / (kv + weights))} of the bytes read."


def _host(given: FlagInput) -> Found:
    budget, limits = given.decode_budget, given.frame.limits
    share = budget.host_share
    if share >= limits.host_gap and given.primary != "host_bound":
        yield "host_gap", f"Host phases take {percent(share)} of a decode-only step."
    if share >= limits.top_host_phase:
        top = max(HOST_PHASES, key=lambda k: budget.ns.get(k, 0))
        each = budget.ns.get(top, 0) / budget.steps
        yield (
            f"top_host_phase:{top}",
            f"{top} is the largest host phase: {ms(each)} ms of {ms(budget.mean_ns)} ms per "
            "decode-only step.",
        )


def _batch_insensitive(given: FlagInput) -> Found:
    limits = given.frame.limits
    points = [p for p in given.batches if p.n >= limits.min_batch_steps]
    if not points or points[-1].batch < limits.batch_ratio * points[0].batch:
        return
    small, large = points[0], points[-1]
    if large.p50_ns <= limits.batch_flat * small.p50_ns:
        yield (
            "batch_insensitive",
            f"Batch {small.batch} takes {ms(small.p50_ns)} ms and batch {large.batch} "
            f"{ms(large.p50_ns)} ms: more requests per step are nearly free.",
        )


def _kv(given: FlagInput) -> Found:
    frame = given.frame
    rows = [frame.rows[i] for i in frame.working]
    full = sum(kv_is_full(frame, r) for r in rows)
    if full:
        yield "kv_full", f"The KV cache was full in {plural(full, 'step')}."
    limit = frame.limits.admission_kv
    held = sum(
        bool(r.num_waiting)
        and r.num_admitted == 0
        and r.num_preempted == 0
        and bool(r.kv_total_pages)
        and (r.kv_used_pages or 0) >= limit * (r.kv_total_pages or 0)
        for r in rows
    )
    if rows and held >= frame.limits.admission_share * len(rows):
        yield "kv_admission_limited", f"Requests waited for pages in {plural(held, 'step')}."
    again = sum(r.recompute_tokens or 0 for r in frame.rows)
    if again:
        lost = sum(r.preemptions for r in frame.run.requests)
        yield (
            "recompute_after_preemption",
            f"{plural(lost, 'preemption')} made the engine compute {plural(again, 'token')} again.",
        )


def _scheduling(given: FlagInput) -> Found:
    frame = given.frame
    rows = [frame.rows[i] for i in frame.working]
    left_out = [r for r in rows if prefill_tokens(r) and r.num_blocked_decodes]
    if left_out:
        whole = sum(blocks_decodes(r) for r in left_out)
        yield (
            "decode_not_scheduled",
            f"Running decodes sat out {plural(len(left_out), 'step')} that prefilled "
            f"({whole:,} of them ran no decode at all).",
        )
    ratios = [
        r.wall_ns / base
        for r in rows
        if r.kind == "mixed" and (base := frame.baseline.of(bucket(r)))
    ]
    ratio = median(ratios)
    if len(ratios) >= frame.limits.min_mixed_steps and (ratio or 0) >= frame.limits.chunk_factor:
        yield (
            "chunk_budget_too_large",
            f"A mixed step takes {sig(ratio, 2)} x a decode-only step of the same batch "
            f"(median of {len(ratios):,}): a smaller chunk or token budget shortens it.",
        )


def _head_of_line(given: FlagInput) -> Found:
    frame, limits = given.frame, given.frame.limits
    prompts = {r.id: r.prompt_tokens for r in frame.run.requests}
    spans = _prefill_spans(frame)
    typical = median([float(frame.rows[i].wall_ns) for i in frame.decode_only])
    if typical is None:
        return
    waits = [
        (r.admitted_ns - r.arrival_ns, r) for r in frame.run.requests if r.admitted_ns is not None
    ]
    longest = sorted(waits, key=lambda w: -w[0])[:MOST_WAITS]
    hit = [
        (wait, r)
        for wait, r in longest
        if wait >= limits.hol_wait_factor * typical
        and _behind(r, wait, spans, prompts, limits.hol_prompt_ratio)
        >= limits.hol_prefill_share * wait
    ]
    if hit:
        wait, worst = hit[0]
        yield (
            "head_of_line",
            f"{plural(len(hit), 'request')} waited behind prompts at least "
            f"{limits.hol_prompt_ratio:g} x as long as its own; request {worst.id} "
            f"({worst.prompt_tokens:,} tokens) {ms(wait)} ms.",
        )


def _prefill_spans(frame: Frame) -> list[tuple[int, int, int]]:
    """(begin, end, request) of each prefill part."""
    rows = {row.step: row for row in frame.rows}
    return [
        (rows[p.first_step].begin_ns, rows[p.last_step].end_ns, p.request)
        for p in frame.run.parts
        if p.kind == "prefill" and p.first_step in rows and p.last_step in rows
    ]


def _behind(
    request: RequestRecord,
    wait: int,
    spans: list[tuple[int, int, int]],
    prompts: dict[int, int],
    ratio: float,
) -> int:
    """ns of its wait in which a much longer prompt was being computed."""
    begin, end = request.arrival_ns, request.arrival_ns + wait
    longer = sorted(
        (max(b, begin), min(e, end))
        for b, e, other in spans
        if b < end and e > begin and prompts.get(other, 0) >= ratio * request.prompt_tokens
    )
    covered, reached = 0, begin
    for b, e in longer:
        covered += max(0, e - max(b, reached))
        reached = max(reached, e)
    return covered


def _events(given: FlagInput) -> Found:
    frame = given.frame
    if not frame.working:
        return
    since = frame.rows[frame.working[0]].begin_ns
    serving = [e for e in frame.run.events if e.begin_ns >= since]
    full = [e for e in serving if e.kind == "gc" and re.search(r"\bgen[a-z]*\D{0,3}2\b", e.detail)]
    if full:
        took = ms(sum(e.end_ns - e.begin_ns for e in full))
        yield "gc_gen2", f"{plural(len(full), 'full garbage collection')} took {took} ms."
    compiled = [e for e in serving if e.kind == "compile"]
    if compiled:
        took = ms(sum(e.end_ns - e.begin_ns for e in compiled))
        yield "jit_in_serving", f"{plural(len(compiled), 'compilation')} took {took} ms."
    hits = [h for i in frame.working if (h := frame.rows[i].graph_hit) is not None]
    missed = hits.count(0)
    if missed and missed >= frame.limits.graph_miss_share * len(hits):
        yield "graph_miss", f"{missed:,} of {plural(len(hits), 'step')} fitted no graph."


def _launching(given: FlagInput) -> Found:
    """From the rows as recorded: here the host's own timeline matters."""
    frame, limits = given.frame, given.frame.limits
    if not frame.two_timelines:
        return
    recorded = {row.step: row for row in frame.run.steps}
    pace = [p for i in frame.decode_only if (p := launch_pace(recorded[frame.rows[i].step]))]
    host, tail = median([p[0] for p in pace]), median([p[1] for p in pace])
    if host is None or tail is None or host < limits.launch_host or tail >= limits.launch_tail:
        return
    yield (
        "launch_paced",
        f"The host was launching for {percent(host)} of a decode-only step and the device ended "
        f"{percent(max(tail, 0.0))} of it after the last launch: launching set the pace.",
    )


def launch_pace(row: StepRecord) -> tuple[float, float] | None:
    """(launching / wall, from the last launch to the device's end / wall); None without either.

    recv, schedule and prepare come before launching, in this order.
    """
    if row.dev_end_ns is None or not row.wall_ns:
        return None
    before = sum(row.phase_ns(name) or 0 for name in ("recv", "schedule", "prepare"))
    launching = sum(row.phase_ns(name) or 0 for name in ("gather", "forward", "sample"))
    last = row.begin_ns + before + launching
    return launching / row.wall_ns, (row.dev_end_ns - last) / row.wall_ns


def _contention(given: FlagInput) -> Found:
    frame, limits = given.frame, given.frame.limits
    rows = [frame.rows[i] for i in frame.working]
    index = EventIndex([e for e in frame.run.events if e.kind == "noise"])
    noisy = sum(sum(index.overlaps(r.begin_ns, r.end_ns).values()) for r in rows)
    off_cpu = median([1 - r.host_cpu_ns / r.wall_ns for r in rows if r.host_cpu_ns and r.wall_ns])
    reasons = []
    by_noise = bool(noisy) and noisy >= limits.contention_time * frame.working_ns
    if by_noise:
        reasons.append(f"{percent(noisy / frame.working_ns)} of the time fell into noisy blocks")
    if off_cpu is not None and off_cpu >= limits.contention_cpu:
        reasons.append(f"the engine thread was off the CPU for {percent(off_cpu)} of a step")
    if reasons:
        yield (
            "cpu_contention",
            f"Something else {'used' if by_noise else 'may have used'} the cores: "
            f"{listing(reasons)}. Absolute times are not this machine's best.",
        )
