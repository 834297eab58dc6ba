"""A Llama that transformers made and saved, run by both: equal logits, equal text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.scheduler import Limits
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import ask, products_here, run, same_text

NEAR = 1e-3
NEW_TOKENS = 64
LENGTHS = [1, 5, 17, 40, 64, 33]


@dataclass(frozen=True)
class Family:
    """One shape of the Llama family."""

    name: str
    config: dict[str, Any]

    def __str__(self) -> str:
        return self.name


COMMON: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
GQA = {"num_attention_heads": 6, "num_key_value_heads": 2}
FAMILIES = [
    Family("llama, grouped heads, own head", {**GQA, "tie_word_embeddings": False}),
    Family("llama, grouped heads, tied", {**GQA, "tie_word_embeddings": True}),
    Family(
        "llama, one head each, wide theta",
        {"num_attention_heads": 4, "num_key_value_heads": 4, "rope_theta": 5e5},
    ),
    Family(
        "llama, one kv head, head_dim not hidden / heads",
        {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 20},
    ),
]


@pytest.fixture(scope="module", params=FAMILIES, ids=str)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(family, transformers' model, the directory it was saved to)."""
    from transformers import LlamaConfig, LlamaForCausalLM

    family: Family = request.param
    torch.manual_seed(11)
    theirs: Any = LlamaForCausalLM(LlamaConfig(**{**COMMON, **family.config}))
    theirs.eval()
    with torch.no_grad():  # norms of one would hide a norm that is left out
        for name, weight in theirs.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
    folder: Path = tmp_path_factory.mktemp("llama")
    theirs.save_pretrained(folder)
    return family, theirs, folder


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [[int(t) for t in draw.integers(3, 151, n)] for n in LENGTHS]


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab), without a cache."""
    rows: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return rows


def their_choices(model: Any, prompt: list[int], text: list[int]) -> tuple[list[int], list[float]]:
    """What transformers would say after each prefix of the text, and by how much it leads.

    Equal to `text` if and only if greedy decoding gives `text`.
    """
    rows = their_logits(model, prompt + text[:-1])[len(prompt) - 1 :]
    best = rows.topk(2)
    first, second = best.values.unbind(-1)
    return best.indices[:, 0].tolist(), (first - second).tolist()


def batched_logits(decoder: Decoder) -> torch.Tensor:
    """All prompts prefilled in one step, of ragged lengths, over pages of 8."""
    runner = TorchRunner(decoder, 64, 8)
    plan, page = StepPlan(), 0
    for i, prompt in enumerate(prompts()):
        request = ask(i, prompt)
        count = -(-len(prompt) // 8)
        request.pages.extend(range(page + count - 1, page - 1, -1))  # not in order
        page += count
        plan.prefills.append(Slice(request, 0, len(prompt), "prefill", True))
    return runner.forward(runner.prepare(plan), lambda phase: None)


@pytest.mark.parametrize("products", products_here())
def test_logits_and_text(pair: Any, products: str, capsys: pytest.CaptureFixture[str]) -> None:
    family, theirs, folder = pair
    model = load_model(str(folder), "fp32")
    decoder = Decoder(model.spec, model.weights, products)
    assert decoder.spec.rope_theta == family.config.get("rope_theta", 1e4)
    expected = torch.stack([their_logits(theirs, p)[-1] for p in prompts()])
    difference = (batched_logits(decoder) - expected).abs().max().item()

    asked = [ask(i, p, NEW_TOKENS, ignore_eos=True) for i, p in enumerate(prompts())]
    done = run(
        asked,
        pages=200,
        page_size=8,
        limits=Limits(max_seqs=4, token_budget=40, chunk=16),
        runner=TorchRunner(decoder, 200, 8),
    )
    choices = {i: their_choices(theirs, p, done.outputs[i]) for i, p in enumerate(prompts())}
    ids, gaps = {i: c[0] for i, c in choices.items()}, {i: c[1] for i, c in choices.items()}
    equal = sum(a == b for i in ids for a, b in zip(ids[i], done.outputs[i], strict=True))
    total = NEW_TOKENS * len(ids)
    with capsys.disabled():
        ids_equal = f"ids {equal}/{total}"
        print(f"\n{family.name:50} {products:7} {ids_equal}  max logit difference {difference:.1e}")
    assert difference < NEAR
    assert expected.std() > 0.5, "logits of some size, or the bound says nothing"
    same_text(ids, gaps, done.outputs)
    assert all(len(own) == NEW_TOKENS and len(set(own)) > 5 for own in done.outputs.values())
