"""--fail-on: conditions that end the process with exit code 3, or 4 where they cannot be judged."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

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
    _check_name(text, match[1])
    return Limit(text, match[1], match[2], _number(match[3], text))


def parse_delta(text: str) -> Delta:
    match = re.fullmatch(r"\s*(\w+)\s*:\s*([-+]\d+(?:\.\d+)?)\s*%\s*", text)
    if not match:
        raise UsageError(f"--fail-on '{text}' is not understood; write it as 'p99_itl_ms:+5%'")
    _check_name(text, match[1])
    return Delta(text, match[1], _number(match[2], text) / 100)


def _check_name(text: str, metric: str) -> None:
    """Before any work is done: a misspelt gate must not cost a run."""
    from stepscope.analyze.compare import METRIC_NAMES

    if metric not in METRIC_NAMES:
        near = get_close_matches(metric, METRIC_NAMES, 3) or METRIC_NAMES
        raise UsageError(
            f"--fail-on '{text}': there is no metric '{metric}'; there are {', '.join(near)}"
        )


def judge_limits(rules: list[Limit], analysis: Analysis) -> None:
    """Raises GateFailed if one holds; else CannotJudge if a metric is n/a here."""
    from stepscope.analyze.compare import metrics

    values = metrics(analysis)
    missing = []
    for rule in rules:
        value = values[rule.metric]
        if value is None:
            missing.append(rule)
        elif COMPARE[rule.sign](value, rule.value):
            raise GateFailed(f"--fail-on '{rule.text}': {rule.metric} is {sig(value)}")
    for rule in missing:
        raise CannotJudge(f"--fail-on '{rule.text}': {rule.metric} is n/a in this run")


def judge_deltas(rules: list[Delta], result: Comparison) -> None:
    """As judge_limits, for what moved from the first run to any other."""
    rows = {row.metric: row for row in result.rows}
    missing = []
    for rule in rules:
        row = rows[rule.metric]
        for label, delta in zip(result.labels[1:], row.deltas[1:], strict=True):
            if delta is None:
                missing.append((rule, label))
            elif (delta > rule.share) if rule.share >= 0 else (delta < rule.share):
                raise GateFailed(
                    f"--fail-on '{rule.text}': {rule.metric} of {label} moved {delta * 100:+.1f} %"
                )
    for rule, label in missing:
        raise CannotJudge(f"--fail-on '{rule.text}': {rule.metric} of {label} is n/a")


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--fail-on '{whole}': {text} is not a number") from None
