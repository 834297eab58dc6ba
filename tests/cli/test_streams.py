"""What leaves the process, whatever the data, the terminal, the disk or Ctrl-C do."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from stepscope.analyze import analyze, compare
from stepscope.analyze.rules import RULES
from stepscope.cli import output
from stepscope.records import Run
from stepscope.report import console as view
from stepscope.report import side_by_side, tables
from stepscope.store import RunWriter
from tests.cli.conftest import Result
from tests.synthetic import Prefill, make_run

Call = Callable[..., Result]
MAIN = "from stepscope.cli import main; main()"
LITERAL = ["[/x]", "[red]a[/red]", "[link=x]", ":smile:", "\\[b]", "[bold"]


def written(directory: Path, run: Run) -> Path:
    with RunWriter.create(directory, run.meta) as writer:
        writer.append(run.steps, run.parts, run.events)
        writer.requests(run.requests)
    return directory


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    return written(tmp_path / "runs" / "one", make_run(20, prefills=[Prefill(5, mixed=True)]))


def process(*arguments: object, before: str = "", **options: Any) -> subprocess.Popen[str]:
    """The command in a process of its own; `before` is run first in it."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
    code = [sys.executable, "-c", f"{before}\n{MAIN}", *map(str, arguments)]
    return subprocess.Popen(code, **options)


# ---------------------------------------------------------------- data is not markup


def shown(print_it: Callable[[Console], object], width: int = 200, **how: Any) -> str:
    out = io.StringIO()
    print_it(Console(file=out, width=width, **how))
    return out.getvalue()


@pytest.mark.parametrize("text", LITERAL)
def test_labels_are_shown_as_they_are(text: str) -> None:
    run = make_run(20, label=text, prefills=[Prefill(5)], notes=[text])
    run.meta.device["kind"] = run.meta.samples[0].prompt = run.meta.samples[0].text = text
    run.requests[0].finish_reason, run.requests[0].error = "error", text
    analysis = analyze(run)
    analysis.stalls[0] = replace(analysis.stalls[0], cause=text, harmful=True)
    page = shown(lambda c: view.show(c, run, analysis, text))
    for place in (f"on {text}", f"policy {text} ", f"note      {text}", f"next: {text}"):
        assert place in page
    assert any(text in line for line in page.splitlines() if "requests" in line)
    assert shown(lambda c: view.samples(c, run.meta)).count(text) == 2


@pytest.mark.parametrize("text", LITERAL)
def test_cells_and_titles_of_tables_are_shown_as_they_are(text: str) -> None:
    run = make_run(20)
    run.meta.samples[0].pieces = [text, text]
    analysis = analyze(run)
    step = replace(analysis.steps[3], verdict=text, kind=text)
    both = compare([(text, run, analysis), (f"{text} (2)", run, analysis)])
    both.notes.append(text)
    both.differences.append(text)
    pieces = repr(text)[1:-1]
    assert shown(lambda c: c.print(view.token_table(run, analysis))).count(pieces) == 2
    assert shown(lambda c: c.print(view.steps_table([step]))).count(text) == 2
    assert shown(lambda c: c.print(tables.step_table(step))).count(text) == 2
    assert shown(lambda c: side_by_side.comparison(c, both, None, False)).count(text) == 4


def test_the_console_of_every_command_takes_text_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    output.stdout().print(" ".join(LITERAL))
    assert capsys.readouterr().out.rstrip() == " ".join(LITERAL)


def test_nothing_in_a_run_drives_the_terminal(stepscope: Call, tmp_path: Path) -> None:
    bad = "\x1b[2J\x07"
    run = make_run(20, label=bad, notes=[bad], policy=bad)
    path = written(tmp_path / "r", run)
    for arguments in (("show", path), ("compare", path, path), ("compare", path, f"{bad}={path}")):
        result = stepscope(*arguments)
        assert result.code == 0, result.err
        assert "\\x1b[2J" in result.out
        assert not {"\x1b", "\x07"} & set(result.out)


def test_compare_names_its_columns_literally(stepscope: Call, ran: Path) -> None:
    result = stepscope("compare", f"[/x]={ran}", f"[red]={ran}")
    assert result.code == 0, result.err
    assert "[/x]" in result.out and "[red]" in result.out


