"""Can a run that was parsed also be analysed? If not, one sentence names the key or the line.

The types of RunMeta, ModelSpec, Ceilings and Sample are the rules for run.json; what a type cannot
say (a size is positive, a dtype is known) stands in LIMITS and CHOICES.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stepscope.errors import UsageError
from stepscope.records import Part, RunMeta, StepRecord
from stepscope.roofline import Ceilings, GemvPoint, TwinPoint
from stepscope.spec import ELEMENT_BYTES, KV_DTYPES, QUANTIZED, ModelSpec
from stepscope.text import listing, plural

LARGEST = 2**63 - 1
LARGEST_REAL = 1e300
MOST_DEPTH = 50
MOST_SKIPPED = 10_000  # step numbers between two rows: more is damage rather than a gap


@dataclass
class Device:
    """The keys of RunMeta.device that something is made of; the others are only shown."""

    kind: str | None = None
    name: str | None = None
    threads: int | None = None


@dataclass
class Recorder:
    ns_per_step: float | None = None
    laps_per_step: int | None = None


# Where RunMeta says dict[str, Any], because the parts are made of it later.
PARTS: dict[type, dict[str, Any]] = {
    RunMeta: {
        "model": ModelSpec,
        "device": Device,
        "slo": dict[str, float | None],
        "ceilings": Ceilings | None,
        "recorder": Recorder,
    }
}
OPEN = (RunMeta, Device, Recorder)  # unknown keys are no harm: nothing is made of them
NEEDED = {ModelSpec: {"eos_ids"}, Ceilings: {"gemv", "twin", "notes"}}  # read without a default

SIZE = (1, 10**9)
BYTES = (0, 10**16)
RATE = (1, 10**18)  # per second
TIME = (0, 10**18)  # ns
DIMENSIONS = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab")
LIMITS: dict[type, dict[str, tuple[int, int]]] = {
    RunMeta: {"slo": TIME},
    Device: {"threads": (0, 10**6)},
    Recorder: {"ns_per_step": TIME, "laps_per_step": TIME},
    ModelSpec: {
        **dict.fromkeys((*DIMENSIONS, "max_context"), SIZE),
        **dict.fromkeys(("linear_bytes", "norm_bytes", "head_bytes", "embedding_bytes"), BYTES),
    },
    Ceilings: dict.fromkeys(("read_curve", "copy_bytes_per_s", "gemm_flops"), RATE),
    GemvPoint: {"rows": SIZE, "cols": SIZE, "bytes_per_s": RATE},
    TwinPoint: {
        "batch": SIZE,
        **dict.fromkeys(("context", "forward_ns", "gather_ns", "sample_ns", "step_ns"), TIME),
    },
}
CHOICES: dict[type, dict[str, Iterable[str]]] = {
    ModelSpec: {"dtype": (*ELEMENT_BYTES, *QUANTIZED), "kv_dtype": KV_DTYPES}
}
WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


class _Wrong(Exception):
    """Where it is, and what stands there: 'model.layers is 'x', expected a whole number'."""


def check_meta(raw: dict[str, Any], file: str) -> None:
    """Raises UsageError naming the file and the key."""
    try:
        _object(raw, RunMeta, "")
    except _Wrong as wrong:
        raise UsageError(f"{file}: {wrong}; run the scenario again") from None


def _object(value: dict[str, Any], cls: Any, where: str) -> None:
    """The keys of a JSON object against the fields of the class that is made of it."""
    hints = {**get_type_hints(cls), **PARTS.get(cls, {})}
    for f in fields(cls):
        place = f"{where}.{f.name}" if where else f.name
        if f.name in value:
            _check(value[f.name], hints[f.name], place)
            _limit(value[f.name], LIMITS.get(cls, {}).get(f.name), place)
            _choose(value[f.name], CHOICES.get(cls, {}).get(f.name), place)
        elif f.default is f.default_factory is MISSING or f.name in NEEDED.get(cls, ()):
            raise _Wrong(f"{place} is missing")
    unknown = sorted(value.keys() - {f.name for f in fields(cls)})
    if unknown and cls not in OPEN:
        raise _Wrong(f"{where}.{unknown[0]} is not known")


def _check(value: Any, hint: Any, where: str) -> None:
    """One value against its type; collections and objects are followed down."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        _anything(value, where)
    elif NoneType in arguments:
        if value is not None:
            _check(value, next(a for a in arguments if a is not NoneType), where)
    elif is_dataclass(hint):
        _object(_of(value, dict, "an object", where), hint, where)
    elif origin is Literal:
        _choose(_of(value, str, "text", where), arguments, where)
    elif origin is dict:
        for key, item in _of(value, dict, "an object", where).items():
            _check(item, arguments[1], f"{where}.{key}")
    elif origin in (list, tuple):
        _list(value, arguments, where)
    else:
        _plain(value, hint, where)


