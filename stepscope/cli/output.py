"""Streams: results on stdout, progress and notes on stderr; files are announced with their size."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from stepscope.errors import UsageError
from stepscope.records import StepRecord
from stepscope.text import printable, size

RUNS = Path(os.environ.get("STEPSCOPE_RUNS", "runs"))
REDRAW_S = 0.2


def stdout() -> Console:
    """Shows text as it is: labels and prompts are data, and may look like markup or emoji codes."""
    return Console(markup=False, emoji=False, highlight=False, soft_wrap=False)


def entry(label: str, text: str, indent: int) -> None:
    """`label    text`: folded with a hanging indent on a terminal, one line for other programs."""
    out = stdout()
    line = f"{printable(label):<{indent}} " + " ".join(printable(text).split())
    if out.is_terminal and out.width > 2 * indent:
        line = textwrap.fill(
            line,
            out.width,
            subsequent_indent=" " * (indent + 1),
            break_on_hyphens=False,
            break_long_words=False,
        )
    print(line)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1, allow_nan=False, default=str))


def tolerate_any_text() -> None:
    """What the terminal's encoding lacks is shown as an escape; it never ends a command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def leave_stdout() -> None:
    """What is still to be written is dropped, or Python would fail on it once more at its end."""
    with contextlib.suppress(OSError, ValueError):  # no real file, as in a test
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(sentence: str) -> None:
    """The one line that says why a command ended."""
    clear = "\r\x1b[K" if sys.stderr is not None and sys.stderr.isatty() else ""
    with contextlib.suppress(OSError):  # nobody can be told
        print(f"{clear}stepscope: {printable(sentence)}", file=sys.stderr, flush=True)


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def wrote(path: Path, next_command: str) -> None:
    """After writing a file or a run directory, and what to type next."""
    total = (
        path.stat().st_size
        if path.is_file()
        else sum(f.stat().st_size for f in path.iterdir() if f.is_file())
    )
    note(f"wrote {path} ({size(total)})")
    note(f"next: {next_command}")


def shell_word(path: Path) -> str:
    """As it can be typed: quoted where it has spaces or worse."""
    return shlex.quote(str(path))


def refuse_overwrite(path: Path, force: bool) -> None:
    """Raises UsageError rather than let a file be replaced."""
    if path.exists() and not force:
        raise UsageError(f"{path} exists; give --force to replace it, or another -o")


class StatusLine:
    """One line that redraws itself, on a terminal only, a few times a second."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._drawn = 0.0
        self._wide = False

    def show(self, text: str) -> None:
        now = time.monotonic()
        if self._live and now - self._drawn >= REDRAW_S:
            self._drawn, self._wide = now, True
            sys.stderr.write("\r\x1b[K" + text[: _columns() - 1])
            sys.stderr.flush()

    def say(self, text: str) -> None:
        """A phase that takes a while: redrawn on a terminal, one line elsewhere."""
        if self._live:
            self._drawn = 0.0
            self.show(text)
        else:
            note(text)

    def measuring(self, what: str, share: float) -> None:
        """Progress of the ceilings; said once where nothing can be redrawn."""
        if self._live:
            self.show(f"measuring {what}")
        elif share == 0:
            note("measuring the ceilings of this device (cached afterwards)")

    def step(self, row: StepRecord, done: int, total: int) -> None:
        if self._live:
            self.show(
                f"step {row.step:,}  {row.end_ns / 1e9:.0f} s  {done}/{total} requests done  "
                f"{row.num_running or 0} running  {row.num_waiting or 0} waiting  "
                f"{row.wall_ns / 1e6:.1f} ms"
            )

    def clear(self) -> None:
        if self._wide:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns
    except OSError:
        return 80
