"""A workload as numbers -> the requests it makes: arrival times, prompt and output lengths.

Everything random comes from random.Random with the workload's seed, so a seed names one workload.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from random import Random

from stepscope.errors import UsageError

NS = 1_000_000_000
MOST_REQUESTS = 1_000_000
MOST_TOKENS = 10_000_000
MOST_SECONDS = 1e6
FIRST_FIELDS = 13  # of RequestSpec: those of the first version, up to priority

Span = tuple[int, int]  # both ends included


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as it will be sent: prompt, or prompt_tokens of synthetic text, is None."""

    id: int
    arrival_ns: int
    prompt: str | None
    prompt_tokens: int | None
    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    chat: bool = False
    client: str = ""
    priority: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    own_seed: int | None = None  # given for this request, not derived
    shared_tokens: int = 0  # of prompt_tokens: the same ones in every request that has some


@dataclass(frozen=True, slots=True)
class TraceRow:
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    client: str = ""


def arrival_times(
    process: str, count: int, rate_per_s: float | None, cv: float, random: Random
) -> list[float]:
    """Seconds after the start; the first request arrives at 0.

    poisson: exponential gaps. gamma: gaps with mean 1/rate and coefficient of variation cv (shape
    1/cv^2, scale cv^2/rate). uniform: equal gaps. burst: all at once, whatever the rate.
    """
    if process == "burst" or rate_per_s is None:
        return [0.0] * count
    now, times = 0.0, []
    for _ in range(count):
        times.append(now)
        if process == "uniform":
            now += 1 / rate_per_s
        elif process == "poisson":
            now -= math.log(1 - random.random()) / rate_per_s
        else:
            now += random.gammavariate(1 / cv**2, cv**2 / rate_per_s)
    return times


def draw(span: Span, random: Random) -> int:
    low, high = span
    return low + int(random.random() * (high - low + 1))


def numbered(requests: Sequence[RequestSpec], seed: str) -> tuple[RequestSpec, ...]:
    """Sorted by arrival (ties keep their order), ids from 0, each with its own sampling seed."""
    ordered = sorted(requests, key=lambda r: r.arrival_ns)
    seeds = [
        derived_seed(seed, i) if r.own_seed is None else r.own_seed for i, r in enumerate(ordered)
    ]
    return tuple(replace(r, id=i, seed=seeds[i]) for i, r in enumerate(ordered))


def derived_seed(seed: str, request: int) -> int:
    """63 bits of SHA-256, so that neighbouring seeds and requests share nothing."""
    digest = hashlib.sha256(f"{seed}/{request}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def fingerprint(requests: Sequence[RequestSpec]) -> str:
    rows = [_identity(r) for r in requests]
    return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def _identity(request: RequestSpec) -> list[object]:
    """Settings that came later count only where they are used: old runs keep their identity."""
    later = fields(request)[FIRST_FIELDS:]
    used = [[f.name, getattr(request, f.name)] for f in later]
    changed = [pair for f, pair in zip(later, used, strict=True) if pair[1] != f.default]
    return [*astuple(request)[:FIRST_FIELDS], *changed]


def read_prompts(file: Path) -> tuple[str, ...]:
    """One prompt a line, blank lines left out. Raises UsageError."""
    prompts = tuple(line.strip() for line in _text(file).splitlines() if line.strip())
    if not prompts:
        raise UsageError(f"{file} holds no prompt; write one a line")
    return prompts


def read_trace(file: Path, limit: int | None) -> tuple[TraceRow, ...]:
    """CSV with the columns arrival_s, prompt_tokens, output_tokens, and maybe client."""
    reader = csv.DictReader(_text(file).splitlines())
    needed = ("arrival_s", "prompt_tokens", "output_tokens")
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        raise UsageError(f"{file} line 1 has no column {missing[0]}; it needs {', '.join(needed)}")
    rows: list[TraceRow] = []
    for record in reader:
        if limit is not None and len(rows) >= limit:
            break
        rows.append(_trace_row(record, f"{file} line {reader.line_num}"))
    if not rows:
        raise UsageError(f"{file} holds no request")
    return tuple(rows)


def _trace_row(record: dict[str, str | None], where: str) -> TraceRow:
    arrival = _number(record, "arrival_s", where, 0, MOST_SECONDS)
    prompt = _number(record, "prompt_tokens", where, 1, MOST_TOKENS)
    output = _number(record, "output_tokens", where, 1, MOST_TOKENS)
    for name, value in (("prompt_tokens", prompt), ("output_tokens", output)):
        if value != int(value):
            raise UsageError(f"{where}: {name} {value} is not a whole number")
    return TraceRow(arrival, int(prompt), int(output), record.get("client") or "")


def _number(record: dict[str, str | None], name: str, where: str, low: float, high: float) -> float:
    text = record[name] or ""
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{where}: {name} {text!r} is not a number") from None
    if not low <= value <= high:
        raise UsageError(f"{where}: {name} {text} is outside {low:g} to {high:g}")
    return value


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (byte {error.start})") from error