# ---------------------------------------------------------------- what fits


def test_the_table_of_steps_shows_every_verdict_whole_in_80_columns() -> None:
    analysis = analyze(make_run(20))
    views = [
        replace(
            analysis.steps[2],
            step=123_456,
            kind="prefill",
            context_tokens=1_234_567,
            prefill_tokens=12_345,
            end_ns=analysis.steps[2].begin_ns + 98_765 * 10**6,
            verdict=verdict,
        )
        for verdict in RULES
    ]
    page = shown(lambda c: c.print(view.steps_table(views)), width=80)
    assert max(map(len, page.splitlines())) <= 80
    for line, verdict in zip(page.splitlines()[2:], RULES, strict=True):
        assert "1,234,567 12,345 98,800" in line
        assert line.rstrip().endswith(verdict.replace("_", "-"))


def test_an_idle_row_has_no_phases_of_a_model() -> None:
    run = make_run(20, idle=[(3, 10**6)])
    idle = next(s for s in run.steps if s.kind == "idle")
    idle.forward_ns, idle.gather_ns, idle.recv_ns = 0, 0, 5000
    step = next(v for v in analyze(run).steps if v.kind == "idle")
    cells = shown(lambda c: c.print(view.steps_table([step]))).splitlines()[-1].split()
    assert cells[4:8] == ["-", "1.00", "-", "-"]
    rows = shown(lambda c: c.print(tables.step_table(step))).splitlines()
    values = {line.split()[0]: line.split()[1:] for line in rows if line.split()}
    assert values["forward"] == ["-", "-"]
    assert values["recv"] == ["0.00500", "0", "%"]


def test_what_was_not_measured_has_no_unit() -> None:
    run = make_run(20, ceilings=None)
    page = shown(lambda c: c.print(tables.step_table(analyze(run).steps[3])))
    assert "n/a" in page and "n/a ms" not in page


def test_a_run_without_a_working_step_has_no_mean() -> None:
    run = make_run(0, 0, idle=[])
    page = shown(lambda c: view.show(c, run, analyze(run), "x"))
    assert "ms mean" not in page


def test_an_incomplete_run_does_not_claim_a_reason() -> None:
    run = make_run(20, complete=False)
    page = shown(lambda c: view.show(c, run, analyze(run), "x"))
    assert "INCOMPLETE: it did not run to its end" in page


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lists_hang_on_a_terminal_and_are_whole_lines_in_a_pipe(
    stepscope: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    for arguments, indent in ((("list", "metrics"), 23), (("explain", "bandwidth_bound"), 17)):
        piped = stepscope(*arguments).out.splitlines()
        assert max(map(len, piped)) > 150
        assert not any(line.startswith(" ") for line in piped)
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setenv("TERM", "xterm")
            patch.setattr(sys, "stdout", terminal)
            stepscope(*arguments)
        folded = terminal.getvalue().splitlines()
        assert max(map(len, folded)) <= 80
        assert len(folded) > len(piped)
        starts = [line for line in folded if not line.startswith(" " * indent)]
        assert len(starts) == len(piped)


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--top", "0"), "--top 0"),
        (("--top", "-3"), "--top -3"),
        (("--step", "1", "--top", "2"), "--step"),
        (("--step", "1", "--steps", "0:3"), "--step"),
        (("--step", "-1"), "--step -1"),
        (("--top", "x"), "'--top'"),
        (("--foo",), "--foo"),
        (("--format", "xml"), "xml"),
    ],
)
def test_show_refuses_in_one_sentence(
    stepscope: Call, ran: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = stepscope("show", ran, *arguments)
    assert (result.code, result.out) == (2, "")
    (line,) = result.err.splitlines()
    assert line.startswith("stepscope: ") and words in line


def test_a_missing_argument_and_no_argument(stepscope: Call) -> None:
    missing = stepscope("show")
    assert missing.code == 2
    assert missing.err.startswith("stepscope: missing argument")
    assert missing.err.rstrip().endswith("see stepscope show --help")
    assert "Usage" in stepscope().err + stepscope().out
    assert stepscope("--version").code == 0


def test_a_report_makes_the_directories_it_is_told(
    stepscope: Call, ran: Path, tmp_path: Path
) -> None:
    for name in ("r.md", "r.html"):
        result = stepscope("report", ran, "-o", tmp_path / "new" / "dir" / name)
        assert result.code == 0, result.err
        assert (tmp_path / "new" / "dir" / name).stat().st_size > 500
    (tmp_path / "file").write_text("x")
    result = stepscope("report", ran, "-o", tmp_path / "file" / "r.md")
    assert result.code == 1 and result.err.startswith("stepscope: cannot write")


# ---------------------------------------------------------------- a stream that refuses


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "RUN"),
        ("show", "RUN", "--json"),
        ("show", "RUN", "--steps", ":", "--format", "csv"),
        ("list", "metrics"),
        ("explain", "bandwidth_bound"),
    ],
)
def test_a_full_disk_behind_the_output_is_one_sentence(ran: Path, arguments: Any) -> None:
    with open("/dev/full", "w") as full:
        named = [ran if a == "RUN" else a for a in arguments]
        ended = process(*named, stdout=full)
        _, err = ended.communicate(timeout=60)
    assert ended.returncode == 1
    assert err == "stepscope: cannot write the output (No space left on device)\n"


