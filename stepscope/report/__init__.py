"""Analysis -> console, HTML, PNG, Markdown. Reports draw; they never derive."""

from __future__ import annotations

from pathlib import Path

from stepscope.analyze.model import Analysis, Comparison
from stepscope.records import Run


def write(
    runs: list[tuple[str, Run, Analysis]],
    comparison: Comparison | None,
    path: Path,
    figure: str | None = None,
) -> None:
    """Write FILE.html, FILE.png or FILE.md by its suffix. Raises OSError as the disk does."""
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
