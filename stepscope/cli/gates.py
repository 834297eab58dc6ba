"""--fail-on: conditions that end the process with exit code 3, or 4 where they cannot be judged."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

from stepscope.analyze.model import Analysis, Comparison
from stepscope.errors import CannotJudge, GateFailed, UsageError
from stepscope.text import sig

COMPARE: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
}


@dataclass(frozen=True, slots=True)
class Limit:
    """Fails when `metric operator value` is true: 'p99_itl_ms>200'."""

    text: str
    metric: str
    sign: str
    value: float


@dataclass(frozen=True, slots=True)
class Delta:
    """Fails when the metric moved further than this from the baseline: 'p99_itl_ms:+5%'."""

    text: str
    metric: str
    share: float


def parse_limit(text: str) -> Limit:
    match = re.fullmatch(r"\s*(\w+)\s*(<=|>=|<|>)\s*([-+.\deE]+)\s*", text)
    if not match:
        raise UsageError(f"--fail-on '{text}' is not understood; write it as 'p99_itl_ms>200'")
    return Limit(text, match[1], match[2], _number(match[3], text))


def parse_delta(text: str) -> Delta:
    match = re.fullmatch(r"\s*(\w+)\s*:\s*([-+]\d+(?:\.\d+)?)\s*%\s*", text)
    if not match:
        raise UsageError(f"--fail-on '{text}' is not understood; write it as 'p99_itl_ms:+5%'")
    return Delta(text, match[1], _number(match[2], text) / 100)


def judge_limits(rules: list[Limit], analysis: Analysis) -> None:
    """Raises GateFailed if one holds, CannotJudge if a metric is unknown or n/a here."""
    values = metrics(analysis)
    for rule in rules:
        if rule.metric not in values:
            raise UsageError(
                f"--fail-on '{rule.text}': there is no metric '{rule.metric}'; "
                f"there are {', '.join(sorted(values))}"
            )
        value = values[rule.metric]
        if value is None:
            raise CannotJudge(f"--fail-on '{rule.text}': {rule.metric} is n/a in this run")
        if COMPARE[rule.sign](value, rule.value):
            raise GateFailed(f"--fail-on '{rule.text}': {rule.metric} is {sig(value)}")


def judge_deltas(rules: list[Delta], result: Comparison) -> None:
    rows = {row.metric: row for row in result.rows}
    for rule in rules:
        row = rows.get(rule.metric)
        if row is None:
            raise UsageError(
                f"--fail-on '{rule.text}': there is no metric '{rule.metric}'; "
                f"there are {', '.join(rows)}"
            )
        for label, delta in zip(result.labels[1:], row.deltas[1:], strict=True):
            if delta is None:
                raise CannotJudge(f"--fail-on '{rule.text}': {rule.metric} of {label} is n/a")
            if (delta > rule.share) if rule.share >= 0 else (delta < rule.share):
                raise GateFailed(
                    f"--fail-on '{rule.text}': {rule.metric} of {label} moved {delta * 100:+.1f} %"
                )


def metrics(analysis: Analysis) -> dict[str, float | None]:
    """Flat numbers with statistic prefix and unit suffix, as vLLM and SGLang name them."""
    flat: dict[str, float | None] = {}
    for name, row in analysis.latency.items():
        for statistic in ("mean", "p50", "p90", "p95", "p99", "max"):
            value: float | None = getattr(row, statistic)
            flat[f"{statistic}_{name}_ms"] = None if value is None else value / 1e6
    through = analysis.throughput
    flat["output_tokens_per_s"] = through.output_tokens_per_s
    flat["requests_per_s"] = through.requests_per_s
    flat["mean_step_ms"] = None if through.mean_step_ns is None else through.mean_step_ns / 1e6
    flat["mbu"] = through.mbu
    flat["goodput_per_s"] = analysis.goodput.requests_per_s
    flat["preemptions"] = float(analysis.preemptions)
    flat["prefix_hit_share"] = analysis.prefix_hit_share
    flat["failures"] = float(len(analysis.failures))
    return flat


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--fail-on '{whole}': {text} is not a number") from None
