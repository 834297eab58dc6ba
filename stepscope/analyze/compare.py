"""Runs side by side: the same metrics, and whether they may be compared at all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stepscope.analyze.model import Analysis, Comparison, MetricRow
from stepscope.records import Run
from stepscope.text import listing

Value = tuple[float | None, int]  # in the row's unit, and how many observations stand behind it


def compare(pairs: list[tuple[str, Run, Analysis]]) -> Comparison:
    """Metrics of (label, run, analysis) with deltas relative to the first.

    One run stands on each side, so differences carry no claim of significance.
    """
    analyses = [analysis for _, _, analysis in pairs]
    return Comparison(
        [label for label, _, _ in pairs],
        [run.meta.stamp for _, run, _ in pairs],
        _differences([(label, run) for label, run, _ in pairs]),
        [_row(wanted, analyses) for wanted in ROWS],
        _notes(pairs),
    )


@dataclass(frozen=True, slots=True)
class _Wanted:
    metric: str
    unit: str
    better: str
    value: Callable[[Analysis], Value]


def _latency(metric: str, statistic: str) -> _Wanted:
    def value(analysis: Analysis) -> Value:
        found = analysis.latency[metric]
        ns: float | None = getattr(found, statistic)
        return (None if ns is None else ns / 1e6), found.n

    return _Wanted(f"{statistic}_{metric}_ms", "ms", "lower", value)


def _goodput(analysis: Analysis) -> Value:
    return analysis.goodput.requests_per_s, analysis.goodput.judged


def _output_rate(analysis: Analysis) -> Value:
    return analysis.throughput.output_tokens_per_s, analysis.throughput.output_tokens


def _mean_step(analysis: Analysis) -> Value:
    ns = analysis.throughput.mean_step_ns
    return (None if ns is None else ns / 1e6), analysis.throughput.steps


def _stall_total(analysis: Analysis) -> Value:
    harmful = [s.excess_ns for s in analysis.stalls if s.harmful]
    return _if_judged(analysis, sum(harmful) / 1e6), analysis.throughput.steps


def _stall_count(analysis: Analysis) -> Value:
    count = sum(s.harmful for s in analysis.stalls)
    return _if_judged(analysis, float(count)), analysis.throughput.steps


def _if_judged(analysis: Analysis, value: float) -> float | None:
    """Without a decode-only median no step could be called a stall: missing, not 0."""
    return None if analysis.throughput.p50_step_ns is None else value


def _mbu(analysis: Analysis) -> Value:
    return analysis.throughput.mbu, analysis.throughput.decode_steps


def _prefix_hits(analysis: Analysis) -> Value:
    return analysis.prefix_hit_share, sum(analysis.finish_reasons.values())


def _failures(analysis: Analysis) -> Value:
    return float(len(analysis.failures)), sum(analysis.finish_reasons.values())


def _preemptions(analysis: Analysis) -> Value:
    return float(analysis.preemptions), sum(analysis.finish_reasons.values())


def _recomputed(analysis: Analysis) -> Value:
    return float(analysis.recomputed_tokens), sum(analysis.finish_reasons.values())


ROWS: tuple[_Wanted, ...] = (
    _latency("ttft", "mean"),
    _latency("ttft", "p50"),
    _latency("ttft", "p99"),
    _latency("queue", "p50"),
    _latency("prefill", "p50"),
    _latency("itl", "p50"),
    _latency("itl", "p99"),
    _latency("itl", "max"),
    _latency("tpot", "p50"),
    _latency("tpot", "p99"),
    _latency("e2e", "p50"),
    _latency("e2e", "p99"),
    _Wanted("goodput_per_s", "requests/s", "higher", _goodput),
    _Wanted("output_tokens_per_s", "tok/s", "higher", _output_rate),
    _Wanted("mbu", "", "higher", _mbu),
    _Wanted("mean_step_ms", "ms", "lower", _mean_step),
    _Wanted("stall_total_ms", "ms", "lower", _stall_total),
    _Wanted("stalls", "count", "lower", _stall_count),
    _Wanted("failures", "count", "lower", _failures),
    _Wanted("prefix_hit_share", "", "higher", _prefix_hits),
    _Wanted("preemptions", "count", "lower", _preemptions),
    _Wanted("recomputed_tokens", "tokens", "lower", _recomputed),
)


METRIC_NAMES = tuple(wanted.metric for wanted in ROWS)


def metrics(analysis: Analysis) -> dict[str, float | None]:
    """Every comparable number of one run by its name; None where the run lacks it."""
    return {wanted.metric: wanted.value(analysis)[0] for wanted in ROWS}


def _row(wanted: _Wanted, analyses: list[Analysis]) -> MetricRow:
    found = [wanted.value(a) for a in analyses]
    values = tuple(value for value, _ in found)
    deltas = tuple(_delta(values[0], value) for value in values)
    counts = tuple(n for _, n in found)
    return MetricRow(wanted.metric, wanted.unit, wanted.better, values, deltas, counts)


def _delta(base: float | None, value: float | None) -> float | None:
    """Relative to the base; a base of 0 has no relative difference unless nothing changed."""
    if base is None or value is None:
        return None
    if base == value:
        return 0.0
    return value / base - 1 if base else None


def _differences(runs: list[tuple[str, Run]]) -> list[str]:
    if not runs:
        return []
    found = []
    for what, read in COMPARED.items():
        values = [_canonical(read(run)) for _, run in runs]
        if len(set(values)) > 1:
            found.append(_difference(what, runs, read))
        elif what == "workload" and len(runs) > 1 and values[0] == "null":
            found.append("workload: no run recorded which requests it served")
    return found


def _difference(what: str, runs: list[tuple[str, Run]], read: Callable[[Run], Any]) -> str:
    shown = read
    if what == "model":
        keys = _differing_keys([_model(run) for _, run in runs])
        what = f"model ({listing(keys)})"

        def shown(run: Run) -> Any:
            return ", ".join(str(_model(run).get(k)) for k in keys[:4])

    sides = [f"{label} {_short(shown(run))}" for label, run in runs]
    return f"{what}: {listing(sides, 6)}"


def _model(run: Run) -> dict[str, Any]:
    """What is set: older runs lack the fields that came later."""
    return {key: value for key, value in run.meta.model.items() if value not in (None, "")}


def _short(value: Any) -> str:
    if value is None:
        return "not recorded"
    return str(value) if len(str(value)) <= 40 else f"{str(value)[:12]}..."


def _differing_keys(models: list[dict[str, Any]]) -> list[str]:
    keys = sorted({k for m in models for k in m})
    return [k for k in keys if len({_canonical(m.get(k)) for m in models}) > 1]


def _canonical(value: Any) -> str:
    """Equal for a tuple in memory and the list that JSON made of it."""
    return json.dumps(value, sort_keys=True, default=str)


COMPARED: dict[str, Callable[[Run], Any]] = {
    "stamp": lambda run: run.meta.stamp,
    "device": lambda run: f"{run.meta.device.get('kind')} {run.meta.device.get('name')}",
    "threads": lambda run: run.meta.device.get("threads"),
    "model": lambda run: _model(run),
    "workload": lambda run: run.meta.workload.get("sha256"),
    "dtype": lambda run: run.meta.engine.get("dtype"),
}


def _varied(runs: list[tuple[str, Run]]) -> list[str]:
    """Settings of the engine that are not the same: what the comparison is about."""
    found = []
    for key in sorted({key for _, run in runs for key in run.meta.engine} - {"policy", "dtype"}):
        values = [run.meta.engine.get(key) for _, run in runs]
        if len({_canonical(value) for value in values}) > 1:
            pairs = zip((label for label, _ in runs), values, strict=True)
            found.append(listing([f"{label} {_short(value)}" for label, value in pairs], 6))
            found[-1] = f"engine.{key}: {found[-1]}."
    return found


def _notes(pairs: list[tuple[str, Run, Analysis]]) -> list[str]:
    notes = []
    if len(pairs) > 1:
        notes.append(
            "One run per side: differences are shown without a claim of significance. Repeat the "
            "runs to tell them from noise."
        )
    notes += _varied([(label, run) for label, run, _ in pairs])
    partial = [label for label, run, _ in pairs if not run.meta.complete]
    if partial:
        notes.append(f"Interrupted, so only its first part is here: {listing(partial)}.")
    noisy = [label for label, _, a in pairs if any(f == "cpu_contention" for f, _ in a.flags)]
    if noisy:
        notes.append(f"Other processes took the cores during: {listing(noisy)}.")
    return notes
