"""The real model against token ids that other programs made, however the engine runs it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.models.decoder import Decoder
from stepscope.models.load import LoadedModel
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import UNLIMITED, Observed, Outcome, ask, products_here, run, same_text

pytestmark = [pytest.mark.model, pytest.mark.slow]

FOLDER = Path(__file__).parents[1] / "data" / "goldens"
GOLDENS = json.loads((FOLDER / "smollm2_greedy_transformers_fp32.json").read_text())["items"]
NUMPY = json.loads((FOLDER / "gguf_numpy_f32.json").read_text())["smollm2"]
IDS = {i: item["greedy_ids"] for i, item in enumerate(GOLDENS)}
GAPS = {i: item["top1_top2_gap"] for i, item in enumerate(GOLDENS)}
NEAR = 1e-3
PLENTY = 2048  # tokens of KV
SCARCE = {3: 150, 8: 320}  # by batch: everybody is let in and not everybody can stay
PRODUCTS = products_here()
Decoders = dict[str, Decoder]


@dataclass(frozen=True)
class Setting:
    batch: int = 8
    page_size: int = 16
    chunk: int = UNLIMITED
    policy: str = "chunked"
    scarce: bool = False
    products: str = PRODUCTS[-1]

    @property
    def tokens(self) -> int:
        return SCARCE[self.batch] if self.scarce else PLENTY

    def __str__(self) -> str:
        chunk = "unlimited" if self.chunk == UNLIMITED else self.chunk
        parts = [f"batch{self.batch}", f"page{self.page_size}", f"chunk{chunk}", self.policy]
        return "-".join([*parts, self.products, *(["scarce"] if self.scarce else [])])


BASE = Setting()
ONE_AXIS = [
    BASE,
    replace(BASE, batch=1),
    replace(BASE, batch=3),
    replace(BASE, page_size=1),
    replace(BASE, page_size=64),
    replace(BASE, chunk=7),
    replace(BASE, chunk=16),
    replace(BASE, policy="static"),
    replace(BASE, policy="prefill-first"),
    replace(BASE, scarce=True),
    replace(BASE, scarce=True, policy="prefill-first"),
    *(replace(BASE, products=other) for other in PRODUCTS[:-1]),
]


def combinations(count: int, seed: int) -> list[Setting]:
    """Different ones, drawn from all axes at once."""
    draw, found = random.Random(seed), dict.fromkeys(ONE_AXIS)
    while len(found) < len(ONE_AXIS) + count:
        batch = draw.choice((3, 8))  # batch 1 alone is as slow as several of these
        policy = draw.choice(("static", "prefill-first", "chunked"))
        found[
            Setting(
                batch,
                draw.choice((1, 16, 64)),
                draw.choice((7, 16, UNLIMITED)),
                policy,
                draw.random() < 0.5 and policy != "static",  # which never preempts
                draw.choice(PRODUCTS) if batch == 8 else PRODUCTS[-1],
            )
        ] = None
    return list(found)[len(ONE_AXIS) :]


@pytest.fixture(scope="module")
def decoders(smollm2: LoadedModel) -> dict[str, Decoder]:
    """By product. A decoder takes the weights out of the dict it is given, so each has its own."""
    return {p: Decoder(smollm2.spec, dict(smollm2.weights), p) for p in PRODUCTS}


def outcome(
    decoders: Decoders, requests: list[Request], at: Setting, keep: bool = False
) -> tuple[Outcome, Observed]:
    decoder = decoders[at.products]
    pages = at.tokens // at.page_size
    observed = Observed(TorchRunner(decoder, pages, at.page_size), keep_logits=keep)
    limits = Limits(at.batch, max(64, at.batch + at.chunk), at.chunk, decoder.spec.max_context)
    done = run(
        requests,
        at.policy,
        pages=pages,
        page_size=at.page_size,
        limits=limits,
        eos=decoder.spec.eos_ids,
        runner=observed,
    )
    return done, observed


def golden_requests() -> list[Request]:
    return [
        ask(i, item["prompt_ids"], len(item["greedy_ids"]), ignore_eos=True)
        for i, item in enumerate(GOLDENS)
    ]


def test_there_are_ten_of_32_tokens() -> None:
    assert [len(ids) for ids in IDS.values()] == [32] * 10


@pytest.mark.parametrize("setting", ONE_AXIS, ids=str)
def test_one_axis_at_a_time(decoders: Decoders, setting: Setting) -> None:
    check(decoders, setting)


@pytest.mark.parametrize("setting", combinations(12, seed=20), ids=str)
def test_all_axes_at_once(decoders: Decoders, setting: Setting) -> None:
    check(decoders, setting)


def check(decoders: Decoders, setting: Setting) -> None:
    """Ids equal; a token that leads by 0.002 or less is a tie (one golden token does, just so)."""
    done, observed = outcome(decoders, golden_requests(), setting)
    ties = same_text(IDS, GAPS, done.outputs, allowed=1 / 320)
    if ties:
        print(f"{setting}: {ties}")
    assert all(r.finish_reason == "length" for r in done.records.values())
    for i, gaps in () if ties else GAPS.items():
        assert observed.gaps[i] == pytest.approx(gaps, abs=NEAR), "not only the ids"
    if setting.scarce:
        assert done.preemptions > 0 and sum(r.recompute_tokens or 0 for r in done.work) > 0


def test_eos_ends_where_the_goldens_have_it(decoders: Decoders) -> None:
    """The same requests without ignore_eos are the goldens up to their first end of text."""
    ends = set(decoders[BASE.products].spec.eos_ids)
    requests = [ask(i, item["prompt_ids"], 32) for i, item in enumerate(GOLDENS)]
    done, _ = outcome(decoders, requests, BASE)
    for i, ids in IDS.items():
        stop = next((n + 1 for n, token in enumerate(ids) if token in ends), len(ids))
        assert done.outputs[i] == ids[:stop]
        assert done.records[i].finish_reason == ("eos" if ids[stop - 1] in ends else "length")
    assert any(r.finish_reason == "eos" for r in done.records.values())


def test_log_probabilities_and_margins_of_the_numpy_reference(decoders: Decoders) -> None:
    """Four prompts together, against float32 numpy over the dequantized file."""
    requests = [
        ask(i, item["prompt_ids"], len(item["greedy"]), ignore_eos=True)
        for i, item in enumerate(NUMPY)
    ]
    done, observed = outcome(decoders, requests, replace(BASE, chunk=16), keep=True)
    for i, item in enumerate(NUMPY):
        logits = torch.stack(observed.logits[i]).double()
        logs = torch.log_softmax(logits, -1)
        assert done.outputs[i] == item["greedy"]
        chosen = logs.gather(-1, torch.tensor(item["greedy"])[:, None]).squeeze(-1).tolist()
        assert chosen == pytest.approx(item["logprob"], abs=NEAR)
        first, second = logits.topk(2).values.unbind(-1)
        assert (first - second).tolist() == pytest.approx(item["margins"], abs=NEAR)
        values, ids = logs[0].topk(5)
        assert ids.tolist() == [token for token, _ in item["top5_first"]]
        assert values.tolist() == pytest.approx([v for _, v in item["top5_first"]], abs=NEAR)
