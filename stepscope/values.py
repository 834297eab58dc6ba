"""What a value in a scenario file may be, and the dataclass fields that say so.

Each kind takes what TOML gave and returns the value, or raises ValueError with what was expected.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

from stepscope.workload import MOST_TOKENS, Span

MOST_BIAS = 100.0  # as the OpenAI API and vLLM bound it


def text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text in quotes")
    return value


def flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a whole number")
    return value


def real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("a number")
    if not -1e300 < value < 1e300:  # inf, nan, and integers that no float holds
        raise ValueError("a finite number")
    return float(value)


def filled(value: Any) -> str:
    if not text(value):
        raise ValueError("text that is not empty")
    return str(value)


def texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(v and type(v) is str for v in value):
        raise ValueError("a list of texts, none of them empty")
    return tuple(value)


def span(value: Any) -> Span:
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2 or not all(type(end) is int for end in ends) or ends[0] > ends[1]:
        raise ValueError("a whole number or [least, most]")
    return (ends[0], ends[1])


def stop_strings(value: Any) -> tuple[str, ...]:
    """One text or a list of them; an empty list takes away what [sampling] says."""
    listed = [value] if isinstance(value, str) else value
    return () if listed == [] else texts(listed)


def token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        type(v) is int and 0 <= v <= MOST_TOKENS for v in value
    ):
        raise ValueError("a list of token ids")
    return tuple(value)


def token_biases(value: Any) -> tuple[tuple[int, float], ...]:
    """A table of token id -> bias, e.g. { 15 = -3.5 }, as pairs ordered by id."""
    wanted = f"a table of token id = bias between {-MOST_BIAS:g} and {MOST_BIAS:g}"
    if not isinstance(value, dict):
        raise ValueError(wanted)
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        if not (key.isdecimal() and key.isascii()) or int(key) > MOST_TOKENS or int(key) in pairs:
            raise ValueError(wanted)
        pairs[int(key)] = real(bias)
        if abs(pairs[int(key)]) > MOST_BIAS:
            raise ValueError(wanted)
    return tuple(sorted(pairs.items()))


def knob(
    default: Any,
    kind: Callable[[Any], Any],
    low: float = -math.inf,
    high: float = math.inf,
    *,
    above: float = -math.inf,
    choices: tuple[str, ...] = (),
    key: str = "",
) -> Any:
    """A field of a section: low and high are included, above is not; key is its name in TOML."""
    rule = {"kind": kind, "low": low, "high": high, "above": above, "choices": choices, "key": key}
    return field(default=default, metadata=rule)


def count(default: Any, low: int = 1, high: int = MOST_TOKENS) -> Any:
    return knob(default, whole, low, high)
