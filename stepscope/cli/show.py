"""stepscope show: a run's result, its steps, or one step."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from stepscope.cli.output import RUNS, print_json, stdout
from stepscope.errors import UsageError

Format = Annotated[str, typer.Option("--format", help="text, json, csv or md.")]


def register(app: typer.Typer) -> None:
    app.command("show")(show)


def show(
    run: Annotated[str, typer.Argument(help="Run directory, start of a run id, or 'last'.")],
    steps: Annotated[str | None, typer.Option(help="Steps A:B as a table.")] = None,
    step: Annotated[int | None, typer.Option(help="One step in full.")] = None,
    top: Annotated[int | None, typer.Option(help="The N longest steps.")] = None,
    fmt: Format = "text",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
) -> None:
    """Show a recorded run: the three answers, or its steps."""
    from stepscope.analyze import analyze
    from stepscope.report import console as view
    from stepscope.report import tables
    from stepscope.store import find_run, read_run

    fmt = "json" if json else fmt
    _check(fmt, steps, step, top)
    path = find_run(run, RUNS)
    recorded = read_run(path)
    analysis = analyze(recorded)
    if steps is None and step is None and top is None:
        if fmt == "text":
            view.samples(stdout(), recorded.meta)
            view.show(stdout(), recorded, analysis, f"stepscope report {path} -o report.html")
        elif fmt == "json":
            print_json({"run": str(path), **analysis.to_dict()})
        elif fmt == "md":
            from stepscope.report import markdown

            print(markdown.page([(recorded.meta.label, recorded, analysis)], None))
        else:
            print(tables.requests_csv(recorded), end="")
        return
    chosen = _chosen(analysis.steps, steps, step, top)
    if fmt == "json":
        print_json([tables.step_dict(v) for v in chosen])
    elif fmt == "text" and step is not None:
        stdout().print(tables.step_table(chosen[0]))
    elif fmt == "text":
        stdout().print(view.steps_table(chosen))
    else:
        print(tables.steps_text(chosen, fmt), end="")


def _check(fmt: str, steps: str | None, step: int | None, top: int | None) -> None:
    if fmt not in ("text", "json", "csv", "md"):
        raise UsageError(f"there is no format '{fmt}'; choose text, json, csv or md")
    if step is not None and (steps is not None or top is not None):
        raise UsageError("--step shows one step; leave out --steps and --top, or --step")
    if step is not None and step < 0:
        raise UsageError(f"--step {step}: steps are numbered from 0")
    if top is not None and top < 1:
        raise UsageError(f"--top {top} shows nothing; give the number of steps, 1 or more")


def _chosen(views: list[Any], span: str | None, step: int | None, top: int | None) -> list[Any]:
    if step is not None:
        span = f"{step}:{step + 1}"
    if span is not None:
        first, last = _bounds(span)
        views = [v for v in views if v.step >= first and (last is None or v.step < last)]
        if not views:
            raise UsageError(f"the run has no step in {span}; see `stepscope show RUN --top 5`")
    if top is not None:
        views = sorted((v for v in views if v.kind != "idle"), key=lambda v: -v.wall_ns)[:top]
    return views


def _bounds(span: str) -> tuple[int, int | None]:
    first, colon, last = span.partition(":")
    try:
        begin = int(first) if first else 0
        return begin, (int(last) if last else None) if colon else begin + 1
    except ValueError:
        raise UsageError(f"'{span}' is not a range of steps; write A:B, A: or :B") from None
