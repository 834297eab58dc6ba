"""Throughput, batch sizes, ceilings and what-ifs."""

from __future__ import annotations

from stepscope.analyze.budget import Budget
from stepscope.analyze.frame import Frame, is_compiled, prefill_tokens
from stepscope.analyze.latency import succeeded
from stepscope.analyze.model import BatchPoint, Card, GatherPoint, Throughput, WhatIf
from stepscope.spec import matrix_bytes
from stepscope.stats import mean, median, percentile
from stepscope.text import ms, percent


def _rate(count: float, ns: float) -> float | None:
    return count / ns * 1e9 if ns else None


def output_tokens(frame: Frame) -> int:
    seen = [r.num_output_tokens for r in frame.rows if r.num_output_tokens is not None]
    return sum(seen) if seen else sum(r.output_tokens for r in frame.run.requests)


def throughput(frame: Frame) -> Throughput:
    """Rates are over the wall time of the whole run, idle included; MBU over decode-only steps.

    The mean step is over all working steps, the median over decode-only ones, which are never
    pooled with mixed steps.
    """
    out = output_tokens(frame)
    prompt = sum(r.sum_prefill_tokens or 0 for r in frame.rows)
    wall = frame.wall_ns
    done = sum(succeeded(r) for r in frame.run.requests)
    only = [float(frame.rows[i].wall_ns) for i in frame.decode_only]
    decoding = [i for i in frame.working if frame.rows[i].kind in ("decode", "mixed")]
    return Throughput(
        wall,
        frame.idle_ns,
        len(frame.working),
        len(decoding),
        out,
        prompt,
        _rate(out, wall),
        _rate(out + prompt, wall),
        _rate(done, wall),
        frame.working_ns / len(frame.working) if frame.working else None,
        median(only),
        utilization(frame, frame.decode_only),
        _mfu(frame),
    )


def utilization(frame: Frame, indices: list[int]) -> float | None:
    """MBU: (weight + KV bytes) / time / measured read bandwidth, over these steps."""
    known = [(i, ns) for i in indices if (ns := frame.costs[i].memory_ns) is not None]
    wall = sum(frame.rows[i].wall_ns for i, _ in known)
    return sum(ns for _, ns in known) / wall if wall else None


def _mfu(frame: Frame) -> float | None:
    known = [(i, ns) for i in frame.working if (ns := frame.costs[i].compute_ns) is not None]
    wall = sum(frame.rows[i].wall_ns for i, _ in known)
    return sum(ns for _, ns in known) / wall if wall else None


def batch_points(frame: Frame) -> list[BatchPoint]:
    """Decode-only steps by the number of requests that decoded in them."""
    groups: dict[int, list[int]] = {}
    for i in frame.decode_only:
        if size := frame.rows[i].num_decode_requests:
            groups.setdefault(size, []).append(i)
    return [_batch_point(frame, size, groups[size]) for size in sorted(groups)]


def _batch_point(frame: Frame, size: int, indices: list[int]) -> BatchPoint:
    walls = sorted(float(frame.rows[i].wall_ns) for i in indices)
    p10, p50, p90 = (percentile(walls, q) or 0.0 for q in (10, 50, 90))
    floors = [ns for i in indices if (ns := frame.costs[i].floor_ns) is not None]
    twins = [ns for i in indices if (ns := frame.costs[i].twin_ns) is not None]
    context = mean([frame.costs[i].context_tokens / size for i in indices]) or 0.0
    rate = _rate(size, p50) or 0.0
    return BatchPoint(
        size, len(indices), p50, p10, p90, median(floors), median(twins), context, rate
    )


def gather_points(frame: Frame) -> list[GatherPoint]:
    """Decode-only steps by the mean context of their requests, in powers of two."""
    groups: dict[int, list[int]] = {}
    for i in frame.decode_only:
        row = frame.rows[i]
        if row.gather_ns is not None and row.num_decode_requests:
            context = frame.costs[i].context_tokens // row.num_decode_requests
            groups.setdefault(context.bit_length(), []).append(i)
    return [_gather_point(frame, groups[size]) for size in sorted(groups)]


def _gather_point(frame: Frame, indices: list[int]) -> GatherPoint:
    rows = [frame.rows[i] for i in indices]
    batches = [r.num_decode_requests or 1 for r in rows]
    counted = [r for r in rows if r.kv_gather_bytes is not None]
    taken = sum(r.kv_gather_bytes or 0 for r in counted)
    return GatherPoint(
        sum(frame.costs[i].context_tokens for i in indices) / sum(batches),
        median(batches) or 0.0,
        len(rows),
        median([r.gather_ns or 0 for r in rows]) or 0.0,
        median([r.forward_ns for r in rows if r.forward_ns is not None]),
        median([r.kv_gather_bytes or 0 for r in counted]),
        _rate(taken, sum(r.gather_ns or 0 for r in counted)) if counted else None,
    )


