"""The pictures: written, not empty, and refused by name when unknown."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope.analyze import analyze, compare
from stepscope.errors import UsageError
from stepscope.records import Run
from stepscope.report import figures, png
from tests.synthetic import Prefill, make_run


def entry(run: Run) -> png.Labelled:
    return run.meta.label, run, analyze(run)


def colours(path: Path) -> int:
    """Distinct colours of a picture; a blank one has one."""
    from matplotlib.image import imread

    pixels = imread(path)[::7, ::7, :3]
    return len({tuple(p) for row in pixels for p in row})


def test_a_summary_of_two_runs(tmp_path: Path) -> None:
    stalled = [Prefill(at=20, tokens=300)]
    runs = [
        entry(make_run(prefills=stalled, label="$a^b$ 50 %", slo={"itl_ms": 50})),
        entry(make_run(label="b", complete=False)),
    ]
    png.write(runs, compare(runs), tmp_path / "a.png")
    assert colours(tmp_path / "a.png") > 20


@pytest.mark.parametrize("name", png.FIGURES)
def test_one_figure_by_name(tmp_path: Path, name: str) -> None:
    png.write([entry(make_run(decode_steps=40))], None, tmp_path / "f.png", name)
    assert colours(tmp_path / "f.png") > 8


def test_a_run_without_steps_or_ceilings(tmp_path: Path) -> None:
    png.write([entry(make_run(decode_steps=0, batch=0, ceilings=None))], None, tmp_path / "e.png")
    assert colours(tmp_path / "e.png") > 3


def test_an_unknown_figure_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="timeline"):
        png.write([entry(make_run())], None, tmp_path / "x.png", "pie")
    assert not (tmp_path / "x.png").exists()


def test_many_steps_share_columns_of_equal_time() -> None:
    views = analyze(make_run(decode_steps=300)).steps
    groups = figures.columns(views, most=50)
    assert len(groups) <= 50
    assert [v for group in groups for v in group] == views
    assert figures.middle_step(views[1:4]).wall_ns == sorted(v.wall_ns for v in views[1:4])[1]
