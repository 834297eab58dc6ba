"""stepscope report: a page, a picture or Markdown of one or more runs."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from stepscope.cli.output import RUNS, refuse_overwrite, wrote
from stepscope.errors import StepscopeError, UsageError


def register(app: typer.Typer) -> None:
    app.command("report")(report)


def report(
    runs: Annotated[
        list[str], typer.Argument(help="Runs, each a directory, id prefix, or 'last'.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="FILE.html, FILE.png or FILE.md.")
    ] = Path("report.html"),
    figure: Annotated[str | None, typer.Option(help="One figure of the PNG by its name.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    open_it: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Write a report of one run, or of several side by side."""
    from stepscope.cli.compare import load
    from stepscope.report import write

    if output.suffix not in (".html", ".png", ".md"):
        raise UsageError(f"{output} names no kind of report; end it in .html, .png or .md")
    refuse_overwrite(output, force)
    loaded, comparison = load(runs, RUNS)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write(loaded, comparison, output, figure)
    except OSError as error:
        raise StepscopeError(
            f"cannot write {output} ({error.strerror or error}); choose another -o"
        ) from error
    wrote(output, f"stepscope show {runs[0]} --top 5")
    if open_it:
        webbrowser.open(output.resolve().as_uri())
