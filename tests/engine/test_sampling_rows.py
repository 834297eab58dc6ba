"""Log-probabilities, rows whose logits are not finite, and what a step of sampling costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stepscope.engine.request import Request, Sampling, TokenLogprobs
from stepscope.models.logit_edits import plan_edits
from stepscope.models.logprobs import logprobs_of, plan_logprobs, unpack_logprobs
from stepscope.models.sampling import NOT_FINITE, plan_draw, sample
from tests.engine.test_sampling import logits_of
from tests.engine.test_sampling_full import BIAS, CASES, CPU, EOS, VOCAB, choose, request

# ------------------------------------------------------------------ log-probabilities


def logprobs(
    rows: torch.Tensor, requests: Sequence[Request]
) -> tuple[list[int], list[TokenLogprobs]]:
    ids = choose(rows, requests)
    asked = plan_logprobs([r.sampling for r in requests], rows.shape[-1], CPU)
    assert asked is not None
    return ids, unpack_logprobs(logprobs_of(rows, torch.tensor(ids), asked), asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    rows = torch.stack([logits_of(s) for s in range(6)]).to(dtype)
    ways: list[dict[str, Any]] = [
        {"logprobs": 0},
        {},
        {"logprobs": 5, "temperature": 2.0, "top_k": 9},
        {"logprobs": 20, "logit_bias": BIAS, "repetition_penalty": 2.0},
        {"temperature": 1.0},
        {"logprobs": 1, "temperature": 0.3, "min_p": 0.2, "presence_penalty": 1.0},
    ]
    asked = [request(Sampling(seed=i, **how)) for i, how in enumerate(ways)]
    ids, found = logprobs(rows, asked)
    rows_asked = [i for i, how in enumerate(ways) if "logprobs" in how]
    assert len(found) == len(rows_asked)
    for i, values in zip(rows_asked, found, strict=True):
        expected = torch.log_softmax(rows[i].double(), -1)
        assert values.logprob == pytest.approx(float(expected[ids[i]]), abs=1e-5)
        best = expected.topk(ways[i]["logprobs"])
        assert values.top == pytest.approx(best.values.tolist(), abs=1e-5)
        assert expected[values.top_ids].tolist() == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_forbidden_token_has_a_finite_logprob_in_json() -> None:
    logits = torch.full((VOCAB,), -math.inf)
    logits[3] = 0.0
    _, (values,) = logprobs(logits[None], [request(Sampling(logprobs=2))])
    assert values.top == [0.0, -9999.0] and values.logprob == 0.0


def test_a_broken_row_that_asked_breaks_no_other_ones_logprobs() -> None:
    rows = torch.stack([logits_of(), torch.full((VOCAB,), math.nan)])
    ids, (first, second) = logprobs(rows, [request(Sampling(logprobs=1))] * 2)
    assert ids[1] == NOT_FINITE and math.isnan(second.logprob)
    assert first.logprob == first.top[0] and first.top_ids == ids[:1]


# ------------------------------------------------------------------ rows that say nothing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_broken_row_is_told_and_the_others_are_as_ever(dtype: torch.dtype) -> None:
    rows = torch.stack([logits_of(s) for s in range(10)]).to(dtype)
    every: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}, *CASES[:2]]
    ways = [Sampling(**{"temperature": 0.9, **w} if w else {}) for w in every]
    broken = rows.clone()
    broken[1, 500] = math.nan
    broken[3] = math.nan
    broken[5] = -math.inf
    broken[8, 0] = math.inf
    for how in ways:
        asked = [request(Sampling(**{**vars_of(how), "seed": i})) for i in range(10)]
        whole, found = choose(rows, asked), choose(broken, asked)
        assert [found[i] for i in (1, 3, 5, 8)] == [NOT_FINITE] * 4
        assert all(found[i] == whole[i] for i in (0, 2, 4, 6, 7, 9))


def vars_of(how: Sampling) -> dict[str, Any]:
    return {name: getattr(how, name) for name in Sampling.__dataclass_fields__}


def test_a_bias_does_not_hide_a_broken_row() -> None:
    row = logits_of()
    row[600] = math.nan
    for case in CASES[9:]:
        how = Sampling(**case)
        assert choose(row[None], [request(how)]) == [NOT_FINITE]


def test_a_row_of_which_nothing_is_left_fails_too() -> None:
    rows = torch.stack([logits_of(s) for s in range(2)])
    for temperature in (0.0, 1.0):
        how = Sampling(temperature, min_tokens=9, stop_ids=tuple(range(VOCAB)))
        ids = choose(rows, [request(how), request(Sampling(temperature))])
        assert ids[0] == NOT_FINITE and ids[1] != NOT_FINITE


# ------------------------------------------------------------------ the hot path


class Calls(TorchDispatchMode):
    """Counts torch operations: each is a launch on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(batch: int, vocab: int, ways: Sequence[dict[str, Any]]) -> int:
    rows = torch.stack([logits_of(s, vocab) for s in range(batch)])
    asked = [request(Sampling(seed=i, **ways[i % len(ways)])) for i in range(batch)]
    for r in asked:
        r.tokens = [t % vocab for t in r.tokens]
    settings = [r.sampling for r in asked]
    edits = plan_edits(asked, vocab, EOS, CPU)
    draw = plan_draw(settings, [9] * batch, vocab, CPU, edits)
    wanted = plan_logprobs(settings, vocab, CPU)
    with torch.inference_mode(), Calls() as calls:
        ids = sample(rows, draw)
        if wanted is not None:
            logprobs_of(rows, ids, wanted)
    return calls.count


def test_operations_grow_neither_with_the_batch_nor_with_the_vocabulary() -> None:
    ways = [CASES[-1], {"logprobs": 3, "logit_bias": BIAS[:2]}, {}, {"temperature": 1.0}]
    counts = {operations(b, v, ways) for b, v in [(4, 300), (64, 300), (4, 5000), (32, 5000)]}
    assert len(counts) == 1


def test_a_greedy_row_costs_one_pass_over_its_logits() -> None:
    """What was added looks at one number a row."""
    assert operations(8, 1000, [{}]) <= 5
