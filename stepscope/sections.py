"""The sections of a scenario file: each a dataclass whose fields say what they accept.

One loop (`read_section`) checks them all, so that a new setting is one line here.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, asdict, dataclass, fields
from typing import Any, TypeVar

from stepscope.errors import UsageError
from stepscope.spec import ELEMENT_BYTES, KV_DTYPES, QUANTIZED
from stepscope.text import listing
from stepscope.values import count as _count
from stepscope.values import filled as _filled
from stepscope.values import flag as _flag
from stepscope.values import knob as _knob
from stepscope.values import real as _real
from stepscope.values import span as _span
from stepscope.values import stop_strings as _stop_strings
from stepscope.values import text as _text
from stepscope.values import texts as _texts
from stepscope.values import token_biases as _token_biases
from stepscope.values import token_ids as _token_ids
from stepscope.values import whole as _whole
from stepscope.workload import MOST_REQUESTS, MOST_SECONDS, MOST_TOKENS

Section = TypeVar("Section")
MOST_LOGPROBS = 20  # as vLLM bounds it
MODEL_DTYPES = ("auto", *ELEMENT_BYTES, *QUANTIZED)
ARRIVALS = ("poisson", "uniform", "gamma", "burst")
# Of each group at most one may be given: they say the same thing in different ways.
EXCLUSIVE = {
    "engine": ("kv_tokens", "kv_pages", "kv_bytes"),
    "workload": ("prompts", "prompts_file", "prompt_tokens", "trace"),
    "request": ("prompt", "prompt_tokens"),
}


def _policies(value: Any) -> tuple[str, ...]:
    names = _texts([value] if isinstance(value, str) else value)
    for name in names:
        parse_policy(name)
    if len(set(names)) < len(names):
        raise ValueError("a list of different policies")
    return names


def _sizes(value: Any) -> tuple[int, ...]:
    sizes = tuple(_whole(v) for v in value) if isinstance(value, list | tuple) else ()
    if not sizes or len(set(sizes)) < len(sizes):
        raise ValueError("a list of different batch sizes, such as [1, 4, 16]")
    return tuple(sorted(sizes))


# ---------------------------------------------------------------- the sections


@dataclass(frozen=True, slots=True)
class ModelSection:
    """The dimensions are for random weights only (name `dummy:...`); None keeps the catalogue's."""

    name: str = _knob("smollm2-135m", _filled)
    dtype: str = _knob("fp32", _text, choices=MODEL_DTYPES)
    layers: int | None = _count(None, high=1000)
    hidden: int | None = _count(None, high=1_000_000)
    heads: int | None = _count(None, high=10_000)
    kv_heads: int | None = _count(None, high=10_000)
    head_dim: int | None = _count(None, high=10_000)
    intermediate: int | None = _count(None, high=10_000_000)
    experts: int | None = _count(None, high=10_000)
    experts_per_token: int | None = _count(None, high=10_000)
    vocab: int | None = _count(None)
    max_context: int | None = _count(None)

    @property
    def dimensions(self) -> dict[str, int]:
        named = asdict(self)
        return {k: v for k, v in named.items() if k not in ("name", "dtype") and v is not None}


