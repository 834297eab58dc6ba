"""The run directory: what is written comes back, damage is named, nothing foreign is touched."""

from __future__ import annotations

import errno
import io
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import StepscopeError, UsageError
from stepscope.records import Event, Part, RequestRecord
from stepscope.store import RunWriter, find_run, list_runs, new_run_id, read_run, remember_run
from stepscope.tables import EVENTS, LARGEST, STEPS, read_rows
from tests.run_files import a_meta, a_run, a_step, set_cell

INT64 = st.integers(-LARGEST, LARGEST)


def test_a_run_comes_back_as_it_was_written(tmp_path: Path) -> None:
    run = read_run(a_run(tmp_path / "r"))
    assert run.meta == a_meta()
    assert run.steps == [a_step(0), a_step(1), a_step(2)]
    assert run.parts == [Part(0, "prefill", 0, 0, 8, 1)]
    assert run.events == [Event(1, 2, "gc", None, "generation 2")]
    assert run.requests == [RequestRecord(0, 0, 8, client="a,b", finish_reason="eos")]
    assert run.steps[0].gather_ns is None


NASTY = ['=cmd|" /C calc"!A0', "a\nb\r\nc\rd", "\x00", '""', " padded ", "\ud800", "+1", "é\u2028"]


@pytest.mark.parametrize("text", NASTY)
def test_nasty_text_survives_in_a_run(tmp_path: Path, text: str) -> None:
    with RunWriter.create(tmp_path / "r", a_meta(label=text)) as writer:
        writer.append(events=[Event(0, 1, "gc", 7, text)])
        writer.requests([RequestRecord(0, 0, 1, client=text, error=text)])
    run = read_run(tmp_path / "r")
    assert (run.meta.label, run.events[0].detail) == (text, text)
    assert (run.requests[0].client, run.requests[0].error) == (text, text)


@given(st.lists(st.tuples(INT64, st.none() | INT64, st.text())))
def test_any_event_round_trips(items: list[tuple[int, int | None, str]]) -> None:
    events = [Event(i, i, "k", request, detail) for i, request, detail in items]
    assert read_rows(EVENTS.header + EVENTS.lines(events), EVENTS, "f") == (events, False)


@given(st.lists(st.text(), min_size=1, max_size=4), st.integers(min_value=1))
def test_a_file_cut_anywhere_keeps_all_whole_rows(details: list[str], cut: int) -> None:
    events = [Event(i, i, "k", None, detail) for i, detail in enumerate(details)]
    *kept, last = [EVENTS.lines([event]) for event in events]
    torn = last[: cut % len(last)]
    rows, was_torn = read_rows(EVENTS.header + "".join(kept) + torn, EVENTS, "f")
    assert rows == events[:-1]
    assert was_torn == bool(torn)


def test_a_torn_line_is_left_out_with_a_note(tmp_path: Path) -> None:
    file = a_run(tmp_path / "r") / "steps.csv"
    file.write_bytes(file.read_bytes()[:-1])  # the last cell looks whole, and may not be
    run = read_run(tmp_path / "r")
    assert len(run.steps) == 2
    assert any("steps.csv" in note and "torn" in note for note in run.meta.notes)


def test_a_killed_writer_leaves_a_readable_run(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from tests.run_files import *
writer = RunWriter.create(Path({str(tmp_path / "r")!r}), a_meta())
writer.append([a_step(i) for i in range(50)])
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], check=False)
    assert done.returncode == -signal.SIGKILL
    run = read_run(tmp_path / "r")
    assert len(run.steps) == 50
    assert not run.meta.complete
    assert run.requests == []


def test_a_long_unclosed_quote_is_damage_not_a_torn_line(tmp_path: Path) -> None:
    file = a_run(tmp_path / "r", steps=5000) / "steps.csv"
    lines = file.read_text().splitlines(keepends=True)
    lines[5] = '"' + lines[5]
    file.write_text("".join(lines))
    with pytest.raises(UsageError, match=r"steps\.csv has an unclosed quote after line 5"):
        read_run(tmp_path / "r")


@pytest.mark.parametrize(
    ("column", "text"),
    [("begin_ns", "x"), ("begin_ns", ""), ("end_ns", "1.5"), ("forward_ns", "nan"), ("kind", "z")],
)
def test_a_bad_cell_is_named(tmp_path: Path, column: str, text: str) -> None:
    set_cell(a_run(tmp_path / "r", steps=6000) / "steps.csv", 5001, column, text)
    with pytest.raises(UsageError, match=rf"steps\.csv line 5001, column {column}: '{text}'"):
        read_run(tmp_path / "r")


