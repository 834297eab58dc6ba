"""A report is written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepscope import report
from stepscope.analyze import analyze
from tests.synthetic import make_run


@pytest.mark.parametrize("suffix", [".html", ".md", ".png"])
def test_a_report_replaces_the_one_before(tmp_path: Path, suffix: str) -> None:
    run = make_run(30)
    path = tmp_path / f"report{suffix}"
    path.write_text("the one before")
    report.write([("a", run, analyze(run))], None, path)
    assert path.stat().st_size > 1000 and list(tmp_path.iterdir()) == [path]


def test_a_disk_that_fills_up_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(30)
    path = tmp_path / "report.html"
    path.write_text("the one before")

    def torn(self: Path, text: str, **options: str) -> int:
        with self.open("w") as file:
            file.write(text[:100])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", torn)
    with pytest.raises(OSError, match="No space"):
        report.write([("a", run, analyze(run))], None, path)
    assert path.read_text() == "the one before" and list(tmp_path.iterdir()) == [path]
