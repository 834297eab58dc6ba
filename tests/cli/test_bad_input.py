"""Bad input is answered with one sentence and the right exit code, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.runner.torch_runner import Batch, TorchRunner
from stepscope.store import read_run
from tests.cli.conftest import TINY, Result

Call = Callable[..., Result]
MAIN = [sys.executable, "-c", "from stepscope.cli import main; main()"]


def refused(result: Result, *words: str, code: int = 2) -> None:
    assert result.code == code, (result.code, result.err)
    lines = result.err.strip().splitlines()
    assert "Traceback" not in result.err
    assert lines[-1].startswith("stepscope: ") or "Error" in result.err or "Usage" in result.err
    for word in words:
        assert word in result.err, result.err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("max_seqs = 4", "max_sequences = 4"), ("max_sequences", "max_seqs")),
        (("rate_per_s = 50", "rate_per_s = -1"), ("rate_per_s",)),
        (("rate_per_s = 50", "rate_per_s = nan"), ("rate_per_s",)),
        (("requests = 4", "requests = 0"), ("requests",)),
        (('policy = "chunked"', 'policy = "chunkd"'), ("chunkd", "chunked")),
        (('policy = "chunked"', 'policy = "chunked,chunk=0"'), ("chunk=0",)),
        (("page_size", "page_size = 16\npage_size"), ("TOML",)),
        (('name = "dummy:llama"', 'name = "dummy:nothing"'), ("nothing",)),
        (('dtype = "fp32"', 'dtype = "fp17"'), ("fp17",)),
        (("heads = 2\nkv_heads = 1", "heads = 3\nkv_heads = 2"), ("kv_heads",)),
    ],
)
def test_a_scenario_with_a_mistake(
    stepscope: Call, tiny: Path, change: tuple[str, str], words: tuple[str, ...]
) -> None:
    text = TINY.replace(*change)
    if change[0] == "page_size":
        text = TINY.replace("kv_tokens = 1024", "kv_tokens = 1024\nkv_tokens = 1024")
    assert text != TINY
    tiny.write_text(text)
    refused(stepscope("run", tiny, "--no-ceilings"), *words)
    assert not Path("runs").exists()


def test_an_unknown_scenario(stepscope: Call) -> None:
    refused(stepscope("run", "quickstrat"), "quickstart")


def test_an_unknown_model(stepscope: Call) -> None:
    refused(stepscope("run", "--prompt", "hi", "--model", "smollm3"), "smollm3", "smollm2-135m")


def test_neither_scenario_nor_prompt(stepscope: Call) -> None:
    refused(stepscope("run"), "--prompt")
    refused(stepscope("run", "--prompt", ""), "empty")


def test_a_missing_and_a_truncated_gguf(stepscope: Call, tmp_path: Path) -> None:
    missing = stepscope("run", "--prompt", "hi", "--model", tmp_path / "none.gguf")
    refused(missing, "none.gguf")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF\x03\x00\x00\x00" + b"\x01" * 40)
    result = stepscope("run", "--prompt", "hi", "--model", broken)
    assert result.code in (1, 2)
    assert "broken.gguf" in result.err and "Traceback" not in result.err


def test_a_run_directory_that_exists_is_kept(stepscope: Call, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert stepscope("run", tiny, "-o", out, "--no-ceilings").code == 0
    before = (out / "steps.csv").read_text()
    refused(stepscope("run", tiny, "-o", out, "--no-ceilings"), "--force")
    assert (out / "steps.csv").read_text() == before
    assert stepscope("run", tiny, "-o", out, "--no-ceilings", "--force").code == 0


def test_force_never_touches_what_is_not_a_run(stepscope: Call, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "thesis.txt").write_text("years of work")
    refused(stepscope("run", tiny, "-o", out, "--no-ceilings", "--force"))
    assert (out / "thesis.txt").read_text() == "years of work"


def test_a_request_that_cannot_run_fails_alone(stepscope: Call, tiny: Path) -> None:
    tiny.write_text(
        TINY
        + """
