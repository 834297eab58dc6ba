"""Every way to draw and to stop inside the engine: the same tokens in any company, and a request
that fails takes nobody with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stepscope.engine.loop import Output
from stepscope.engine.plan import Lap
from stepscope.engine.request import Request, TokenLogprobs
from stepscope.engine.scheduler import Limits
from stepscope.models.decoder import Decoder
from stepscope.models.load import LoadedModel
from stepscope.runner.replay import TokenText
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import TIE, Observed, Outcome, ask, build, finish, run, small_decoder


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return small_decoder(vocab=600)


ENGINE_BIAS = ((17, 2.0), (30, -100.0), (255, 1.5))
HOW: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1, "min_p": 0.1},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 3},
    {"logit_bias": ENGINE_BIAS, "temperature": 1.5, "top_p": 0.9, "seed": 4, "logprobs": 3},
    {"min_tokens": 20, "stop_ids": tuple(range(0, 600, 2)), "temperature": 2.0, "seed": 5},
    {},
    {"repetition_penalty": 1.2, "logprobs": 0, "min_p": 0.05, "temperature": 2.0, "seed": 7},
    {"stop": (" 1", "7 ", "42"), "temperature": 2.0, "seed": 8},
]


def asked_requests() -> list[Request]:
    ids = np.random.default_rng(4).integers(0, 251, (8, 60))
    return [ask(i, ids[i, : 12 + 6 * i].tolist(), 30, **HOW[i]) for i in range(8)]


def engine_run(
    decoder: Decoder, policy: str = "chunked", max_seqs: int = 8, pages: int = 500
) -> Outcome:
    limits = Limits(max_seqs=max_seqs, token_budget=100, chunk=25)
    runner = Observed(TorchRunner(decoder, pages, 8))
    return run(asked_requests(), policy, pages=pages, page_size=8, limits=limits, runner=runner)


def texts(done: Outcome) -> dict[int, str]:
    outputs: dict[int, str] = dict.fromkeys(done.requests, "")
    for output in (o for step in done.emitted for o in step):
        outputs[output.request.id] += output.piece
    return outputs


def values_of(done: Outcome) -> dict[int, list[TokenLogprobs]]:
    found: dict[int, list[TokenLogprobs]] = {}
    for output in (o for step in done.emitted for o in step):
        if output.logprobs is not None:
            found.setdefault(output.request.id, []).append(output.logprobs)
    return found


def test_neither_neighbours_nor_scheduling_nor_preemption_change_a_token(
    decoder: Decoder,
) -> None:
    alone = engine_run(decoder, max_seqs=1)
    expected, reasons = alone.outputs, [r.finish_reason for r in alone.records.values()]
    assert len(expected[4]) > 20 and reasons[4] == "stop", "min_tokens was at work"
    assert reasons[7] == "stop", "and so was a stop string"
    assert len(set(expected[1])) > len(set(expected[5])), "and the repetition penalty"
    for policy in ("static", "prefill-first", "chunked"):
        for pages in (500, 30):
            done = engine_run(decoder, policy, pages=pages)
            assert done.outputs == expected, f"{policy} with {pages} pages"
            assert texts(done) == texts(alone)
            assert [r.finish_reason for r in done.records.values()] == reasons
            assert done.scheduler.pool.used == 0
            if pages == 30 and policy != "static":
                assert done.preemptions > 0


def test_logprobs_come_with_each_token_of_those_who_asked(decoder: Decoder) -> None:
    first, second = values_of(engine_run(decoder, max_seqs=1)), values_of(engine_run(decoder))
    assert first.keys() == second.keys() == {3, 6}
    for request, values in first.items():
        assert len(values) == 30
        others = second[request]
        got = [v.logprob for v in others]
        assert got == pytest.approx([v.logprob for v in values], abs=1e-4)
        assert all(len(v.top) == len(v.top_ids) == (3 if request == 3 else 0) for v in others)
        assert all(v.top == sorted(v.top, reverse=True) for v in others)


class Poisoning(TorchRunner):
    """Lays NaN into every KV row that request `victim` has when its output is `after` long."""

    def __init__(self, decoder: Decoder, pages: int, page_size: int, victim: Request, after: int):
        super().__init__(decoder, pages, page_size)
        self.victim, self.after = victim, after

    def forward(self, batch: Any, lap: Lap) -> torch.Tensor:
        if self.victim.output_tokens == self.after and self.victim.pages:
            self.cache.poison(list(self.victim.pages))
        return super().forward(batch, lap)


@pytest.mark.parametrize("policy", ["static", "prefill-first", "chunked"])
@pytest.mark.parametrize("victim", [0, 3, 7])
def test_nan_in_the_cache_of_one_request_ends_it_and_touches_nobody(
    decoder: Decoder, policy: str, victim: int
) -> None:
    """The victim's context is the shortest, a middling or the longest of its padded group, and
    its freed pages, still full of NaN, go to requests that wait."""
    limits = Limits(max_seqs=5, token_budget=100, chunk=25)

    def asked() -> list[Request]:
        return [ask(i, 9 + 5 * i, 25, ignore_eos=True, **extra(i)) for i in range(10)]

    def extra(i: int) -> dict[str, Any]:
        return {"temperature": 1.0, "seed": i, "repetition_penalty": 1.1} if i % 3 == 2 else {}

    expected = run(
        asked(),
        policy,
        pages=40,
        page_size=8,
        limits=limits,
        runner=Observed(TorchRunner(decoder, 40, 8)),
    )
    requests = asked()
    runner = Poisoning(decoder, 40, 8, requests[victim], after=6)
    done = run(requests, policy, pages=40, page_size=8, limits=limits, runner=runner, forget=False)
    record = done.records[victim]
    assert record.finish_reason == "error" and "not finite" in str(record.error)
    assert done.outputs[victim] == expected.outputs[victim][:6]
    for i in range(10):
        if i != victim:
            assert done.outputs[i] == expected.outputs[i], i
            assert done.records[i].finish_reason == "length"
    assert done.scheduler.pool.used == 0


def test_a_failing_crowd_takes_nobody_down(decoder: Decoder) -> None:
    """Over-long prompt, empty prompt, NaN, a stop string never met: the rest is as without them."""
    limits = Limits(max_seqs=4, token_budget=64, chunk=16, max_context=80)
    good = [ask(i, 20 + i, 12, ignore_eos=True) for i in range(3)]
    expected = run(
        good, page_size=8, limits=limits, runner=Observed(TorchRunner(decoder, 100, 8)), pages=100
    )
    again = [ask(i, 20 + i, 12, ignore_eos=True) for i in range(3)]
    broken = ask(11, 30, 12)
    bad = [
        ask(10, 80, 12),
        broken,
        ask(12, 0, 12),
        ask(13, 17, 12, stop=("never said",), ignore_eos=True),
    ]
    runner = Poisoning(decoder, 100, 8, broken, after=2)
    done = run([*bad, *again], page_size=8, limits=limits, runner=runner, pages=100, forget=False)
    assert {i: done.outputs[i] for i in range(3)} == expected.outputs
    reasons = {i: done.records[i].finish_reason for i in (10, 11, 12, 13)}
    assert reasons == {10: "error", 11: "error", 12: "error", 13: "length"}
    assert done.scheduler.pool.used == 0 and done.complete


def test_outputs_end_with_a_finished_one(decoder: Decoder) -> None:
    last: dict[int, Output] = {}
    for output in (o for step in engine_run(decoder).emitted for o in step):
        assert not (output.request.id in last and last[output.request.id].finished)
        last[output.request.id] = output
    assert all(output.finished for output in last.values()) and len(last) == 8


# ------------------------------------------------------------------ the real model

GOLDENS = Path(__file__).parents[1] / "data/goldens/smollm2_greedy_transformers_fp32.json"
STOPS = (" the", "\n\n", ".", "tion ", "hardly ever said")


@pytest.mark.model
@pytest.mark.slow
def test_real_text_is_the_golden_one_up_to_the_first_stop_string(smollm2: LoadedModel) -> None:
    """Greedy ids of transformers, decoded whole and cut, with each stop string and with all."""
    assert smollm2.tokenizer is not None
    items = json.loads(GOLDENS.read_text(encoding="utf-8"))["items"]
    items = [item for item in items if min(item["top1_top2_gap"]) > TIE]
    assert len(items) >= 8
    asked, expected = [], []
    for i, item in enumerate(items):
        stops = STOPS if i % 2 else (STOPS[i // 2 % len(STOPS)],)
        count = len(item["greedy_ids"])
        asked.append(ask(i, item["prompt_ids"], count, ignore_eos=True, stop=stops, logprobs=1))
        expected.append(cut(smollm2.tokenizer.decode(item["greedy_ids"]), stops))
    decoder = Decoder(smollm2.spec, dict(smollm2.weights))
    made = build(asked, pages=200, runner=TorchRunner(decoder, 200, 16), forget=False)
    made.engine.text = TokenText(smollm2.tokenizer)
    done = finish(made)
    said = texts(done)
    assert [said[i] for i in range(len(items))] == expected
    reasons = {done.records[i].finish_reason for i in range(len(items))}
    assert reasons == {"stop", "length"}
    for i, values in values_of(done).items():  # greedy: the token is the likeliest one
        ids = done.outputs[i]
        assert [v.top_ids[0] for v in values] == ids and len(values) == len(ids)
        assert all(v.logprob == v.top[0] <= 0 for v in values)
        assert ids == items[i]["greedy_ids"][: len(ids)], "stopping changes no token"


def cut(text: str, stops: Sequence[str]) -> str:
    found = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    return text[: min(found)[1]] if found else text
