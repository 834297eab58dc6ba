"""Models by their hub id: the hub's own library against a server on this machine."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import hub as hub_module
from stepscope.models.hub import fetch_hub, hub_id
from stepscope.models.hub_errors import HubId
from stepscope.models.load import load_model
from tests import tiny_llama as tiny
from tests.engine.families import FAMILIES, make
from tests.hub_server import COMMIT, Hub, serving

ID = "org/tiny"
TINY_RUN = """
name = "tiny"
description = "Two requests."
[model]
name = "org/tiny"
[engine]
kv_tokens = 256
threads = 1
products = "plain"
[workload]
requests = 2
arrivals = "burst"
prompt_tokens = 4
output_tokens = 4
"""


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with one model in safetensors; its cache is empty and nothing else is reachable."""
    from huggingface_hub import constants

    made = Hub()
    made.add(ID, tiny.write_hf(tmp_path / "made", tiny.hf_weights()))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    with serving(made):
        point_to(made.url, monkeypatch)
        yield made


def point_to(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def unplug(monkeypatch: pytest.MonkeyPatch) -> None:
    point_to("http://127.0.0.1:1", monkeypatch)  # a port where nobody listens


def files_asked(hub: Hub) -> set[str]:
    return {line.rsplit("/", 1)[1] for line in hub.asked if line.startswith(f"GET {ID}/resolve")}


# ------------------------------------------------------------------ what is an id


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", HubId("org/name")),
        ("hf:org/name", HubId("org/name")),
        ("Qwen/Qwen2.5-0.5B@main", HubId("Qwen/Qwen2.5-0.5B", None, "main")),
        ("org/name@refs/pr/3", HubId("org/name", None, "refs/pr/3")),
        ("org/name/q/a.gguf", HubId("org/name", "q/a.gguf")),
        ("org/name/a.gguf@v1", HubId("org/name", "a.gguf", "v1")),
        ("hf:org/name.gguf", HubId("org/name.gguf")),
        *((path, None) for path in ("models/a.gguf", "./org/name", "/org/name", "../a/b", "~/a/b")),
        *((path, None) for path in ("smollm2-135m", "dummy:llama", "a/b/c", "org/", "org/name@")),
        *((path, None) for path in ("org/name/../../a.gguf", "hf:org/name@../../x", "org/na..me")),
    ],
)
def test_what_is_an_id(name: str, expected: HubId | None) -> None:
    assert hub_id(name) == expected


def test_a_directory_of_that_name_stays_a_directory(hub: Hub, tmp_path: Path) -> None:
    tiny.write_hf(tmp_path / "org" / "tiny", tiny.hf_weights())
    assert load_model(ID, "fp32").spec.source == ""
    assert hub.asked == []
    assert load_model(f"hf:{ID}", "fp32").spec.source == f"hf:{ID}@{COMMIT}"


# ------------------------------------------------------------------ what comes


def test_the_weights_are_those_of_the_directory(hub: Hub, tmp_path: Path) -> None:
    ours, theirs = load_model(ID, "fp32"), load_model(str(tmp_path / "made"), "fp32")
    assert ours.spec.name == ID and ours.spec.source == f"hf:{ID}@{COMMIT}" and ours.notes == ()
    assert ours.weights.keys() == theirs.weights.keys()
    assert all(torch.equal(w, theirs.weights[n]) for n, w in ours.weights.items())
    again = load_model(ours.spec.source, "fp32")
    assert again.spec == ours.spec, "the recorded source can be given as the model"


def test_only_what_is_needed_is_fetched_and_only_once(hub: Hub) -> None:
    others = ("pytorch_model.bin", "consolidated.safetensors", "original/model.safetensors", "a.md")
    hub.repos[ID] |= dict.fromkeys(others, b"gigabytes of something else")
    said: list[str] = []
    load_model(ID, "fp32", told=said.append)
    assert files_asked(hub) == {"config.json", "model.safetensors"}
    assert said == [f"fetching 1 file of {ID}: {said[0].rsplit(': ')[1]}"]
    hub.asked.clear()
    load_model(ID, "fp32", told=said.append)
    assert files_asked(hub) == set() and len(said) == 1


def test_shards_are_those_of_the_index(hub: Hub) -> None:
    weights = hub.repos[ID].pop("model.safetensors")
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}
    hub.repos[ID] |= {
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-00001-of-00001.safetensors": weights,
        "other.safetensors": b"not named",
    }
    load_model(ID, "fp32")
    assert "model-00001-of-00001.safetensors" in files_asked(hub)
    assert "other.safetensors" not in files_asked(hub)