[[request]]
prompt_tokens = 300
max_tokens = 4
[[request]]
prompt = "this model has no tokenizer"
max_tokens = 4
"""
    )
    result = stepscope("run", tiny, "--json", "--no-ceilings")
    assert result.code == 0, result.err
    run = json.loads(result.out)["runs"][0]
    assert run["finish_reasons"] == {"length": 4, "error": 2}
    errors = [text for _, text in run["failures"]]
    assert any("context" in text for text in errors)
    assert any("tokenizer" in text for text in errors)


def test_a_single_request_that_runs_out_of_pages(stepscope: Call, tiny: Path) -> None:
    text = TINY.replace("kv_tokens = 1024", "kv_tokens = 32").replace(
        "requests = 4", "requests = 2"
    )
    tiny.write_text(text)
    result = stepscope("run", tiny, "--json", "--no-ceilings")
    assert result.code == 0, result.err
    run = json.loads(result.out)["runs"][0]
    assert run["finish_reasons"] == {"error": 2}
    assert all("KV pages" in text for _, text in run["failures"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_saved_and_readable(
    tmp_path: Path, tiny: Path, number: signal.Signals
) -> None:
    tiny.write_text(
        TINY.replace("max_context = 256", "max_context = 100000")
        .replace("kv_tokens = 1024", "kv_tokens = 200000")
        .replace("output_tokens = 24", "output_tokens = 40000")
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*MAIN, "run", str(tiny), "-o", str(out), "--no-ceilings"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        steps = out / "steps.csv"
        if steps.exists() and len(steps.read_text().splitlines()) > 30:
            break
        time.sleep(0.1)
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "INCOMPLETE" in stdout
    run = read_run(out)
    assert not run.meta.complete
    assert len(run.steps) > 30
    assert {r.finish_reason for r in run.requests} == {"aborted"}


def test_a_killed_run_is_readable(tmp_path: Path, tiny: Path) -> None:
    tiny.write_text(
        TINY.replace("max_context = 256", "max_context = 100000")
        .replace("kv_tokens = 1024", "kv_tokens = 200000")
        .replace("output_tokens = 24", "output_tokens = 40000")
    )
    out = tmp_path / "out"
    process = subprocess.Popen(
        [*MAIN, "run", str(tiny), "-o", str(out), "--no-ceilings"],
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        steps = out / "steps.csv"
        if steps.exists() and len(steps.read_text().splitlines()) > 30:
            break
        time.sleep(0.1)
    process.kill()
    process.wait(timeout=30)
    run = read_run(out)
    assert not run.meta.complete
    assert len(run.steps) > 20
    assert len(run.requests) == 4
    told = sum(r.output_tokens for r in run.requests)
    parts = sum(p.output_tokens for p in run.parts)
    assert 20 < told <= parts  # parts are written before requests in each flush


def test_a_damaged_run_is_refused_with_a_sentence(
    stepscope: Call, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert stepscope("run", tiny, "-o", out, "--no-ceilings").code == 0
    document = json.loads((out / "run.json").read_text())
    (out / "run.json").write_text(json.dumps({**document, "schema_version": 99}))
    refused(stepscope("show", out), "99")
    (out / "run.json").write_text("{")
    refused(stepscope("show", out), "run.json")


def test_no_run_at_all(stepscope: Call) -> None:
    refused(stepscope("show", "last"))
    refused(stepscope("nonsense"), "nonsense")


def test_a_cuda_device_is_refused(stepscope: Call, tiny: Path) -> None:
    refused(stepscope("run", tiny, "--device", "cuda"), "CUDA", code=4)
    refused(stepscope("run", tiny, "--device", "tpu"), "tpu")


def test_a_cache_that_does_not_fit_in_memory(stepscope: Call, tiny: Path) -> None:
    result = stepscope(
        "run", tiny, "--no-ceilings", "--set", "engine.kv_tokens=1000000000",
        "--set", "model.layers=40",
    )  # fmt: skip
    refused(result, "memory", "kv_tokens", code=1)
    assert not Path("runs").exists()


def test_policies_that_would_share_a_directory(stepscope: Call, tiny: Path) -> None:
    policies = ["--policy", "chunked,chunk=64", "--policy", "chunked,  chunk=64"]
    refused(stepscope("run", tiny, "--no-ceilings", *policies), "share a directory")


def test_a_misspelt_gate_costs_no_run(stepscope: Call, tiny: Path) -> None:
    refused(stepscope("run", tiny, "--fail-on", "p99_itl>1"), "p99_itl_ms")
    assert not Path("runs").exists()


def test_a_prompt_for_a_model_without_a_chat_template_fails_alone() -> None:
    from stepscope.errors import UsageError
    from stepscope.runner.replay import Replay
    from stepscope.workload import RequestSpec

    class NoTemplate:
        def encode(self, text: str) -> list[int]:
            return [1, 2, 3]

        def chat(self, text: str) -> list[int]:
            raise UsageError("This model has no chat template; send the prompt as raw text.")

    specs = [
        RequestSpec(0, 0, "hello", None, 4, chat=True),
        RequestSpec(1, 0, "hello", None, 4, chat=False),
    ]
    first, second = Replay(specs, NoTemplate(), 10).poll(0)  # type: ignore[arg-type]
    assert "workload.chat=false" in (first.record.error or "")
    assert second.record.error is None and second.tokens == [1, 2, 3]


@pytest.mark.parametrize("overlap", ["--overlap", "--no-overlap"])
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["python", "cuda", "cpu"],
)
def test_a_step_without_memory_ends_in_a_sentence(
    stepscope: Call, tiny: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, overlap: str
) -> None:
    sample = TorchRunner.sample

    def greedy(self: TorchRunner, logits: torch.Tensor, batch: Batch) -> Any:
        if len(batch.plan.decodes) >= 2:  # no warm-up has so many
            raise error
        return sample(self, logits, batch)

    monkeypatch.setattr(TorchRunner, "sample", greedy)
    burst = ("--set", "workload.arrivals=burst")
    done = stepscope("run", tiny, "-o", "out", "--no-ceilings", overlap, *burst)
    assert done.code == 1
    assert done.err.endswith(
        "stepscope: There was not enough memory for a step; lower engine.token_budget,"
        " engine.max_seqs or engine.kv_tokens.\n"
    )
    assert stepscope("show", "out").code == 0, "what was recorded is kept"
