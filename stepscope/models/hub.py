"""Models on the Hugging Face hub, by id: only the needed files come into the hub's own cache.

`org/name` or `org/name/file.gguf`, where wanted with `@revision` after it and `hf:` before it. What
came is read by the loaders of directories and GGUF files. huggingface_hub is an optional extra.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.hf_config import spec_from_config
from stepscope.models.hf_dir import INDEX, shards_of, weight_names
from stepscope.models.hf_tokenizer import TEMPLATE_FILE, json_object
from stepscope.models.hub_errors import (
    HUB_PREFIX,
    HubId,
    explained,
    hub_cache,
    no_answer,
    reason,
)
from stepscope.text import listing, plural, size

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo, RepoSibling

CONFIG = "config.json"
SMALL_FILES = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *(TEMPLATE_FILE, INDEX),
)
# No `..` anywhere in it: neither a repository nor git knows such a name.
HUB_ID = re.compile(
    r"(?!.*\.\.)"
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[\w./-]+))?",
    re.ASCII,
)
LISTING_TIMEOUT_S = 20.0
POLL_S = 0.2

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubCopy:
    """The files on this disk: a directory, or the .gguf file that was asked for."""

    path: Path
    source: str  # id and commit
    notes: tuple[str, ...] = ()


def hub_id(name: str) -> HubId | None:
    """The id that a name stands for; None if it looks like a path or like a catalogue's name."""
    told = name.startswith(HUB_PREFIX)
    match = HUB_ID.fullmatch(name.removeprefix(HUB_PREFIX))
    if match is None or (match["repo"].endswith(".gguf") and not told):
        return None
    return HubId(match["repo"], match["file"], match["revision"])


def fetch_hub(wanted: HubId, progress: Say | None = None, told: Say | None = None) -> HubCopy:
    """Bring the model's files into the cache; without the hub, take them from there.

    progress: often, how far it is; told: once, that a download begins.
    Raises UsageError for what the hub does not have or the decoder cannot run, StepscopeError for
    everything that goes wrong on the way.
    """
    _require_library(wanted)
    _quieten()
    with explained(wanted):
        info = _listed(wanted)
        if isinstance(info, str):
            return _from_cache(wanted, info)
        return _Download(wanted, info, progress, told).run()


def _require_library(wanted: HubId) -> None:
    try:
        import huggingface_hub  # noqa: F401
    except ImportError:
        raise UsageError(
            f"There is no model file or directory {wanted}, and reading it from the Hugging Face"
            " hub needs a package that is not installed; run pip install 'stepscope[hub]', or"
            " check the path."
        ) from None


def _quieten() -> None:
    """Its bars and its warnings of retries would come between our own lines."""
    utils: Any = importlib.import_module("huggingface_hub.utils")
    utils.disable_progress_bars()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)


