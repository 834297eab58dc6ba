"""Rows <-> CSV text: the columns of a file are the fields of its row class.

None is an empty cell, so a text column that may be None cannot also hold an empty text.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from operator import attrgetter
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from stepscope.errors import UsageError
from stepscope.records import Event, Part, RequestRecord, StepRecord
from stepscope.text import listing

# A torn line is at most one row. A longer unreadable tail is damage, and is not dropped silently.
MOST_TORN_CHARS = 65_536
ROWS_AT_ONCE = 4096  # cells are held as text only for so many rows: 200k steps have 12M cells
LARGEST = 2**63 - 1
_NEEDS_QUOTES = re.compile(r'[",\r\n]|^\s|\s$')


@dataclass(frozen=True)
class Column:
    name: str
    is_text: bool
    optional: bool
    choices: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """One CSV file: its columns are the fields of its row class."""

    file: str
    row: type[Any]

    @property
    def columns(self) -> list[Column]:
        hints = get_type_hints(self.row)
        return [_column(f.name, hints[f.name]) for f in fields(self.row)]

    @property
    def header(self) -> str:
        return ",".join(f.name for f in fields(self.row)) + "\n"

    def lines(self, rows: Iterable[Any]) -> str:
        cells = attrgetter(*(f.name for f in fields(self.row)))
        return "".join(",".join(map(_cell, cells(row))) + "\n" for row in rows)


def _column(name: str, hint: Any) -> Column:
    options = get_args(hint) if NoneType in get_args(hint) else (hint,)
    inner = next(o for o in options if o is not NoneType)
    choices = get_args(inner) if get_origin(inner) is Literal else ()
    return Column(name, bool(choices) or inner is str, len(options) > 1, choices)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        return f"{value:d}"  # a float or a bool written as such would not be read back
    if value == "" or _NEEDS_QUOTES.search(value):
        return '"' + value.replace('"', '""') + '"'
    return value


STEPS = Table("steps.csv", StepRecord)
REQUESTS = Table("requests.csv", RequestRecord)
PARTS = Table("parts.csv", Part)
EVENTS = Table("events.csv", Event)
TABLES = (STEPS, REQUESTS, PARTS, EVENTS)


def read_rows(text: str, table: Table, file: str) -> tuple[list[Any], bool]:
    """The rows, and whether a torn last line was left out (a killed run ends in one).

    A column that may be None may be absent. Raises UsageError naming file, line and column.
    """
    whole = _whole_rows(text, file)
    reader = csv.reader(io.StringIO(whole, newline=""), strict=True)
    csv.field_size_limit(2**31 - 1)
    try:
        header = next(reader, [])
        for column in table.columns:
            if column.name not in header and not column.optional:
                raise UsageError(f"{file} line 1 has no column {column.name}")
        rows = list(_rows(reader, header, table, whole, file))
    except csv.Error as error:
        raise UsageError(f"{file} line {reader.line_num} is not CSV ({error})") from error
    return rows, len(whole) < len(text)


def _rows(
    reader: Iterator[list[str]], header: list[str], table: Table, text: str, file: str
) -> Iterator[Any]:
    done = 0
    while chunk := list(islice(reader, ROWS_AT_ONCE)):
        for i, row in enumerate(chunk):
            if len(row) != len(header):
                line = _line_of(text, done + i)
                raise UsageError(f"{file} line {line} has {len(row)} cells, not {len(header)}")
        cells = dict(zip(header, zip(*chunk, strict=True), strict=True))
        nothing = ("",) * len(chunk)
        columns = [_values(cells.get(c.name, nothing), c, text, file, done) for c in table.columns]
        yield from map(table.row, *columns)
        done += len(chunk)


def _whole_rows(text: str, file: str) -> str:
    """The text up to the last newline that is not inside quotes (quotes are balanced there)."""
    inside = text.count('"') % 2
    end = len(text)
    while end:
        cut = text.rfind("\n", 0, end) + 1
        inside = (inside + text.count('"', cut, end)) % 2
        if not inside:
            end = cut
            break
        end = cut - 1 if cut else 0
    if len(text) - end > MOST_TORN_CHARS:
        raise UsageError(f"{file} has an unclosed quote after line {text.count(chr(10), 0, end)}")
    return text[:end]


def _line_of(text: str, row: int) -> int:
    """The line, counted from 1, on which data row `row` ends; rows may span several."""
    reader = csv.reader(io.StringIO(text, newline=""))
    for _ in range(row + 2):
        next(reader)
    return reader.line_num


def _values(cells: Sequence[str], column: Column, text: str, file: str, done: int) -> Sequence[Any]:
    if column.optional and not any(cells):
        return [None] * len(cells)
    try:
        return _converted(cells, column)
    except ValueError:
        i = next(i for i, cell in enumerate(cells) if not _readable(cell, column))
        expected = listing(list(column.choices), 9) or "a whole number of 64 bits"
        raise UsageError(
            f"{file} line {_line_of(text, done + i)}, column {column.name}: "
            f"{cells[i][:40]!r} is not {expected}"
        ) from None


def _converted(cells: Sequence[str], column: Column) -> Sequence[Any]:
    """All cells of a column. Raises ValueError."""
    if column.choices and not set(cells) <= {*column.choices, *([""] if column.optional else [])}:
        raise ValueError(column.name)
    if column.is_text:
        return [cell or None for cell in cells] if column.optional else cells
    known = [int(cell) for cell in cells if cell] if column.optional else list(map(int, cells))
    if known and (min(known) < -LARGEST or max(known) > LARGEST):
        raise ValueError(column.name)
    if len(known) == len(cells):
        return known
    numbers = iter(known)
    return [next(numbers) if cell else None for cell in cells]


def _readable(cell: str, column: Column) -> bool:
    try:
        _converted([cell], column)
    except ValueError:
        return False
    return True