@dataclass(frozen=True, slots=True)
class EngineSection:
    policies: tuple[str, ...] = _knob(("chunked",), _policies, key="policy")
    page_size: int = _count(16, high=256)
    kv_tokens: int = _count(16_384, high=1_000_000_000)
    kv_pages: int | None = _count(None, high=1_000_000_000)
    kv_bytes: int | None = _count(None, high=10**15)
    kv_dtype: str = _knob("auto", _text, choices=("auto", *KV_DTYPES))
    prefix_cache: str = _knob("off", _text, choices=("off", "hash", "radix"))
    preemption: str = _knob("recompute", _text, choices=("recompute", "swap"))
    swap_tokens: int | None = _count(None, low=0, high=1_000_000_000)  # None: half of what is free
    max_seqs: int = _count(16, high=65_536)
    token_budget: int = _count(512)
    chunk: int | None = _count(None)
    threads: int | None = _count(None, high=4096)
    products: str = _knob("auto", _text, choices=("auto", "plain", "onednn"))
    overlap: bool = _knob(False, _flag)
    graphs: str = _knob("eager", _text, choices=("eager", "compile", "cuda"))
    graph_buckets: tuple[int, ...] | None = _knob(None, _sizes, 1, 65_536)
    attention: str = _knob("auto", _text, choices=("auto", "gather", "paged"))
    warmup_steps: int = _count(0, low=0, high=1_000_000)

    def total_pages(self, bytes_per_token: int) -> int:
        """Pages of the KV cache: as given, to hold kv_tokens, or as many as fit into kv_bytes.

        bytes_per_token: what a token holds in the cache. Raises UsageError for less than a page.
        """
        if self.kv_bytes is None:
            return self.kv_pages or -(-self.kv_tokens // self.page_size)
        pages = self.kv_bytes // (self.page_size * bytes_per_token)
        if pages < 1:
            raise UsageError(
                f"engine.kv_bytes is {self.kv_bytes:,}, and one page of {self.page_size} tokens "
                f"takes {self.page_size * bytes_per_token:,}; give at least that"
            )
        return pages


@dataclass(frozen=True, slots=True)
class SamplingSection:
    temperature: float = _knob(0.0, _real, 0, 100)
    top_k: int = _count(0, low=0)
    top_p: float = _knob(1.0, _real, high=1, above=0)
    min_p: float = _knob(0.0, _real, 0, 1)
    repetition_penalty: float = _knob(1.0, _real, high=10, above=0)
    presence_penalty: float = _knob(0.0, _real, -10, 10)
    frequency_penalty: float = _knob(0.0, _real, -10, 10)
    logit_bias: tuple[tuple[int, float], ...] = _knob((), _token_biases)
    logprobs: int | None = _count(None, low=0, high=MOST_LOGPROBS)
    max_tokens: int = _count(64)
    min_tokens: int = _count(0, low=0)
    ignore_eos: bool = _knob(False, _flag)
    stop: tuple[str, ...] = _knob((), _stop_strings)
    stop_ids: tuple[int, ...] = _knob((), _token_ids)
    seed: int = _knob(0, _whole, -(2**63), 2**63 - 1)


@dataclass(frozen=True, slots=True)
class WorkloadSection:
    requests: int | None = _count(None, high=MOST_REQUESTS)
    arrivals: str = _knob("poisson", _text, choices=ARRIVALS)
    rate_per_s: float | None = _knob(None, _real, high=1e9, above=0)
    cv: float = _knob(2.0, _real, high=100, above=0)
    seed: int = _knob(0, _whole, -(2**63), 2**63 - 1)
    start_s: float = _knob(0.0, _real, 0, MOST_SECONDS)
    prompts: tuple[str, ...] | None = _knob(None, _texts)
    prompts_file: str | None = _knob(None, _filled)
    prompt_tokens: tuple[int, int] | None = _knob(None, _span, 1, MOST_TOKENS)
    shared_tokens: int = _count(0, low=0)  # which every prompt of prompt_tokens begins with
    output_tokens: tuple[int, int] | None = _knob(None, _span, 1, MOST_TOKENS)
    chat: bool = _knob(True, _flag)
    client: str = _knob("", _text)
    priority: int = _knob(0, _whole, -(2**31), 2**31)
    trace: str | None = _knob(None, _filled)
    limit: int | None = _count(None, high=MOST_REQUESTS)
    speedup: float = _knob(1.0, _real, 1e-3, 1e6)


@dataclass(frozen=True, slots=True)
class RequestSection:
    """`[[request]]`: one request, or count of them every_s apart. None: as in [sampling]."""

    at_s: float = _knob(0.0, _real, 0, MOST_SECONDS)
    count: int = _count(1, high=MOST_REQUESTS)
    every_s: float = _knob(0.0, _real, 0, MOST_SECONDS)
    prompt: str | None = _knob(None, _filled)
    prompt_tokens: int | None = _count(None)
    max_tokens: int | None = _count(None)
    temperature: float | None = _knob(None, _real, 0, 100)
    top_k: int | None = _count(None, low=0)
    top_p: float | None = _knob(None, _real, high=1, above=0)
    min_p: float | None = _knob(None, _real, 0, 1)
    repetition_penalty: float | None = _knob(None, _real, high=10, above=0)
    presence_penalty: float | None = _knob(None, _real, -10, 10)
    frequency_penalty: float | None = _knob(None, _real, -10, 10)
    logit_bias: tuple[tuple[int, float], ...] | None = _knob(None, _token_biases)
    logprobs: int | None = _count(None, low=0, high=MOST_LOGPROBS)
    min_tokens: int | None = _count(None, low=0)
    ignore_eos: bool | None = _knob(None, _flag)
    stop: tuple[str, ...] | None = _knob(None, _stop_strings)
    stop_ids: tuple[int, ...] | None = _knob(None, _token_ids)
    seed: int | None = _knob(None, _whole, -(2**63), 2**63 - 1)  # None: derived, another for each
    chat: bool = _knob(True, _flag)
    client: str = _knob("", _text)
    priority: int = _knob(0, _whole, -(2**31), 2**31)


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


# ---------------------------------------------------------------- reading one


def key_of(f: Field[Any]) -> str:
    """What the TOML file calls this field."""
    name: str = f.metadata["key"] or f.name
    return name


def read_section(cls: type[Section], raw: Any, where: str, label: Callable[[str], str]) -> Section:
    """A section from its TOML table; label(dotted key) says where a value stands, for messages."""
    if not isinstance(raw, Mapping):
        raise UsageError(f"{label(where)} is {_shown(raw)}, expected a table [{where}]")
    known = {key_of(f): f for f in fields(cls)}  # type: ignore[arg-type]
    for key in raw:
        if key not in known:
            raise UsageError(f"{label(f'{where}.{key}')} is not known{near(key, known)}")
    group = [key for key in EXCLUSIVE.get(where.split(".")[0], ()) if key in raw]
    if len(group) > 1:
        raise UsageError(f"{label(where)} has both {listing(group)}; give one of them")
    values = {
        known[key].name: _checked(value, known[key], label(f"{where}.{key}"))
        for key, value in raw.items()
    }
    return cls(**values)


def _checked(value: Any, f: Field[Any], where: str) -> Any:
    rule = f.metadata
    try:
        result = rule["kind"](value)
    except ValueError as error:
        raise UsageError(f"{where} is {_shown(value)}, expected {error}") from None
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if rule["choices"] and result not in rule["choices"]:
        hint = near(result, rule["choices"]) or f"; choose {' or '.join(rule['choices'])}"
        raise UsageError(f"{where} is {_shown(value)}{hint}")
    numbers = result if isinstance(result, tuple) else (result,)
    for number in numbers:
        if isinstance(number, int | float) and not _inside(number, rule):
            raise UsageError(f"{where} is {_shown(value)}, must be {_range(rule)}")
    return result


def _inside(number: float, rule: Mapping[str, Any]) -> bool:
    return bool(rule["low"] <= number <= rule["high"] and number > rule["above"])


def _range(rule: Mapping[str, Any]) -> str:
    least = f"more than {rule['above']:,.10g}" if rule["above"] > rule["low"] else ""
    least = least or (f"at least {rule['low']:,.10g}" if rule["low"] > -math.inf else "")
    most = f"at most {rule['high']:,.10g}" if rule["high"] < math.inf else ""
    return " and ".join(filter(None, (least, most)))


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer too long to print
        text = "a number of thousands of digits"
    return text if len(text) <= 60 else text[:57] + "..."


def near(name: str, known: Iterable[str]) -> str:
    """'; did you mean x?', or nothing."""
    found = difflib.get_close_matches(name, list(known), 3)
    return f"; did you mean {' or '.join(found)}?" if found else ""


def check_workload(workload: WorkloadSection, source: str) -> None:
    """What no single value can show: does [workload] say how many, of what and how fast."""
    sized = workload.prompt_tokens is not None
    if workload.shared_tokens >= (workload.prompt_tokens or (1, 1))[0]:
        raise UsageError(
            f"{source}: workload.shared_tokens is {workload.shared_tokens:,}; "
            "give prompt_tokens that are always more"
        )
    listed = workload.prompts is not None or workload.prompts_file is not None
    if workload.trace is not None:
        for key in ("requests", "rate_per_s", "output_tokens"):
            if getattr(workload, key) is not None:
                raise UsageError(f"{source}: workload.{key} and the trace both say it; give one")
        return
    if workload.limit is not None:
        raise UsageError(f"{source}: workload.limit is for a trace; use workload.requests")
    if workload.requests is not None and not sized and not listed:
        kinds = listing(list(EXCLUSIVE["workload"]))
        raise UsageError(f"{source}: [workload] needs one of {kinds}")
    if sized and workload.requests is None:
        raise UsageError(f"{source}: [workload] needs requests, how many to send")
    if (sized or listed) and workload.rate_per_s is None and workload.arrivals != "burst":
        raise UsageError(
            f'{source}: [workload] needs rate_per_s, or arrivals = "burst" to send all at once'
        )


def parse_policy(text: str) -> tuple[str, dict[str, int | float | str]]:
    """'chunked,chunk=64' -> ('chunked', {'chunk': 64}). Names and keys are not judged here.

    A name is one of stepscope's, or PATH.py:NAME for a policy in a file.
    """
    name, *settings = (part.strip() for part in text.split(","))
    if not re.fullmatch(r"[A-Za-z][\w-]*|.+\.py:[A-Za-z_]\w*", name):
        raise UsageError(
            f"policy {text!r} does not begin with a name; write NAME,key=value,... "
            "or PATH.py:NAME,key=value,..."
        )
    values: dict[str, int | float | str] = {}
    for setting in settings:
        key, _, value = (part.strip() for part in setting.partition("="))
        if not key or not value:
            raise UsageError(f"policy {text!r}: {setting!r} is not key=value")
        if key in values:
            raise UsageError(f"policy {text!r} gives {key} twice")
        values[key] = _policy_value(value, text)
    return name, values


def _policy_value(value: str, policy: str) -> int | float | str:
    if re.fullmatch(r"[+-]?\d{1,18}", value):
        return int(value)
    try:
        number = float(value)
    except ValueError:
        return value
    if not math.isfinite(number):
        raise UsageError(f"policy {policy!r}: {value} is not a finite number")
    return number
