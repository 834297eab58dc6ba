"""The Typer application and how it ends: one sentence on stderr and the right exit code."""

from __future__ import annotations

import sys
from importlib import metadata
from typing import Annotated, Any, NoReturn

import typer

from stepscope.cli import ceilings, compare, info, models, report, run, show
from stepscope.cli.output import complain, leave_stdout, tolerate_any_text
from stepscope.errors import FAILED, INTERRUPTED, OK, StepscopeError

# The parser's UsageError, by way of what Typer makes public: its own copy of click, or click.
PARSER_ERROR: type[Exception] = typer.BadParameter.__mro__[1]

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
    """Run the command of sys.argv; ends in SystemExit unless all went well."""
    tolerate_any_text()
    try:
        try:
            code = _call(sys.argv[1:])
        finally:
            if sys.stdout is not None:  # else a full disk would show only after the last except
                sys.stdout.flush()
    except StepscopeError as error:
        _end(str(error), error.exit_code)
    except PARSER_ERROR as error:
        _refuse(error)
    except (KeyboardInterrupt, typer.Abort):
        _end("interrupted", INTERRUPTED)
    except BrokenPipeError:  # the reader of our output has left; nothing is wrong
        leave_stdout()
        sys.exit(FAILED)
    except OSError as error:
        leave_stdout()
        what = "write the output" if error.filename is None else f"use {error.filename}"
        _end(f"cannot {what} ({error.strerror or error})", FAILED)
    if code:
        sys.exit(code)


def _call(arguments: list[str]) -> int:
    """The exit code that Typer would end with. `stepscope RUN` alone is `stepscope show RUN`."""
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        arguments = ["show", *arguments]
    code = app(args=arguments, prog_name="stepscope", standalone_mode=False)
    if code == INTERRUPTED:  # Typer has caught the KeyboardInterrupt and made this of it
        raise KeyboardInterrupt
    return code or OK


def _refuse(error: Any) -> NoReturn:
    """What Typer's parser has against the command, in the form of all our messages."""
    text = error.format_message()
    if text.lstrip().startswith("Usage"):  # no arguments at all: the help
        print(text, file=sys.stderr)
        sys.exit(error.exit_code)
    sentence = " ".join(text.split()).replace(". Did you", "; did you").rstrip(".?")
    command = error.ctx.command_path if error.ctx else "stepscope"
    _end(f"{sentence[:1].lower()}{sentence[1:]}; see {command} --help", error.exit_code)


def _end(sentence: str, code: int) -> NoReturn:
    complain(sentence)
    sys.exit(code)