def prefix_hits(frame: Frame) -> tuple[int | None, float | None]:
    """Tokens from the prefix cache, and their share of these and the prefill tokens computed."""
    hits = [r.prefix_hit_tokens for r in frame.rows if r.prefix_hit_tokens is not None]
    if not hits:
        return None, None
    needed = sum(hits) + sum(prefill_tokens(r) for r in frame.rows)
    return sum(hits), sum(hits) / needed if needed else None


def gemv_rate(frame: Frame) -> float | None:
    """All measured shapes of the engine's dtype, one after the other: bytes / time."""
    points = [p for p in frame.ceilings.gemv if p.dtype == frame.dtype] if frame.ceilings else []
    sizes = [matrix_bytes(p.rows * p.cols, p.dtype) for p in points]
    total = sum(sizes)
    seconds = sum(s / p.bytes_per_s for s, p in zip(sizes, points, strict=True) if p.bytes_per_s)
    return total / seconds if seconds else None


def card(frame: Frame) -> Card:
    spec, model = frame.spec, frame.model
    rate = model.read_rate(spec.weight_bytes)
    bound = spec.weight_bytes / rate * 1e9 if rate else None
    params = spec.linear_params + spec.head_params
    critical = None
    if rate and model.gemm_flops:
        critical = spec.weight_bytes * model.gemm_flops / (rate * 2 * params)
    contexts = [
        frame.costs[i].context_tokens / (frame.rows[i].num_decode_requests or 1)
        for i in frame.decode_only
    ]
    return Card(
        spec.weight_bytes,
        spec.kv_bytes_per_token,
        rate,
        bound,
        1e9 / bound if bound else None,
        model.gemm_flops,
        None if is_compiled(frame) else model.twin_ns(1, round(median(contexts) or 0)),
        gemv_rate(frame),
        critical,
    )


def what_ifs(frame: Frame, budget: Budget) -> list[WhatIf]:
    """Estimates from the decode-only budget; none without ceilings. Nothing here was measured."""
    if not budget.steps or not {"weights", "compute"} & budget.ns.keys():
        return []
    before = budget.mean_ns
    found = [_without(budget, "weights", 0.5, "weights halved")]
    if "dispatch" in budget.ns:
        found.append(_without(budget, "dispatch", 1.0, "dispatch gone"))
    batch = mean([frame.rows[i].num_decode_requests or 0 for i in frame.decode_only]) or 0.0
    if batch:
        found.append(_doubled(frame, budget, before, batch))
    return found


def _without(budget: Budget, key: str, part: float, change: str) -> WhatIf:
    before = budget.mean_ns
    after = before - part * budget.ns.get(key, 0) / budget.steps
    gain = percent(1 - after / before if before else 0.0)
    sentence = (
        f"Estimated: with {change} a decode-only step would take {ms(after)} ms "
        f"instead of {ms(before)} ms ({gain} less), everything else as it is."
    )
    return WhatIf(change, before, after, False, sentence)


def _doubled(frame: Frame, budget: Budget, before: float, batch: float) -> WhatIf:
    """Weights and dispatch are paid once however many rows there are; KV, gather and sample twice.

    Host phases and inefficiency are taken to stay, so this is the most that doubling can give.
    """
    twice = sum(budget.ns.get(k, 0) for k in ("kv", "gather", "sample")) / budget.steps
    memory = sum(budget.ns.get(k, 0) for k in ("weights", "kv")) / budget.steps
    arithmetic = [ns for i in frame.decode_only if (ns := frame.costs[i].compute_ns) is not None]
    floor_now = max(memory, mean(arithmetic) or 0.0)
    kv = budget.ns.get("kv", 0) / budget.steps
    floor_then = max(memory + kv, 2 * (mean(arithmetic) or 0.0))
    after = before + (floor_then - floor_now) + twice - kv
    per_before, per_after = before / batch, after / (2 * batch)
    sentence = (
        f"Estimated: with the batch doubled a token would cost {ms(per_after)} ms instead of "
        f"{ms(per_before)} ms and a step would take {ms(after)} ms instead of {ms(before)} ms, "
        "if host time and kernel efficiency stay as they are."
    )
    return WhatIf("batch doubled", per_before, per_after, True, sentence)
