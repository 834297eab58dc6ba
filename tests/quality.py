"""What a format of the weights costs in quality, on the golden prompts and their continuations.

The model is given each golden text and asked for every next token, so one early difference does
not hide the rest. Reference: the same file in fp32.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch

from stepscope.engine.plan import Slice, StepPlan
from stepscope.engine.request import Request, Sampling
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model
from stepscope.records import RequestRecord
from stepscope.runner.job import build_decoder
from stepscope.runner.torch_runner import TorchRunner

GOLDENS = Path(__file__).parent / "data" / "goldens" / "smollm2_greedy_transformers_fp32.json"
ITEMS = json.loads(GOLDENS.read_text())["items"]
PAGE_SIZE = 16
HEADER = "weights     bytes/step   logit error: mean    max   KL (nats)   greedy agreement"


@dataclass(frozen=True, slots=True)
class Quality:
    """Over all golden positions; errors against fp32 logits, agreement with the golden ids."""

    dtype: str
    weight_bytes: int
    mean_error: float
    max_error: float
    kl: float
    agreement: float
    positions: int

    def line(self) -> str:
        return (
            f"{self.dtype:<11} {self.weight_bytes / 1e6:>7.1f} MB {self.mean_error:>19.3f} "
            f"{self.max_error:>7.3f} {self.kl:>11.5f} {self.agreement * 100:>9.1f} %"
            f" of {self.positions}"
        )


def golden_logits(decoder: Decoder) -> torch.Tensor:
    """float32 (positions, vocab): before each golden token, given all those before it."""
    longest = max(len(item["prompt_ids"]) + len(item["greedy_ids"]) for item in ITEMS)
    runner = TorchRunner(decoder, -(-longest // PAGE_SIZE), PAGE_SIZE)
    return torch.cat([_logits(runner, i["prompt_ids"], i["greedy_ids"]) for i in ITEMS])


def _logits(runner: TorchRunner, prompt: list[int], chosen: list[int]) -> torch.Tensor:
    tokens = [*prompt, *chosen[:-1]]
    request = Request(RequestRecord(0, 0, len(tokens)), tokens, Sampling())
    request.pages.extend(range(-(-len(tokens) // PAGE_SIZE)))
    plan = StepPlan(prefills=[Slice(request, 0, len(tokens), "prefill", samples=True)], running=1)
    batch = runner.prepare(plan)
    batch.attention.sampled_rows = torch.arange(len(prompt) - 1, len(tokens))
    return runner.forward(batch, lambda phase: None).float()


def golden_ids() -> torch.Tensor:
    return torch.tensor([token for item in ITEMS for token in item["greedy_ids"]])


def quality(dtype: str, reference: torch.Tensor, model: str) -> Quality:
    """fp8 as torch's slow product for CPUs has it, on which runs are refused."""
    with mock.patch("stepscope.models.load.check_device"):
        loaded = load_model(model, dtype)
    logits = golden_logits(build_decoder(loaded, "auto"))
    error = (logits - reference).abs()
    wanted, found = reference.log_softmax(-1), logits.log_softmax(-1)
    same = logits.argmax(-1) == golden_ids()
    return Quality(
        dtype,
        loaded.spec.weight_bytes,
        error.mean().item(),
        error.max().item(),
        (wanted.exp() * (wanted - found)).sum(-1).mean().item(),
        same.float().mean().item(),
        len(same),
    )


def report(dtypes: list[str], model: str = "smollm2-135m") -> list[Quality]:
    """Print a line for each format as it is found."""
    reference = golden_logits(build_decoder(load_model(model, "fp32"), "plain"))
    print(HEADER)
    found = []
    for dtype in dtypes:
        found.append(quality(dtype, reference, model))
        print(found[-1].line(), flush=True)
    return found
