"""The kernels. Their cases (paged_cases.py, fp8_cases.py, paged_compiled.py) run in processes of
their own, with an environment that nothing else may see, set before triton is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from stepscope.errors import UsageError
from stepscope.models.backends import choose_attention
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import small_decoder

HERE = Path(__file__).parent
no_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="triton is not installed (it is there for Linux only)"
)


def run_cases(file: str, least: int, **environment: str) -> None:
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file)],
        env={**os.environ, **environment},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-2000:]
    passed = re.search(r"(\d+) passed", found.stdout)
    assert passed and int(passed[1]) >= least, found.stdout[-500:]


@no_triton
def test_cases_in_the_interpreter() -> None:
    run_cases("paged_cases.py", 31, TRITON_INTERPRET="1")


@no_triton
def test_rows_to_fp8_in_the_interpreter() -> None:
    run_cases("fp8_cases.py", 13, TRITON_INTERPRET="1")


@no_triton
def test_it_compiles_for_gpus(tmp_path: Path) -> None:
    run_cases("paged_compiled.py", 7, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


@no_triton
@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_cases_as_compiled_kernels() -> None:
    run_cases("paged_cases.py", 29, TRITON_INTERPRET="0")


# ------------------------------------------------------------------ which backend


def test_auto_is_what_the_device_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepscope.models.backends.find_spec", lambda name: object())
    assert choose_attention("auto", "cpu") == "gather"
    assert choose_attention("auto", "cuda") == "paged"
    assert choose_attention("gather", "cuda") == "gather"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose_attention("auto", "cpu") == "gather"
    assert choose_attention("paged", "cpu") == "paged"


def test_where_paged_cannot_run_one_sentence_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UsageError, match="does not run on cpu; use --attention gather"):
        TorchRunner(small_decoder(), 4, 16, "paged")
    monkeypatch.setattr("stepscope.models.backends.find_spec", lambda name: None)
    for name in ("auto", "paged"):
        with pytest.raises(UsageError, match=r"pip install 'stepscope\[triton\]'"):
            choose_attention(name, "cuda")
