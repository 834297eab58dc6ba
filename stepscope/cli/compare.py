"""stepscope compare: runs side by side, the first one being the baseline."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from stepscope.analyze.model import Analysis, Comparison
from stepscope.cli import gates
from stepscope.cli.output import RUNS, print_json, stdout
from stepscope.errors import UsageError
from stepscope.records import Run


def register(app: typer.Typer) -> None:
    app.command("compare")(compare)


def compare(
    base: Annotated[str, typer.Argument(help="The baseline run; label=RUN names it.")],
    new: Annotated[list[str], typer.Argument(help="The runs to hold against it.")],
    metric: Annotated[list[str] | None, typer.Option(help="Only these metrics.")] = None,
    only_changed: Annotated[bool, typer.Option("--only-changed")] = False,
    fmt: Annotated[str, typer.Option("--format", help="text, json or md.")] = "text",
    json: Annotated[bool, typer.Option("--json", help="Same as --format json.")] = False,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(help="Exit 3 if a metric moved the wrong way: 'p99_itl_ms:+5%'."),
    ] = None,
) -> None:
    """Compare runs of identical arrivals: latencies, goodput, stalls, preemptions."""
    from stepscope.report import side_by_side as view

    rules = [gates.parse_delta(text) for text in fail_on or []]
    loaded, result = load([base, *new], RUNS)
    assert result is not None  # two runs at least
    _check_metrics(metric or [], result)
    if json or fmt == "json":
        print_json(asdict(result))
    elif fmt == "md":
        from stepscope.report import markdown

        print(markdown.page(loaded, result))
    elif fmt == "text":
        view.comparison(stdout(), result, metric, only_changed)
    else:
        raise UsageError(f"there is no format '{fmt}'; choose text, json or md")
    gates.judge_deltas(rules, result)


def load(refs: list[str], root: Path) -> tuple[list[tuple[str, Run, Analysis]], Comparison | None]:
    """The runs by their labels, analysed, and their comparison where there are several.

    A directory that holds runs (one per policy) stands for all of them.
    """
    from stepscope.analyze import analyze
    from stepscope.analyze import compare as compare_runs
    from stepscope.store import find_run, read_run

    loaded: list[tuple[str, Run, Analysis]] = []
    for ref in refs:
        label, path = _labelled(ref)
        children = _run_children(Path(path))
        for child in children or [find_run(path, root)]:
            run = read_run(child)
            loaded.append((_unique(label or run.meta.label, loaded), run, analyze(run)))
    return loaded, compare_runs(loaded) if len(loaded) > 1 else None


def _labelled(ref: str) -> tuple[str, str]:
    label, equals, path = ref.partition("=")
    return (label, path) if equals and not Path(ref).exists() else ("", ref)


def _run_children(path: Path) -> list[Path]:
    if not path.is_dir() or (path / "run.json").exists():
        return []
    from stepscope.store import list_runs

    return [child for child, _ in list_runs(path) if child.parent == path]  # in order of recording


def _unique(label: str, loaded: list[tuple[str, Run, Analysis]]) -> str:
    taken = {name for name, _, _ in loaded}
    if label not in taken:
        return label
    return next(f"{label} ({i})" for i in range(2, len(taken) + 3) if f"{label} ({i})" not in taken)


def _check_metrics(wanted: list[str], result: Comparison) -> None:
    known = [row.metric for row in result.rows]
    for name in wanted:
        if name not in known:
            raise UsageError(f"there is no metric '{name}' here; there are {', '.join(known)}")
