"""Scenario TOML -> validated Scenario -> the requests it sends.

Each section is a dataclass whose fields say what they accept (`_knob`); one loop checks them all.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from stepscope.errors import UsageError
from stepscope.text import listing
from stepscope.workload import (
    MOST_REQUESTS,
    MOST_SECONDS,
    MOST_TOKENS,
    NS,
    RequestSpec,
    Span,
    TraceRow,
    arrival_times,
    draw,
    fingerprint,
    numbered,
    read_prompts,
    read_trace,
)

ARRIVALS = ("poisson", "uniform", "gamma", "burst")
FOLDERS = (Path("scenarios"), Path(__file__).resolve().parent.parent / "scenarios")


# ---------------------------------------------------------------- what a value may be


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text in quotes")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError("a whole number")
    return value


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("a finite number")
    return float(value)


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise ValueError("a list of texts")
    return tuple(value)


def _policies(value: Any) -> tuple[str, ...]:
    names = _texts([value] if isinstance(value, str) else value)
    for name in names:
        parse_policy(name)
    if len(set(names)) < len(names):
        raise ValueError("a list of different policies")
    return names


def _span(value: Any) -> Span:
    ends = value if isinstance(value, list) else [value, value]
    if len(ends) != 2 or not all(type(end) is int for end in ends) or ends[0] > ends[1]:
        raise ValueError("a whole number or [least, most]")
    return (ends[0], ends[1])


def _knob(
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


def _count(default: Any, low: int = 1, high: int = MOST_TOKENS) -> Any:
    return _knob(default, _whole, low, high)


# ---------------------------------------------------------------- the sections


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The dimensions are for random weights only (name `dummy:...`); None keeps the catalogue's."""

    name: str = _knob("smollm2-135m", _text)
    dtype: str = _knob("fp32", _text)
    layers: int | None = _count(None, high=1000)
    hidden: int | None = _count(None, high=1_000_000)
    heads: int | None = _count(None, high=10_000)
    kv_heads: int | None = _count(None, high=10_000)
    head_dim: int | None = _count(None, high=10_000)
    intermediate: int | None = _count(None, high=10_000_000)
    vocab: int | None = _count(None)
    max_context: int | None = _count(None)

    @property
    def dimensions(self) -> dict[str, int]:
        named = asdict(self)
        return {k: v for k, v in named.items() if k not in ("name", "dtype") and v is not None}