def test_lines_are_counted_through_multi_line_cells() -> None:
    text = EVENTS.header + EVENTS.lines([Event(0, 1, "k", None, "a\nb\nc")]) + "1,x,k,,d\n"
    with pytest.raises(UsageError, match="line 5, column end_ns"):
        read_rows(text, EVENTS, "events.csv")


def test_a_short_row_is_named() -> None:
    with pytest.raises(UsageError, match="line 2 has 1 cells, not 5"):
        read_rows(EVENTS.header + "1\n", EVENTS, "events.csv")


def test_a_missing_column_is_none_if_it_may_be_and_a_sentence_if_not() -> None:
    with pytest.raises(UsageError, match="line 1 has no column detail"):
        read_rows("begin_ns,end_ns,kind\n", EVENTS, "events.csv")
    rows, _ = read_rows("kind,detail,begin_ns,end_ns,extra\ngc,d,1,2,9\n", EVENTS, "f")
    assert rows == [Event(1, 2, "gc", None, "d")]


@pytest.mark.parametrize("name", ["run.json", "steps.csv", "requests.csv", "parts.csv"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    (a_run(tmp_path / "r") / name).unlink()
    with pytest.raises(UsageError, match=rf"{name} is missing"):
        read_run(tmp_path / "r")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_garbage_for_run_json_is_a_sentence(tmp_path: Path, content: bytes) -> None:
    (a_run(tmp_path / "r") / "run.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"run\.json"):
        read_run(tmp_path / "r")


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    a_run(tmp_path / "r", recorder={"a": float("nan"), "b": [float("inf"), 1.5]})
    assert read_run(tmp_path / "r").meta.recorder == {"a": None, "b": [None, 1.5]}


# ---------------------------------------------------------------- create


def test_create_refuses_a_directory_in_use(tmp_path: Path) -> None:
    a_run(tmp_path / "r")
    with pytest.raises(UsageError, match="--force or another -o"):
        RunWriter.create(tmp_path / "r", a_meta(), force=False)
    assert len(read_run(tmp_path / "r").steps) == 3


def test_force_replaces_only_the_files_of_the_run(tmp_path: Path) -> None:
    (a_run(tmp_path / "r") / "notes.txt").write_text("mine")
    RunWriter.create(tmp_path / "r", a_meta(label="new"), force=True).close()
    run = read_run(tmp_path / "r")
    assert (run.meta.label, run.steps) == ("new", [])
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["notes.txt", "steps.csv", "run.json"])
def test_force_leaves_other_directories_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"precious": 1}')
    with pytest.raises(UsageError, match="another -o"):
        RunWriter.create(tmp_path, a_meta(), force=True)
    assert [p.name for p in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == '{"precious": 1}'


def test_create_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(UsageError, match="is a file"):
        RunWriter.create(tmp_path / "f", a_meta(), force=True)


def _refuse(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("at", ["os.replace", "io.FileIO"])
def test_a_run_that_cannot_be_begun_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(at, _refuse)
    for directory in (tmp_path / "a" / "b" / "r", tmp_path / "empty"):
        with pytest.raises(StepscopeError, match="No space left on device"):
            RunWriter.create(directory, a_meta())
    assert [p.name for p in tmp_path.rglob("*")] == ["empty"]


def test_a_replaced_run_that_cannot_be_begun_leaves_what_is_not_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (a_run(tmp_path / "r") / "notes.txt").write_text("mine")
    monkeypatch.setattr(io, "FileIO", _refuse)
    with pytest.raises(StepscopeError, match="No space left on device"):
        RunWriter.create(tmp_path / "r", a_meta(), force=True)
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"
    monkeypatch.undo()
    RunWriter.create(tmp_path / "r", a_meta(), force=True).close()  # it can be tried again


# ---------------------------------------------------------------- a disk that refuses


class FullDisk(io.FileIO):
    """Takes at most 200 bytes at a time and is full some way into the second flush."""

    def write(self, data: Any) -> int:
        if self.tell() > len(STEPS.header) + 400:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data)[:200])


def test_a_full_disk_says_what_is_kept_and_leaves_no_torn_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io, "FileIO", FullDisk)
    writer = RunWriter.create(tmp_path / "r", a_meta())
    writer.append([a_step(0)])
    with pytest.raises(StepscopeError, match=r"No space left on device.*1 step .*kept"):
        writer.append([a_step(i) for i in range(1, 100)])
    writer.close()
    run = read_run(tmp_path / "r")
    assert run.steps == [a_step(0)]
    assert run.meta.notes == []


