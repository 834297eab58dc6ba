"""fp16: ten bits of fraction where bf16 has seven, and less range. Slow on a CPU, but right."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepscope.errors import UsageError
from stepscope.models.linear import Linear, choose_products
from stepscope.models.load import load_model
from stepscope.runner.job import build_decoder
from stepscope.runner.torch_runner import TorchRunner
from stepscope.spec import compute_dtype
from tests.engine.families import FAMILIES, Family, make
from tests.engine.harness import Observed, ask, run

TRIED = [f for f in FAMILIES if f.name.startswith(("SmolLM2", "Gemma 2", "Mixtral"))]


@pytest.fixture(scope="module", params=TRIED, ids=str)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family: Family = request.param
    path: Path = tmp_path_factory.mktemp("family")
    make(family, path)
    return path


def logits(folder: Path, dtype: str, kv_dtype: str = "auto") -> torch.Tensor:
    """float32 (tokens, vocab) of a prefill in chunks and then the decodes of given tokens."""
    decoder = build_decoder(load_model(str(folder), dtype), "auto", kv_dtype)
    runner = Observed(TorchRunner(decoder, 32, 8), keep_logits=True)
    done = run([ask(0, 21, 8, ignore_eos=True)], pages=32, page_size=8, runner=runner)
    assert done.complete
    return torch.stack(runner.logits[0]).float()


def test_nearer_to_fp32_than_bf16(folder: Path) -> None:
    """The first token's logits, before texts may part."""
    exact, half, brain = (logits(folder, dtype)[0] for dtype in ("fp32", "fp16", "bf16"))
    error = (half - exact).abs().max()
    assert error < 0.03 * exact.abs().max()
    assert error < (brain - exact).abs().max()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_kv_in_fp16(folder: Path, dtype: str) -> None:
    exact, stored = logits(folder, dtype)[0], logits(folder, dtype, "fp16")[0]
    assert not torch.equal(exact, stored) or dtype == "bf16"
    assert (exact - stored).abs().max() < 0.03 * exact.abs().max()


def test_what_is_counted() -> None:
    model = load_model("dummy:llama", "fp16")
    spec = model.spec
    assert (spec.dtype, spec.kv_dtype, compute_dtype("fp16")) == ("fp16", "fp16", "fp16")
    assert {w.dtype for w in model.weights.values()} == {torch.float16}
    assert spec.weight_bytes == load_model("dummy:llama", "bf16").spec.weight_bytes
    assert replace(spec, kv_dtype="fp32").kv_bytes_per_token == 2 * spec.kv_bytes_per_token


def test_the_product_is_torch_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.ones(16, 32).half()
    assert choose_products([weight]) == "plain"
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    with pytest.raises(UsageError, match="which this one lacks; choose auto or plain"):
        Linear(weight, "onednn")
