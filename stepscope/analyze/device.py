"""Steps of a run with a device timeline, seen from the device.

The host prepares, launches and waits beside a device that works by itself; time counts once, as the
device's while it works and as the host phase it waited for while it does not. So a step lasts
from the end of the device's last one to its own end there: first the gap, charged to what the
engine thread did in it, then the device's spans. The rows that come out are exclusive and
contiguous like those of a run with one timeline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from stepscope.records import HOST_PHASES, PHASES, StepRecord

# Exposed while launching: no work of the host itself, yet the device waits for it.
LAUNCHING = "other"
# Where the next draws need the ids, the last step is landed before the next one is launched.
LANDED_FIRST = (
    *("recv", "d2h_wait", "commit", "detok", "emit"),
    *("schedule", "prepare", "gather", "forward", "sample", "other"),
)


@dataclass(frozen=True, slots=True)
class _Doing:
    """What the engine thread did, one interval after the other."""

    begins: list[int]
    ends: list[int]
    names: list[str]

    def in_gap(self, begin: int, end: int) -> Iterator[tuple[str, int]]:
        """(phase, ns) of each interval that lies inside, as far as it does."""
        at = max(bisect_right(self.begins, begin) - 1, 0)
        while at < len(self.begins) and self.begins[at] < end:
            inside = min(self.ends[at], end) - max(self.begins[at], begin)
            if inside > 0:
                yield self.names[at], inside
            at += 1


def has_device(rows: list[StepRecord]) -> bool:
    return any(row.dev_begin_ns is not None and row.dev_end_ns is not None for row in rows)


def seen_from_device(rows: list[StepRecord]) -> list[StepRecord]:
    """Rows of one rank, in order; those without device times keep what they say."""
    doing = _doing(rows)
    landed = {row.result_step: row for row in rows if row.result_step is not None}
    reached = rows[0].begin_ns if rows else 0
    seen = []
    for row in rows:
        begin, end = row.dev_begin_ns, row.dev_end_ns
        if begin is None or end is None:
            after = max(reached, row.end_ns)
            seen.append(_without_device(row, reached, after))
            reached = after
            continue
        begin = min(max(begin, reached), max(end, reached))
        seen.append(_with_device(row, reached, begin, max(end, begin), doing, landed))
        reached = max(end, begin)
    return seen


def _doing(rows: list[StepRecord]) -> _Doing:
    begins: list[int] = []
    ends: list[int] = []
    names: list[str] = []
    at = 0
    for row in rows:
        at = max(at, row.begin_ns)
        for name in _order(row):
            end = min(at + (row.phase_ns(name) or 0), row.end_ns)
            if end > at:
                begins.append(at)
                ends.append(end)
                names.append(name)
                at = end
    return _Doing(begins, ends, names)


def _order(row: StepRecord) -> tuple[str, ...]:
    """In which the phases of this iteration came. Nothing but `other` follows the tokens of a step
    unless one was launched after them."""
    if row.emitted_ns is None or row.end_ns - row.emitted_ns <= (row.other_ns or 0):
        return PHASES
    return LANDED_FIRST


def _without_device(row: StepRecord, begin: int, end: int) -> StepRecord:
    """An idle row, cut to when the device was idle; or a step that was not seen on the device."""
    if row.kind != "idle":
        return replace(row, begin_ns=begin, end_ns=end, **_phases({}, None))
    waiting = _phases({"recv": end - begin}, 0)
    return replace(
        row,
        begin_ns=begin,
        end_ns=end,
        emitted_ns=None,
        result_step=None,
        num_output_tokens=None,
        **waiting,
    )


def _phases(known: dict[str, int], rest: int | None) -> dict[str, Any]:
    return {f"{name}_ns": known.get(name, rest) for name in PHASES}


def _with_device(
    row: StepRecord,
    reached: int,
    begin: int,
    end: int,
    doing: _Doing,
    landed: dict[int, StepRecord],
) -> StepRecord:
    host = dict.fromkeys((*HOST_PHASES, "d2h_wait"), 0)
    for name, ns in doing.in_gap(reached, begin):
        host[name if name in host else LAUNCHING] += ns
    host["other"] += begin - reached - sum(host.values())
    spans = _device_spans(row, end - begin)
    host["d2h_wait"] += spans.pop("copy")
    result = landed.get(row.step)
    return replace(
        row,
        begin_ns=reached,
        end_ns=end,
        host_cpu_ns=None,  # of an iteration, in which the thread mostly waits for the device
        result_step=row.step if result is not None else None,
        emitted_ns=result.emitted_ns if result is not None else None,
        num_output_tokens=result.num_output_tokens if result is not None else None,
        **_phases({**host, **spans}, None),
    )


def _device_spans(row: StepRecord, span: int) -> dict[str, int]:
    """The spans as phases; what is left (copying ids to the host) as `copy`. They sum to `span`."""
    spans: dict[str, int] = {}
    left = span
    for name in ("gather", "sample", "forward"):
        ns: int | None = getattr(row, f"dev_{name}_ns")
        if ns is not None:
            spans[name] = max(0, min(ns, left))
            left -= spans[name]
    if "forward" not in spans:  # not told apart: all of it is the model's
        spans["forward"], left = left, 0
    return {**spans, "copy": left}