def _listed(wanted: HubId) -> ModelInfo | str:
    """What the hub has under this id; in words, why it cannot be reached."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        return HfApi().model_info(
            wanted.repo, revision=wanted.revision, files_metadata=True, timeout=LISTING_TIMEOUT_S
        )
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except HfHubHTTPError as error:
        if error.response.status_code < 500:
            raise
        return f"it answers with status {error.response.status_code}"
    except no_answer() as error:
        return reason(error)


# ---------------------------------------------------------------- from the hub


class _Download:
    """The files of one id at one commit."""

    def __init__(
        self, wanted: HubId, info: ModelInfo, progress: Say | None, told: Say | None
    ) -> None:
        self.wanted = wanted
        self.commit = info.sha or ""
        self.files: dict[str, RepoSibling] = {f.rfilename: f for f in info.siblings or []}
        self._progress, self._told = progress, told

    def run(self) -> HubCopy:
        source = self.wanted.at(self.commit)
        if self.wanted.file is not None:
            return HubCopy(self._fetch([self.wanted.file])[0], source)
        self._check_has(CONFIG)
        folder = self._fetch([name for name in SMALL_FILES if name in self.files])[0].parent
        spec_from_config(folder, json_object(folder / CONFIG), None)  # before gigabytes come
        self._fetch(_weights(self.wanted, list(self.files), folder))
        return HubCopy(folder, source)

    def _fetch(self, names: Sequence[str]) -> list[Path]:
        """One file after the other, so that an interrupt ends it at once."""
        from huggingface_hub import hf_hub_download

        for name in names:
            self._check_has(name)
        missing = [self.files[name] for name in names if not self._is_cached(name)]
        total = sum(file.size or 0 for file in missing)
        self._check_space(total)
        if missing and self._told and any(file.rfilename not in SMALL_FILES for file in missing):
            self._told(f"fetching {plural(len(missing), 'file')} of {self.wanted}: {size(total)}")
        # The revision as given is what the cache can be asked for later, without the hub.
        revision = self.wanted.revision or "main"
        with self._watched(missing, total):
            paths = [
                Path(hf_hub_download(self.wanted.repo, name, revision=revision)) for name in names
            ]
        if any(_folder(p, n).name != self.commit for p, n in zip(paths, names, strict=True)):
            raise StepscopeError(f"{self.wanted} was changed on the hub meanwhile; run it again.")
        return paths

    def _is_cached(self, name: str) -> bool:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(self.wanted.repo, name, revision=self.commit)
        return isinstance(found, str)

    def _check_has(self, file: str) -> None:
        if file not in self.files:
            raise UsageError(
                f"{self.wanted.repo} has no {file}; {_choice(self.wanted.repo, self.files)}."
            )

    def _check_space(self, needed: int) -> None:
        cache = hub_cache()
        there = next(p for p in (cache, *cache.parents) if p.exists())
        free = shutil.disk_usage(there).free
        if needed > free:
            raise StepscopeError(
                f"{self.wanted} takes {size(needed)} and {size(free)} are free in {cache}; free"
                " some space or point HF_HOME to another disk."
            )

    @contextmanager
    def _watched(self, files: Sequence[RepoSibling], total: int) -> Iterator[None]:
        """Report the growing files, since the library only draws bars of its own."""
        if not files or self._progress is None:
            yield
            return
        blobs = hub_cache() / f"models--{self.wanted.repo.replace('/', '--')}" / "blobs"
        say, ended = self._progress, threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_S):
                done = min(sum(_arrived(blobs, file) for file in files), total)
                say(f"Fetching {self.wanted}: {size(done)} of {size(total)}")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _arrived(blobs: Path, file: RepoSibling) -> int:
    """Bytes of a file under its hash, whole or still incomplete under a longer name."""
    name = file.lfs.sha256 if file.lfs is not None else file.blob_id
    sizes = [0]
    for path in blobs.glob(f"{name}*") if name else ():
        try:
            sizes.append(os.stat(path).st_size)
        except FileNotFoundError:
            continue  # renamed between the listing and the look
    return max(sizes)


def _folder(path: Path, name: str) -> Path:
    """The snapshot of a commit that holds the file of this name."""
    return path.parents[len(PurePosixPath(name).parts) - 1]


def _weights(wanted: HubId, names: Sequence[str], folder: Path) -> list[str]:
    found = weight_names(names)
    if not found:
        raise UsageError(
            f"{wanted.repo} holds no .safetensors files, and no other weights are read;"
            f" {_choice(wanted.repo, names)}."
        )
    return shards_of(folder) if found == [INDEX] else found


def _choice(repo: str, names: Any) -> str:
    ggufs = sorted(name for name in names if name.endswith(".gguf"))
    if not ggufs:
        return "choose a model in safetensors or GGUF"
    return f"give one of its GGUF files, {listing([f'{repo}/{name}' for name in ggufs], 3)}"


# ---------------------------------------------------------------- without the hub


def _from_cache(wanted: HubId, why: str) -> HubCopy:
    from huggingface_hub import try_to_load_from_cache

    name = wanted.file or CONFIG
    found = try_to_load_from_cache(wanted.repo, name, revision=wanted.revision or "main")
    if not isinstance(found, str):
        raise StepscopeError(
            f"There is no directory {wanted}, the hub cannot be reached ({why}) and its cache has"
            " no such model; check the spelling or the network, or give the path of a model."
        )
    folder = _folder(Path(found), name)
    if wanted.file is None:
        there = [path.name for path in folder.iterdir()]
        if not set(weight_names(there)) or not set(_weights(wanted, there, folder)) <= set(there):
            raise StepscopeError(
                f"{wanted} is only partly in the cache and the hub cannot be reached ({why});"
                " run it once with a network."
            )
    note = f"{wanted} as it is in the cache, commit {folder.name[:12]}: the hub was not asked"
    path = folder if wanted.file is None else Path(found)
    return HubCopy(path, wanted.at(folder.name), (f"{note} ({why}).",))
