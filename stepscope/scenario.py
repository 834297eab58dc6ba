"""Scenario TOML -> validated Scenario -> the requests it sends (format: `stepscope.sections`)."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from stepscope.errors import UsageError
from stepscope.sections import (
    EXCLUSIVE,
    SECTIONS,
    EngineSection,
    ModelSection,
    RequestSection,
    SamplingSection,
    SloSection,
    WorkloadSection,
    check_workload,
    key_of,
    near,
    parse_policy,
    read_section,
)
from stepscope.text import listing
from stepscope.workload import (
    MOST_REQUESTS,
    MOST_SECONDS,
    NS,
    RequestSpec,
    arrival_times,
    draw,
    fingerprint,
    numbered,
    read_prompts,
    read_trace,
)

__all__ = [
    "RequestSpec",
    "Scenario",
    "apply_overrides",
    "load_scenario",
    "parse_policy",
    "parse_scenario",
    "scenario_files",
]

FOLDERS = (Path("scenarios"), Path(__file__).resolve().parent.parent / "scenarios")
TITLES = ("name", "description")


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
        found = {key: Origin(getattr(self, key), self.given.get(key, "default")) for key in TITLES}
        parts = {key: getattr(self, key) for key in SECTIONS}
        parts |= {f"request.{i}": part for i, part in enumerate(self.injected)}
        for where, part in parts.items():
            for f in fields(part):
                key = f"{where}.{key_of(f)}"
                found[key] = Origin(getattr(part, f.name), self.given.get(key, "default"))
        return found

    def to_dict(self) -> dict[str, Any]:
        """For run.json: every resolved value and the identity of the requests."""
        resolved = {key: origin.value for key, origin in self.origins().items()}
        return {**resolved, "num_requests": len(self.requests), "requests_sha256": self.sha256()}


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
        beside = [str(p) for p in sorted(path.parent.glob("*.toml"))] if path.suffix else []
        names = listing(sorted(known), 12)
        hint = near(path_or_name, [*known, *beside]) or (known and f"; there are {names}") or ""
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
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    return _build(raw, dict.fromkeys(_dotted(raw), "file"), source)


def _build(raw: dict[str, Any], given: dict[str, str], source: str) -> Scenario:
    def label(key: str) -> str:
        origin = given.get(key, "file")
        return f"{source}: {key}" if origin == "file" else f"{origin} {key}"

    known = (*TITLES, *SECTIONS, "request")
    for key in raw:
        if key not in known:
            raise UsageError(f"{label(key)} is not known{near(key, known)}")
    for key in TITLES:
        if not isinstance(raw.get(key, "x"), str) or not raw.get(key, "x"):
            raise UsageError(f"{label(key)} is not text")
    parts = {k: read_section(cls, raw.get(k, {}), k, label) for k, cls in SECTIONS.items()}
    tables = raw.get("request", [])
    if not isinstance(tables, list):
        raise UsageError(f"{label('request')} is one table; write [[request]], with two brackets")
    injected = tuple(
        read_section(RequestSection, t, f"request.{i}", label) for i, t in enumerate(tables)
    )
    if parts["model"].dimensions and not parts["model"].name.startswith("dummy:"):
        dims = listing([f"model.{k}" for k in parts["model"].dimensions])
        raise UsageError(f"{source}: {dims} can be set for a model named dummy:... only")
    return Scenario(
        name=raw.get("name", Path(source).stem),
        description=raw.get("description", ""),
        source=source,
        **parts,
        injected=injected,
        requests=_requests(parts["workload"], injected, parts["sampling"], source),
        raw=raw,
        given=given,
    )


def _dotted(raw: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in raw.items():
        if key == "request" and isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict) and prefix in ("", "request."):  # deeper ones are values
            yield from _dotted(value, f"{prefix}{key}.")
        else:
            yield prefix + key


# ---------------------------------------------------------------- overrides


def apply_overrides(
    scenario: Scenario, overrides: Mapping[str, Any], origin: str = "--set"
) -> Scenario:
    """The scenario with dotted keys changed, validated again. Raises UsageError.

    A text is read as a TOML value, or as itself where it is none; other values are taken as they
    are; None takes the key out, back to its default. Setting one of an exclusive group (prompts or
    prompt_tokens) takes the others out. origin is what `origins` and messages call the source.
    """
    raw, given = copy.deepcopy(scenario.raw), dict(scenario.given)
    for key, value in overrides.items():
        table, name = _place(raw, key, origin)
        section = key.split(".")[0]
        group = EXCLUSIVE.get(section, ())
        for other in group if name in group else ():
            sibling = key.removesuffix(name) + other
            if sibling not in overrides:
                table.pop(other, None)
                given.pop(sibling, None)
        if value is None:
            table.pop(name, None)
            given.pop(key, None)
        else:
            table[name] = _toml_value(value, section, name) if isinstance(value, str) else value
            given[key] = origin
    return _build(raw, given, scenario.source)


def _place(raw: dict[str, Any], key: str, origin: str) -> tuple[dict[str, Any], str]:
    """The table that holds a dotted key, and its name there."""
    match key.split("."):
        case [name] if name in TITLES:
            return raw, name
        case ["request", number, name] if number.isdecimal():
            tables = raw.get("request", [])
            if int(number) < len(tables):
                return tables[int(number)], name
            raise UsageError(f"{origin} {key}: there are {len(tables)} [[request]], from 0")
        case [section, name] if section in SECTIONS:
            table: dict[str, Any] = raw.setdefault(section, {})
            return table, name
    every = [f"{k}.{key_of(f)}" for k, cls in SECTIONS.items() for f in fields(cls)]
    raise UsageError(f"{origin} {key} is not known{near(key, [*TITLES, *every])}")


def _toml_value(text: str, section: str, name: str) -> Any:
    cls = RequestSection if section == "request" else SECTIONS.get(section)
    kinds = {key_of(f): f.type for f in fields(cls)} if cls else {name: "str"}
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:
        return text
    wants_text = str(kinds.get(name, "")).startswith(("str", "tuple[str"))
    if parsed.keys() != {"value"} or (wants_text and not isinstance(parsed["value"], str | list)):
        return text
    return parsed["value"]


# ---------------------------------------------------------------- requests


def _requests(
    workload: WorkloadSection,
    injected: tuple[RequestSection, ...],
    sampling: SamplingSection,
    source: str,
) -> tuple[RequestSpec, ...]:
    made = _from_workload(workload, sampling, source)
    if len(made) + sum(item.count for item in injected) > MOST_REQUESTS:
        raise UsageError(f"{source}: more than {MOST_REQUESTS:,} requests")
    for i, item in enumerate(injected):
        made += _from_injected(item, sampling, f"{source}: request.{i}")
    if not made:
        raise UsageError(f"{source} sends no request; add [workload] or [[request]]")
    for r in made:
        if r.min_tokens > r.max_tokens:
            raise UsageError(
                f"{source}: min_tokens {r.min_tokens:,} is more than max_tokens {r.max_tokens:,}"
            )
    requests = numbered(made, f"{workload.seed}/{sampling.seed}")
    if requests[-1].arrival_ns > MOST_SECONDS * NS:
        late = requests[-1].arrival_ns / NS
        raise UsageError(f"{source}: the last request arrives after {late:,.0f} s; raise the rate")
    return requests


def _spec(sampling: SamplingSection, arrival_s: float, **values: Any) -> RequestSpec:
    """The sampling section's values unless others are given; None means not given."""
    base = {f.name: getattr(sampling, f.name) for f in fields(sampling) if f.name != "seed"}
    given = {k: v for k, v in values.items() if v is not None}
    texts = {"prompt": None, "prompt_tokens": None}
    return RequestSpec(id=0, arrival_ns=round(arrival_s * NS), **{**texts, **base, **given})


