"""Analysis -> console, HTML, PNG, Markdown. Reports draw; they never derive."""

from __future__ import annotations

import os
from pathlib import Path

from stepscope.analyze.model import Analysis, Comparison
from stepscope.records import Run

Labelled = tuple[str, Run, Analysis]


def write(
    runs: list[Labelled],
    comparison: Comparison | None,
    path: Path,
    figure: str | None = None,
) -> None:
    """Write FILE.html, FILE.png or FILE.md by its suffix. Raises OSError as the disk does.

    A report that cannot be written whole leaves the file that was there as it was.
    """
    if path.exists() and not path.is_file():  # a pipe or a terminal has no place beside it
        _write(runs, comparison, path, figure)
        return
    unfinished = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        _write(runs, comparison, unfinished, figure)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def _write(
    runs: list[Labelled], comparison: Comparison | None, path: Path, figure: str | None
) -> None:
    if path.suffix == ".png":
        from stepscope.report import png

        png.write(runs, comparison, path, figure)
        return
    if path.suffix == ".html":
        from stepscope.report import html

        text = html.page(runs, comparison)
    else:
        from stepscope.report import markdown

        text = markdown.page(runs, comparison)
    path.write_text(text, encoding="utf-8", errors="replace")
