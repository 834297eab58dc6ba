"""Commands are called in this process: what they print, and the exit code they end with."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stepscope.cli.app import run_app

TINY = """
name = "tiny"
description = "A few requests on a model that takes no time."
[model]
name = "dummy:llama"
dtype = "fp32"
layers = 2
hidden = 64
heads = 2
kv_heads = 1
head_dim = 32
intermediate = 128
vocab = 256
max_context = 256
[engine]
policy = "chunked"
kv_tokens = 1024
max_seqs = 4
token_budget = 64
threads = 1
products = "plain"
[sampling]
max_tokens = 24
ignore_eos = true
[workload]
requests = 4
arrivals = "uniform"
rate_per_s = 50
prompt_tokens = 16
output_tokens = 24
"""


@dataclass
class Result:
    code: int
    out: str
    err: str


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.fixture
def stepscope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def call(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["stepscope", *map(str, arguments)])
        capsys.readouterr()
        code: object = 0
        try:
            run_app()
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return Result(code if isinstance(code, int) else int(bool(code)), *captured)

    return call