def test_a_terminal_without_unicode_gets_escapes(tmp_path: Path) -> None:
    path = written(
        tmp_path / "r", make_run(20, label="caf\u00e9 \U0001f680 \ud800", notes=["\u2192"])
    )
    for arguments in (("show", path), ("show", path, "--format", "md"), ("compare", path, path)):
        ended = process(*arguments, env={**os.environ, "PYTHONIOENCODING": "ascii"})
        out, err = ended.communicate(timeout=60)
        assert ended.returncode == 0, err
        assert "\\U0001f680" in out
    ended = process("show", "\U0001f680", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "\\U0001f680" in ended.communicate(timeout=60)[1]
    assert ended.returncode == 2


def test_a_cache_that_cannot_be_made_is_one_sentence(
    stepscope: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPSCOPE_CACHE", "/proc/nowhere/cache")
    result = stepscope("models", "fetch", "smollm2-135m")
    assert result.code == 1
    (line,) = result.err.splitlines()
    assert "/proc/nowhere/cache cannot be written" in line


# ---------------------------------------------------------------- Ctrl-C

# SIGINT arrives while this module is looked for; afterwards the import fails in its own way.
AT_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            {action}
sys.meta_path.insert(0, Finder())
"""
PRESS = "os.kill(os.getpid(), signal.SIGINT)"
HIDE = f"""
            try:
                {PRESS}
            except KeyboardInterrupt:
                raise ImportError("initialization failed") from None"""


@pytest.mark.parametrize("action", [PRESS, HIDE])
@pytest.mark.parametrize("module", ["stepscope.cli.app", "typer", "stepscope.report.console"])
def test_ctrl_c_during_an_import_is_one_line(ran: Path, module: str, action: str) -> None:
    ended = process("show", ran, before=AT_IMPORT.format(module=module, action=action))
    _, err = ended.communicate(timeout=60)
    assert (ended.returncode, err) == (130, "stepscope: interrupted\n")


@pytest.mark.parametrize(
    ("place", "arguments"),
    [
        ("stepscope.models.load.load_model", ("ceilings",)),
        ("stepscope.models.load.load_model", ("run", "quickstart")),
        ("stepscope.device.kept_ceilings.load_or_measure", ("ceilings", "--model", "dummy:llama")),
        ("stepscope.models.fetch.fetch", ("models", "fetch", "smollm2-135m")),
        ("stepscope.store.read_run", ("show", "RUN")),
    ],
)
def test_ctrl_c_at_work_is_one_line(
    stepscope: Call, ran: Path, monkeypatch: pytest.MonkeyPatch, place: str, arguments: Any
) -> None:
    def pressed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(place, pressed)
    if "ceilings" in place:
        model = SimpleNamespace(spec=None)
        monkeypatch.setattr("stepscope.models.load.load_model", lambda *_, **__: model)
    result = stepscope(*(ran if a == "RUN" else a for a in arguments))
    assert result.code == 130
    assert [line for line in result.err.splitlines() if line.startswith("stepscope")] == [
        "stepscope: interrupted"
    ]
    assert "Traceback" not in result.err
