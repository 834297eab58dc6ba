"""The command line: parse, call, print. Nothing is computed here."""

from __future__ import annotations

import signal
import sys
from types import FrameType

from stepscope.errors import INTERRUPTED


def main() -> None:
    """The console script. Ctrl-C, whenever it comes, ends it with one line and exit code 130.

    Importing takes long enough to be interrupted, and an import may turn KeyboardInterrupt into an
    error of its own. So the signal itself is remembered and has the last word.
    """
    pressed: list[int] = []

    def remember(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    if (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    ):  # else it is ignored on purpose
        signal.signal(signal.SIGINT, remember)
    try:
        from stepscope.cli.app import run_app

        run_app()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the interpreter's own end is left
        ended = sys.exc_info()[1]
        told = isinstance(ended, SystemExit) and ended.code == INTERRUPTED
        if pressed and not told:
            print("stepscope: interrupted", file=sys.stderr)
            sys.exit(INTERRUPTED)
