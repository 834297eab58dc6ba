"""Run directory <-> Run: run.json plus one CSV per kind of row, integers and plain text only.

Rows are appended in one write per flush, so that a killed run keeps every row but the last flush's;
what changes as a whole (run.json, requests.csv) is replaced atomically.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from stepscope.checks import check_meta, check_parts, check_steps
from stepscope.errors import StepscopeError, UsageError
from stepscope.records import SCHEMA_VERSION, Event, Part, RequestRecord, Run, RunMeta, StepRecord
from stepscope.tables import EVENTS, PARTS, REQUESTS, STEPS, TABLES, Table, read_rows
from stepscope.text import listing, plural

META = "run.json"
LAST = ".last"  # beside the runs: where the latest one went that is not among them
RUN_FILES = (META, *(t.file for t in TABLES), "spans.csv")
# Lone surrogates (undecodable file names inside a message) must survive, not stop a run.
_ENCODING: dict[str, str] = {"encoding": "utf-8", "errors": "surrogatepass"}


# ---------------------------------------------------------------- writing


class RunWriter:
    """Writes one run directory. Raises StepscopeError with what is kept when the disk refuses."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rows = {t.file: 0 for t in TABLES}
        self._files: dict[str, io.FileIO] = {}

    @classmethod
    def create(cls, directory: Path, meta: RunMeta, force: bool = False) -> RunWriter:
        """Make the directory and its files, or leave nothing new behind.

        Raises UsageError rather than overwrite.
        """
        directory = Path(directory)
        writer = cls(directory)
        try:
            with contextlib.ExitStack() as undo:
                undo.callback(_remove_empty, _missing(directory))
                if _make_room(directory, force):
                    undo.callback(_remove_files, directory)
                undo.callback(writer.close)
                writer._start(meta)
                undo.pop_all()
        except OSError as error:
            raise _refused(directory, error, "nothing was recorded") from error
        return writer

    def _start(self, meta: RunMeta) -> None:
        self.meta(meta)
        self.requests(())
        for table in (STEPS, PARTS, EVENTS):
            handle = io.FileIO(self.directory / table.file, "xb")
            self._files[table.file] = handle
            _write_all(handle, table.header.encode())

    def append(
        self,
        steps: Sequence[StepRecord] = (),
        parts: Sequence[Part] = (),
        events: Sequence[Event] = (),
    ) -> None:
        """Add rows; they are with the operating system when this returns."""
        for table, rows in ((STEPS, steps), (PARTS, parts), (EVENTS, events)):
            if rows:
                self._append(table, rows)

    def _append(self, table: Table, rows: Sequence[Any]) -> None:
        handle = self._files[table.file]
        begin = handle.tell()
        try:
            _write_all(handle, table.lines(rows).encode(**_ENCODING))
        except OSError as error:
            with contextlib.suppress(OSError):  # the reader drops a torn line as well
                handle.truncate(begin)
                handle.seek(begin)
            raise _refused(self.directory / table.file, error, self._kept()) from error
        self.rows[table.file] += len(rows)

    def requests(self, rows: Sequence[RequestRecord]) -> None:
        """Replace requests.csv as a whole."""
        self._replace(REQUESTS.file, REQUESTS.header + REQUESTS.lines(rows))
        self.rows[REQUESTS.file] = len(rows)

    def meta(self, meta: RunMeta) -> None:
        """Replace run.json as a whole; numbers that are not finite become null."""
        text = json.dumps(_finite(meta.to_dict()), indent=1, allow_nan=False)
        self._replace(META, text + "\n")

    def _replace(self, name: str, text: str) -> None:
        try:
            write_atomically(self.directory / name, text)
        except OSError as error:
            raise _refused(self.directory / name, error, self._kept()) from error

    def _kept(self) -> str:
        steps = self.rows[STEPS.file]
        return f"{plural(steps, 'step')} written before are kept" if steps else "no step is lost"

    def close(self) -> None:
        for handle in self._files.values():
            with contextlib.suppress(OSError):  # every row was written before
                handle.close()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _write_all(handle: io.FileIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:  # a nearly full disk takes a part first
        rest = rest[handle.write(rest) or 0 :]


def write_atomically(path: Path, text: str) -> None:
    """A reader sees the old file or the new one, never a part. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(text.encode(**_ENCODING))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _missing(directory: Path) -> list[Path]:
    """The directory and those above it that are not there yet, the innermost first."""
    return [path for path in (directory, *directory.parents) if not path.exists()]


def _remove_empty(directories: list[Path]) -> None:
    for path in directories:
        with contextlib.suppress(OSError):  # not made, or no longer empty
            path.rmdir()


def _remove_files(directory: Path) -> None:
    for name in RUN_FILES:
        with contextlib.suppress(OSError):
            (directory / name).unlink()


def _make_room(directory: Path, force: bool) -> bool:
    """Make the directory, or empty it of the run it holds; True if nothing was in it."""
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{directory} is a file, not a directory; choose another -o")
    directory.mkdir(parents=True, exist_ok=True)
    if not any(directory.iterdir()):
        return True
    if not force:
        raise UsageError(f"{directory} is not empty; use --force or another -o")
    if not _is_run_directory(directory):
        raise UsageError(
            f"{directory} is not empty and holds no stepscope run, so --force leaves it alone; "
            "choose another -o"
        )
    for name in RUN_FILES:
        (directory / name).unlink(missing_ok=True)
    return False


def _is_run_directory(directory: Path) -> bool:
    try:
        raw = json.loads((directory / META).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and {"schema_version", "run_id"} <= raw.keys()


def _refused(path: Path, error: OSError, kept: str) -> StepscopeError:
    return StepscopeError(
        f"cannot write {path} ({error.strerror or error}): {kept}; "
        "free some space or choose a writable -o"
    )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------- reading


def read_run(path: Path) -> Run:
    """Read a run directory, complete or not.

    Raises UsageError naming the file and its line and column, or the key, for a damaged one.
    """
    path = Path(path)
    meta = read_meta(path)
    rows = {t.file: _read_table(path / t.file, t, meta.notes) for t in TABLES}
    run = Run(meta, rows[STEPS.file], rows[REQUESTS.file], rows[PARTS.file], rows[EVENTS.file])
    check_steps(run.steps, str(path / STEPS.file))
    meta.notes += check_parts(run.parts, run.steps, str(path / PARTS.file))
    return run


def _read_table(file: Path, table: Table, notes: list[str]) -> list[Any]:
    rows, torn = read_rows(_read_text(file), table, str(file))
    if torn:
        notes.append(f"{file.name}: the last line was torn (the run was killed) and is left out")
    return rows


def read_meta(path: Path) -> RunMeta:
    """run.json alone. Raises UsageError when it is missing, damaged or of another schema."""
    file = Path(path) / META
    try:
        raw = json.loads(_read_text(file))
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file} is not valid JSON ({error}); run the scenario again") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("schema_version"), int):
        raise UsageError(f"{file} has no schema_version, so it is not a stepscope run")
    if raw["schema_version"] != SCHEMA_VERSION:
        raise UsageError(
            f"{file} has schema version {raw['schema_version']} and this stepscope reads "
            f"{SCHEMA_VERSION}; read it with the stepscope that wrote it, or run again"
        )
    check_meta(raw, str(file))
    return RunMeta.from_dict(raw)


def _read_text(file: Path) -> str:
    try:
        return file.read_bytes().decode(**_ENCODING)
    except FileNotFoundError as error:
        raise UsageError(f"{file} is missing, so this is not a whole run directory") from error
    except OSError as error:
        raise UsageError(f"cannot read {file} ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not UTF-8 text (byte {error.start}); run again") from error


# ---------------------------------------------------------------- finding


def list_runs(
    root: Path, on_skip: Callable[[str], None] = lambda reason: None
) -> list[tuple[Path, RunMeta]]:
    """Runs in root and one folder below (one run per policy), oldest first.

    on_skip is told, in a sentence, about each directory that looks like a run but cannot be read.
    """
    paths = sorted([*Path(root).glob(f"*/{META}"), *Path(root).glob(f"*/*/{META}")])
    return _in_order(paths, on_skip)


def _in_order(paths: Sequence[Path], on_skip: Callable[[str], None]) -> list[tuple[Path, RunMeta]]:
    """The runs of these run.json, oldest first."""
    found = []
    for path in paths:
        try:
            found.append((path.parent, read_meta(path.parent), path.stat().st_mtime_ns))
        except (UsageError, OSError) as error:
            on_skip(str(error))
    found.sort(key=lambda item: (item[1].created_utc, item[2]))
    return [(path, meta) for path, meta, _ in found]


def remember_run(directory: Path, root: Path) -> None:
    """So that `last` finds a run that was written outside of root; a refusing disk is no matter."""
    directory = directory.resolve()
    if root.resolve() not in directory.parents:
        with contextlib.suppress(OSError):
            root.mkdir(parents=True, exist_ok=True)
            write_atomically(root / LAST, f"{directory}\n")


def _latest(runs: list[tuple[Path, RunMeta]], root: Path) -> Path | None:
    """The newest of the runs in root and the one outside of it that was recorded last."""
    paths = [path for path, _ in runs[-1:]]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        paths.append(Path((root / LAST).read_bytes().decode(**_ENCODING).strip()))
    found = _in_order([path / META for path in paths if (path / META).is_file()], lambda why: None)
    return found[-1][0] if found else None


def find_run(ref: str, root: Path) -> Path:
    """A run directory from its path, the beginning of its run id, or `last`. Raises UsageError."""
    if ref != "last" and (Path(ref) / META).is_file():
        return Path(ref)
    runs = list_runs(root)
    if ref == "last" and (latest := _latest(runs, root)):
        return latest
    if not runs:
        raise UsageError(f"no run {ref!r}: {root} holds no runs; make one with stepscope run")
    matches = [p for p, m in runs if ref and (m.run_id.startswith(ref) or p.name.startswith(ref))]
    exact = [p for p, m in runs if ref in (m.run_id, p.name)]
    if len(exact or matches) == 1:
        return (exact or matches)[0]
    if matches:
        names = listing([str(p.relative_to(root)) for p in matches], 6)
        raise UsageError(f"{ref!r} could be {names}; type more of the name")
    if ref and Path(ref).is_dir():
        raise UsageError(f"{ref} is a directory without {META}, so it is not a run")
    raise UsageError(f"no run {ref!r} in {root}; stepscope list runs shows what there is")


def new_run_id(scenario: str, policy: str) -> str:
    """<utc>-<scenario>-<policy>-<id>: sorts by time, safe as a file name everywhere."""
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return "-".join((now, slug(scenario), slug(policy), secrets.token_hex(3)))


def slug(text: str) -> str:
    """Lower-case letters, digits and single hyphens, at most 40; never empty."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-") or "x"