def _from_injected(
    item: RequestSection, sampling: SamplingSection, where: str
) -> list[RequestSpec]:
    if item.prompt is None and item.prompt_tokens is None:
        raise UsageError(f"{where} needs prompt or prompt_tokens")
    values = {f.name: getattr(item, f.name) for f in fields(item)}
    for name in ("at_s", "count", "every_s"):
        del values[name]
    values["own_seed"] = values.pop("seed")
    values["chat"] = item.chat and item.prompt is not None
    return [_spec(sampling, item.at_s + i * item.every_s, **values) for i in range(item.count)]


def _from_workload(
    workload: WorkloadSection, sampling: SamplingSection, source: str
) -> list[RequestSpec]:
    check_workload(workload, source)
    if workload.trace is not None:
        return _from_trace(workload, sampling, Path(source).parent / workload.trace)
    prompts = workload.prompts or ()
    if workload.prompts_file is not None:
        prompts = read_prompts(Path(source).parent / workload.prompts_file)
    if not prompts and workload.prompt_tokens is None:
        return []
    count = workload.requests or len(prompts)
    stream = {what: Random(f"{workload.seed}/{what}") for what in ("arrival", "prompt", "output")}
    times = arrival_times(
        workload.arrivals, count, workload.rate_per_s, workload.cv, stream["arrival"]
    )
    made = []
    for i, time in enumerate(times):
        tokens, output = workload.prompt_tokens, workload.output_tokens
        made.append(
            _spec(
                sampling,
                workload.start_s + time,
                prompt=prompts[i % len(prompts)] if prompts else None,
                prompt_tokens=draw(tokens, stream["prompt"]) if tokens else None,
                shared_tokens=workload.shared_tokens,
                max_tokens=draw(output, stream["output"]) if output else None,
                chat=workload.chat and bool(prompts),
                client=workload.client,
                priority=workload.priority,
            )
        )
    return made


def _from_trace(
    workload: WorkloadSection, sampling: SamplingSection, file: Path
) -> list[RequestSpec]:
    return [
        _spec(
            sampling,
            workload.start_s + row.arrival_s / workload.speedup,
            prompt_tokens=row.prompt_tokens,
            max_tokens=row.output_tokens,
            client=row.client or workload.client,
            priority=workload.priority,
        )
        for row in read_trace(file, workload.limit)
    ]