def test_a_failed_replacement_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = RunWriter.create(tmp_path / "r", a_meta())
    writer.requests([RequestRecord(0, 0, 8)])

    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StepscopeError, match="Permission denied"):
        writer.requests([RequestRecord(0, 0, 8), RequestRecord(1, 0, 8)])
    assert len(read_run(tmp_path / "r").requests) == 1
    assert not list((tmp_path / "r").glob(".*"))


# ---------------------------------------------------------------- finding


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for i, name in enumerate(["2026a-quick", "2026b-quick", "2025-late"]):
        a_run(tmp_path / name, run_id=name, created_utc=f"2026-01-0{i + 1}T00:00:00Z")
    a_run(tmp_path / "pair" / "fcfs", run_id="paired", created_utc="2020-01-01T00:00:00Z")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    (tmp_path / "unrelated").mkdir()
    return tmp_path


def test_runs_are_listed_oldest_first_and_broken_ones_with_a_reason(root: Path) -> None:
    reasons: list[str] = []
    runs = list_runs(root, reasons.append)
    assert [m.run_id for _, m in runs] == ["paired", "2026a-quick", "2026b-quick", "2025-late"]
    assert len(reasons) == 1
    assert "broken" in reasons[0]


def test_a_run_is_found_by_path_prefix_or_last(root: Path) -> None:
    assert find_run(str(root / "2026a-quick"), root) == root / "2026a-quick"
    assert find_run("2026b", root) == root / "2026b-quick"
    assert find_run("last", root) == root / "2025-late"
    assert find_run("paired", root) == root / "pair" / "fcfs"


def test_last_is_the_latest_wherever_it_was_written(root: Path, tmp_path_factory: Any) -> None:
    outside = tmp_path_factory.mktemp("elsewhere") / "mine"
    a_run(outside, run_id="mine", created_utc="2026-01-09T00:00:00Z")
    remember_run(outside, root)
    assert find_run("last", root) == outside
    a_run(root / "newest", run_id="newest", created_utc="2026-02-01T00:00:00Z")
    remember_run(root / "newest", root)
    assert find_run("last", root) == root / "newest"
    remember_run(outside, root)  # recorded earlier, only told about later
    assert find_run("last", root) == root / "newest"
    shutil.rmtree(root / "newest")
    assert find_run("last", root) == outside
    shutil.rmtree(outside)
    assert find_run("last", root) == root / "2025-late"


def test_last_needs_no_runs_in_the_usual_place(tmp_path: Path) -> None:
    a_run(tmp_path / "mine", run_id="mine")
    remember_run(tmp_path / "mine", tmp_path / "runs")
    assert find_run("last", tmp_path / "runs") == tmp_path / "mine"
    assert list_runs(tmp_path / "runs") == []
    (tmp_path / "runs" / ".last").write_bytes(b"\xff\x00nonsense")
    with pytest.raises(UsageError, match="holds no runs"):
        find_run("last", tmp_path / "runs")


def test_where_no_run_can_be_remembered_nothing_happens(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("a file")
    a_run(tmp_path / "mine", run_id="mine")
    remember_run(tmp_path / "mine", tmp_path / "runs")
    assert (tmp_path / "runs").read_text() == "a file"


def test_an_exact_id_wins_over_a_longer_one(root: Path) -> None:
    a_run(root / "2026a", run_id="2026a")
    assert find_run("2026a", root) == root / "2026a"


@pytest.mark.parametrize(
    ("ref", "sentence"),
    [
        ("2026", "could be 2026a-quick and 2026b-quick"),
        ("nothing", "no run 'nothing'"),
        ("", "no run ''"),
    ],
)
def test_a_run_that_cannot_be_found_is_a_sentence(root: Path, ref: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        find_run(ref, root)


def test_a_directory_without_a_run_is_said_to_be_one(root: Path) -> None:
    with pytest.raises(UsageError, match=r"without run\.json"):
        find_run(str(root / "unrelated"), root)


def test_no_runs_at_all(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no runs"):
        find_run("last", tmp_path / "nowhere")


def test_run_ids_are_safe_file_names_and_differ() -> None:
    first, second = (new_run_id("../Über x", "chunked,chunk=64") for _ in range(2))
    assert first != second
    assert set(first) <= set("abcdefghijklmnopqrstuvwxyz0123456789-TZ")
    assert "-chunked-chunk-64-" in first
