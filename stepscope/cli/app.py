"""The Typer application and how it ends: one sentence on stderr and the right exit code."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import Annotated

import typer

from stepscope.cli import ceilings, compare, info, models, report, run, show
from stepscope.errors import FAILED, INTERRUPTED, StepscopeError

app = typer.Typer(
    name="stepscope",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"stepscope {metadata.version('stepscope')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Why does my decode step take 9 ms? Run an instrumented engine, see inside every step."""


run.register(app)
show.register(app)
report.register(app)
compare.register(app)
ceilings.register(app)
models.register(app)
info.register(app)

COMMANDS = {
    *(c.name for c in app.registered_commands if c.name),
    *(g.name for g in app.registered_groups if g.name),
}


def run_app() -> None:
    """`stepscope RUN` alone is `stepscope show RUN`."""
    arguments = sys.argv[1:]
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        arguments = ["show", *arguments]
    try:
        app(args=arguments, prog_name="stepscope")
    except StepscopeError as error:
        print(f"stepscope: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("stepscope: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left; nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