def test_what_transformers_saved(hub: Hub, tmp_path: Path) -> None:
    """In shards, with a tokenizer and a chat template: all of it arrives."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path / "saved"
    theirs = make(FAMILIES[0], tmp_path / "whole")
    theirs.save_pretrained(folder, max_shard_size="50KB")
    vocab = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:99])}
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    tokenizer.chat_template = "{{ messages[0]['content'] }}!"
    tokenizer.save_pretrained(folder)
    hub.add("org/saved", folder)
    model = load_model("org/saved", "fp32")
    whole = load_model(str(tmp_path / "whole"), "fp32")
    assert len([f for f in hub.repos["org/saved"] if f.endswith(".safetensors")]) > 3
    assert all(torch.equal(w, whole.weights[n]) for n, w in model.weights.items())
    assert model.tokenizer is not None
    assert model.tokenizer.chat("aB") == theirs_ids(tokenizer)


def theirs_ids(tokenizer: Any) -> list[int]:
    message = [{"role": "user", "content": "aB"}]
    ids: list[int] = tokenizer.apply_chat_template(message, return_dict=False)
    return ids


def test_a_gguf_file_by_its_name(hub: Hub, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "q8.gguf", tiny.gguf_weights(tiny.hf_weights()))
    hub.repos["org/ggufs"] = {"sub/q8.gguf": path.read_bytes(), "q4.gguf": b"another"}
    model = load_model("org/ggufs/sub/q8.gguf", "fp32")
    assert model.spec.name == "q8"
    assert model.spec.source == f"hf:org/ggufs/sub/q8.gguf@{COMMIT}"
    assert not any("q4.gguf" in line for line in hub.asked)
    with pytest.raises(UsageError, match=r"no config.json; give one of .* org/ggufs/q4.gguf and"):
        load_model("org/ggufs", "fp32")
    with pytest.raises(UsageError, match=r"no q9.gguf; give one of .* org/ggufs/q4.gguf and"):
        load_model("org/ggufs/q9.gguf", "fp32")


def test_a_download_tells_how_far_it_is(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.models.hub.POLL_S", 0.001)
    hub.repos[ID]["model.safetensors"] += bytes(50_000_000)  # the loader is not asked here
    said: list[str] = []
    fetch_hub(HubId(ID), said.append)
    assert any(line.startswith(f"Fetching {ID}: ") and " of 50" in line for line in said)


def test_what_cannot_be_run_is_refused_before_its_weights_come(hub: Hub) -> None:
    config = json.loads(hub.repos[ID]["config.json"]) | {"model_type": "mamba"}
    hub.repos[ID]["config.json"] = json.dumps(config).encode()
    with pytest.raises(UsageError, match="model_type 'mamba'"):
        load_model(ID)
    assert files_asked(hub) == {"config.json"}


# ------------------------------------------------------------------ without the hub


def test_a_cached_copy_serves_without_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    online = load_model(ID, "fp32")
    unplug(monkeypatch)
    model = load_model(ID, "fp32")
    assert model.spec == online.spec
    assert "as it is in the cache, commit 0123456789ab" in model.notes[0]
    assert load_model(f"{ID}@{COMMIT}", "fp32").spec == online.spec


def test_a_hub_that_is_down_is_no_hub(hub: Hub) -> None:
    load_model(ID, "fp32")
    hub.refused[ID] = (503, "")
    assert "status 503" in load_model(ID, "fp32").notes[0]


def test_half_a_model_in_the_cache_is_none(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = hub.repos[ID].pop("model.safetensors")
    with pytest.raises(UsageError, match=r"holds no \.safetensors files"):
        load_model(ID)
    hub.repos[ID]["model.safetensors"] = weights
    unplug(monkeypatch)
    with pytest.raises(StepscopeError, match="only partly in the cache"):
        load_model(ID)


def test_without_hub_and_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    unplug(monkeypatch)
    with pytest.raises(StepscopeError, match="no directory org/tiny, the hub cannot be reached"):
        load_model(ID)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(StepscopeError, match="HF_HUB_OFFLINE is set"):
        load_model(ID)


# ------------------------------------------------------------------ what goes wrong


@pytest.mark.parametrize(
    ("status", "code", "says"),
    [
        (403, "GatedRepo", r"is gated; accept its terms at .*org/tiny and set HF_TOKEN"),
        (401, "RepoNotFound", r"no model org/tiny on the hub.*check the spelling"),
        (404, "RepoNotFound", r"no model org/tiny on the hub.*check the spelling"),
        (401, "", r"set HF_TOKEN"),
        (403, "", r"does not let you read org/tiny \(status 403\); set HF_TOKEN"),
        (429, "", r"status 429; try again later"),
    ],
)
def test_refusals(hub: Hub, status: int, code: str, says: str) -> None:
    hub.refused[ID] = (status, code)
    with pytest.raises(StepscopeError, match=says) as caught:
        load_model(ID)
    assert_sentence(caught.value)


def test_files_that_are_listed_but_not_given(hub: Hub) -> None:
    hub.gated = True
    with pytest.raises(StepscopeError, match=r"is gated; accept its terms at"):
        load_model(ID)


def test_an_index_that_names_what_is_not_there(hub: Hub) -> None:
    del hub.repos[ID]["model.safetensors"]
    index = {"weight_map": {"model.norm.weight": "gone.safetensors"}}
    hub.repos[ID]["model.safetensors.index.json"] = json.dumps(index).encode()
    with pytest.raises(UsageError, match=r"org/tiny has no gone\.safetensors; choose a model in"):
        load_model(ID)


def assert_sentence(error: StepscopeError) -> None:
    assert "\n" not in str(error) and str(error).endswith(".") and len(str(error)) < 300


def test_names_that_are_not_there(hub: Hub) -> None:
    for name, says in (
        ("org/none", "no model org/none on the hub"),
        (f"{ID}@v9", "has no revision v9"),
        ("org/a--b", "is no id that the hub can have"),
        ("hf:nonsense", "no model file or directory"),
    ):
        with pytest.raises(UsageError, match=says) as caught:
            load_model(name)
        assert_sentence(caught.value)


def test_a_connection_that_breaks(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the library's own tries
    hub.repos[ID]["model.safetensors"] += bytes(3_000_000)
    hub.cut_after = 2_000_000
    with pytest.raises(StepscopeError, match=r"broke off \(.*\); run it again") as caught:
        load_model(ID)
    assert_sentence(caught.value)
    hub.cut_after = None
    assert fetch_hub(HubId(ID)).path.name == COMMIT


def test_a_disk_too_small_is_told_in_advance(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage)
    with pytest.raises(StepscopeError, match=r"and 1.00 kB are free in .*cache; free some space"):
        load_model(ID)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_a_disk_that_refuses(hub: Hub, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def refuse(*args: Any, **more: Any) -> str:
        raise OSError(number, os.strerror(number), "somewhere")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    with pytest.raises(StepscopeError, match=rf"cannot be written \({os.strerror(number)}\); free"):
        load_model(ID)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"run pip install 'stepscope\[hub\]', or check the path"):
        load_model(ID)


def test_a_repository_that_changes_meanwhile(hub: Hub) -> None:
    hub.listed_commit = COMMIT[::-1]
    with pytest.raises(StepscopeError, match="was changed on the hub meanwhile; run it again"):
        load_model(ID)


# ------------------------------------------------------------------ the command


@pytest.mark.parametrize("model", [ID, f"{ID}@{COMMIT}"])
def test_a_run_records_the_commit(hub: Hub, tmp_path: Path, model: str) -> None:
    scenario, out = tmp_path / "tiny.toml", tmp_path / "run"
    scenario.write_text(TINY_RUN)
    command = ["run", scenario, "--model", model, "--no-ceilings", "-o", out]
    done = stepscope(hub, tmp_path, *command)
    assert done.returncode == 0, done.stderr
    assert f"fetching 1 file of {ID}: " in done.stderr
    recorded = json.loads((out / "run.json").read_text())["model"]
    assert (recorded["name"], recorded["source"]) == (ID, f"hf:{ID}@{COMMIT}")


def test_an_error_is_one_line(hub: Hub, tmp_path: Path) -> None:
    done = stepscope(hub, tmp_path, "run", "--prompt", "a", "--model", "org/none")
    assert done.returncode == 2
    assert done.stderr.startswith("stepscope: There is no directory org/none here and no model")
    assert done.stderr.count("\n") == 1


def test_models_fetch_takes_ids(hub: Hub, tmp_path: Path) -> None:
    done = stepscope(hub, tmp_path, "models", "fetch", ID)
    assert done.returncode == 0 and done.stdout.strip().endswith(COMMIT)
    assert done.stderr.endswith(f"next: stepscope run scenarios/quickstart.toml --model {ID}\n")


def stepscope(hub: Hub, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with the library told by its own variables."""
    code = "from stepscope.cli import main; main()"
    env = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home")}
    env["PYTHONPATH"] = str(Path(hub_module.__file__).parents[2])  # not what is installed
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder, check=False)


def test_a_damaged_cache_is_told_in_a_sentence(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = tmp_path / "cache" / f"models--{ID.replace('/', '--')}" / "refs" / "main"
    reference.parent.mkdir(parents=True)
    reference.write_bytes(b"\xff\xfe")
    unplug(monkeypatch)
    with pytest.raises(StepscopeError, match="damaged; delete its folder models--org--tiny"):
        load_model(ID, "fp32")