def _list(value: Any, arguments: tuple[Any, ...], where: str) -> None:
    items = _of(value, list | tuple, "a list", where)
    pair = len(arguments) > 1 and arguments[1] is not Ellipsis
    if pair and len(items) != len(arguments):
        raise _Wrong(f"{where} has {plural(len(items), 'item')}, expected {len(arguments)}")
    for i, item in enumerate(items):
        _check(item, arguments[i if pair else 0], f"{where}[{i}]")


def _plain(value: Any, hint: type, where: str) -> None:
    kinds = (int, float) if hint is float else (hint,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and hint is not bool):
        raise _Wrong(f"{where} is {_shown(value)}, expected {WORDS[hint]}")
    _anything(value, where)


def _anything(value: Any, where: str, depth: int = 0) -> None:
    """What nobody calculates with must at least be printable: no inf, no endless integers."""
    if depth > MOST_DEPTH:
        raise _Wrong(f"{where} is nested too deep")
    if isinstance(value, dict):
        for key, item in value.items():
            _anything(item, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _anything(item, f"{where}[{i}]", depth + 1)
    elif isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise _Wrong(f"{where} is {_shown(value)}, expected a number of at most 64 bits")
    elif isinstance(value, float) and not -LARGEST_REAL < value < LARGEST_REAL:
        raise _Wrong(f"{where} is {value}, expected a finite number")


def _limit(value: Any, limit: tuple[int, int] | None, where: str) -> None:
    """Every number inside the value, however deep."""
    if limit is None or isinstance(value, str):
        return
    if isinstance(value, dict):
        for key, item in value.items():
            _limit(item, limit, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _limit(item, limit, f"{where}[{i}]")
    elif value is not None and not limit[0] <= value <= limit[1]:
        raise _Wrong(f"{where} is {value}, expected {limit[0]} to {limit[1]:,}")


def _choose(value: Any, choices: Iterable[str] | None, where: str) -> None:
    if choices is not None and value not in choices:
        raise _Wrong(f"{where} is {_shown(value)}, expected one of {listing(list(choices), 9)}")


def _of(value: Any, kind: Any, called: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise _Wrong(f"{where} is {_shown(value)}, expected {called}")
    return value


def _shown(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = (
        "null" if value is None else str(value).lower() if value in (True, False) else repr(value)
    )
    return text if len(text) <= 40 else text[:37] + "..."


# ---------------------------------------------------------------- rows


def check_steps(steps: list[StepRecord], file: str) -> None:
    """Step numbers count up, more or less. Raises UsageError naming the line that does not."""
    before = None
    for row, step in enumerate(steps):
        if step.step < 0 or (before is not None and abs(step.step - before) > MOST_SKIPPED):
            after = "" if before is None else f" after step {before}"
            raise UsageError(
                f"{file} line {row + 2}: step {step.step}{after} cannot be; run the scenario again"
            )
        before = step.step


def check_parts(parts: list[Part], steps: list[StepRecord], file: str) -> list[str]:
    """A part ends with the last step of the run at the latest; notes about those cut there.

    A disk may have lost the end of steps.csv and kept parts.csv: the rest can still be read. What
    no loss explains raises UsageError naming the line.
    """
    last = max((s.step for s in steps), default=-1)
    beyond: list[int] = []
    for row, part in enumerate(parts):
        if not 0 <= part.first_step <= part.last_step:
            raise UsageError(
                f"{file} line {row + 2}: a part from step {part.first_step} to {part.last_step} "
                "cannot be; run the scenario again"
            )
        if part.last_step > last:
            beyond.append(row + 2)
        part.last_step = min(part.last_step, last)
    parts[:] = [part for part in parts if part.first_step <= part.last_step]
    if not beyond:
        return []
    return [
        f"{file} line {beyond[0]}: the part goes on after the last recorded step ({last}) and is "
        f"cut there ({plural(len(beyond), 'such line')})"
    ]