@dataclass(frozen=True, slots=True)
class EngineSection:
    policies: tuple[str, ...] = _knob(("chunked",), _policies, key="policy")
    page_size: int = _count(16, high=65_536)
    kv_tokens: int = _count(16_384, high=1_000_000_000)
    kv_pages: int | None = _count(None, high=1_000_000_000)
    max_seqs: int = _count(16, high=65_536)
    token_budget: int = _count(512)
    chunk: int | None = _count(None)
    prefix_cache: bool = _knob(False, _flag)
    threads: int | None = _count(None, high=4096)
    warmup_steps: int = _count(0, low=0, high=1_000_000)

    @property
    def total_pages(self) -> int:
        return self.kv_pages or -(-self.kv_tokens // self.page_size)


@dataclass(frozen=True, slots=True)
class SamplingSection:
    temperature: float = _knob(0.0, _real, 0, 100)
    top_k: int = _count(0, low=0)
    top_p: float = _knob(1.0, _real, high=1, above=0)
    max_tokens: int = _count(64)
    ignore_eos: bool = _knob(False, _flag)
    seed: int = _knob(0, _whole)


@dataclass(frozen=True, slots=True)
class WorkloadSection:
    requests: int | None = _count(None, high=MOST_REQUESTS)
    arrivals: str = _knob("poisson", _text, choices=ARRIVALS)
    rate_per_s: float | None = _knob(None, _real, high=1e9, above=0)
    cv: float = _knob(2.0, _real, high=100, above=0)
    seed: int = _knob(0, _whole)
    start_s: float = _knob(0.0, _real, 0, MOST_SECONDS)
    prompts: tuple[str, ...] | None = _knob(None, _texts)
    prompts_file: str | None = _knob(None, _text)
    prompt_tokens: Span | None = _knob(None, _span, 1, MOST_TOKENS)
    output_tokens: Span | None = _knob(None, _span, 1, MOST_TOKENS)
    chat: bool = _knob(True, _flag)
    client: str = _knob("", _text)
    priority: int = _knob(0, _whole)
    trace: str | None = _knob(None, _text)
    limit: int | None = _count(None, high=MOST_REQUESTS)
    speedup: float = _knob(1.0, _real, 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class RequestSection:
    """`[[request]]`: one request, or count of them every_s apart. None: as in [sampling]."""

    at_s: float = _knob(0.0, _real, 0, MOST_SECONDS)
    count: int = _count(1, high=MOST_REQUESTS)
    every_s: float = _knob(0.0, _real, 0, MOST_SECONDS)
    prompt: str | None = _knob(None, _text)
    prompt_tokens: int | None = _count(None)
    max_tokens: int | None = _count(None)
    temperature: float | None = _knob(None, _real, 0, 100)
    top_k: int | None = _count(None, low=0)
    top_p: float | None = _knob(None, _real, high=1, above=0)
    ignore_eos: bool | None = _knob(None, _flag)
    chat: bool = _knob(True, _flag)
    client: str = _knob("", _text)
    priority: int = _knob(0, _whole)


@dataclass(frozen=True, slots=True)
class SloSection:
    ttft_ms: float | None = _knob(None, _real, above=0)
    itl_ms: float | None = _knob(None, _real, above=0)


SECTIONS: dict[str, type[Any]] = {
    "model": ModelSection,
    "engine": EngineSection,
    "sampling": SamplingSection,
    "workload": WorkloadSection,
    "slo": SloSection,
}
TOP_LEVEL = ("name", "description", *SECTIONS, "request")


class Origin(NamedTuple):
    value: Any
    origin: str  # default, file, --set or the flag


@dataclass(frozen=True)
class Scenario:
    name: str
    description: str
    source: str
    model: ModelSection
    engine: EngineSection
    sampling: SamplingSection
    workload: WorkloadSection
    slo: SloSection
    injected: tuple[RequestSection, ...]
    requests: tuple[RequestSpec, ...]
    raw: dict[str, Any] = field(repr=False)
    given: dict[str, str] = field(repr=False)  # dotted key -> origin, of what is not default

    def sha256(self) -> str:
        """Over the resolved requests: equal means the same prompts arriving at the same times."""
        return fingerprint(self.requests)

    def origins(self) -> dict[str, Origin]:
        """Every resolved value by its dotted key, and where it came from."""
        found = {
            key: Origin(getattr(self, key), self.given.get(key, "default"))
            for key in ("name", "description")
        }
        parts = {key: getattr(self, key) for key in SECTIONS}
        parts |= {f"request.{i}": part for i, part in enumerate(self.injected)}
        for where, part in parts.items():
            for f in fields(part):
                key = f"{where}.{_key(f)}"
                found[key] = Origin(getattr(part, f.name), self.given.get(key, "default"))
        return found

    def to_dict(self) -> dict[str, Any]:
        """For run.json: every resolved value and the identity of the requests."""
        resolved = {key: origin.value for key, origin in self.origins().items()}
        return {**resolved, "num_requests": len(self.requests), "requests_sha256": self.sha256()}


def _key(f: Any) -> str:
    return f.metadata["key"] or f.name


# ---------------------------------------------------------------- loading


def scenario_files() -> dict[str, Path]:
    """Scenarios that a bare name finds: ./scenarios first, then the repository's."""
    files = [p for folder in reversed(FOLDERS) for p in sorted(folder.glob("*.toml"))]
    return {p.stem: p for p in files}


def load_scenario(path_or_name: str) -> Scenario:
    """Read and validate a scenario file. Raises UsageError."""
    known = scenario_files()
    path = known.get(path_or_name, Path(path_or_name))
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = [str(p) for p in sorted(path.parent.glob("*.toml"))] if path.suffix else []
        hint = _near(path_or_name, [*known, *near]) or _known(sorted(known))
        raise UsageError(f"there is no scenario {path_or_name!r}{hint}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not UTF-8 text (byte {error.start})") from error
    return parse_scenario(text, str(path))


def parse_scenario(text: str, source: str) -> Scenario:
    """source names the file in messages, and files in the scenario are relative to its folder."""
    try:
        raw = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    return _build(raw, dict.fromkeys(_dotted(raw), "file"), source)


def _near(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 3)
    return f"; did you mean {listing(near).replace(' and ', ' or ')}?" if near else ""


def _known(names: list[str]) -> str:
    return f"; there are {listing(names, 12)}" if names else ""
