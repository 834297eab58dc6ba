"""min-p, penalties, bias and min_tokens: against transformers' own processors, and against vLLM's
definitions written out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.request import Request, Sampling
from stepscope.models import sampling
from stepscope.models.logit_edits import plan_edits
from stepscope.models.sampling import SHORTLIST, plan_draw, sample
from tests.engine.harness import ask
from tests.engine.test_sampling import chi_square, logits_of

VOCAB = 1000
DRAWS = 20_000
EOS = (2, 5)
CPU = torch.device("cpu")
PROMPT = [7, 3, 3, 900, 12, 41]
OUTPUT = [7, 7, 8, 500, 12, 8, 8]


def request(how: Sampling, output: Sequence[int] = OUTPUT, id: int = 0) -> Request:
    """One that has said `output` after PROMPT."""
    made = ask(id, PROMPT)
    made.sampling = how
    made.tokens = [*PROMPT, *output]
    return made


def choose(rows: torch.Tensor, requests: Sequence[Request]) -> list[int]:
    """What the runner does with a step's logits."""
    settings = [r.sampling for r in requests]
    edits = plan_edits(requests, rows.shape[-1], EOS, CPU)
    at = [len(r.tokens) for r in requests]
    ids: list[int] = sample(rows, plan_draw(settings, at, rows.shape[-1], CPU, edits)).tolist()
    return ids


def draws(logits: torch.Tensor, **how: Any) -> np.ndarray:
    """The ids that DRAWS seeds draw from the same logits after PROMPT and OUTPUT."""
    found: list[int] = []
    for first in range(0, DRAWS, 1000):
        asked = [request(Sampling(seed=s, **how)) for s in range(first, first + 1000)]
        found += choose(logits.expand(1000, -1), asked)
    return np.array(found)


# ------------------------------------------------------------------ the references


def edited(logits: torch.Tensor, how: Sampling, output: Sequence[int] = OUTPUT) -> torch.Tensor:
    """Logits after transformers' processors, and vLLM's presence and frequency written out."""
    from transformers import (
        MinNewTokensLengthLogitsProcessor,
        RepetitionPenaltyLogitsProcessor,
        SequenceBiasLogitsProcessor,
    )

    ids = torch.tensor([[*PROMPT, *output]])
    scores = logits[None].float().clone()
    if how.logit_bias:
        bias = {(token,): float(amount) for token, amount in how.logit_bias}
        scores = SequenceBiasLogitsProcessor(bias)(ids, scores)
    if how.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(ids, scores)
    for token, count in Counter(output).items():  # of the output alone, as in vLLM
        scores[0, token] -= how.frequency_penalty * count
        scores[0, token] -= how.presence_penalty * (count > 0)
    ends = [*how.stop_ids, *(() if how.ignore_eos else EOS)]
    if how.min_tokens and ends:
        scores = MinNewTokensLengthLogitsProcessor(
            len(PROMPT), how.min_tokens, torch.tensor(ends), device="cpu"
        )(ids, scores)
    return scores[0]


def warped(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Probabilities after the processors and warpers, in the order in which generate has them."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(how.temperature)(ids, edited(logits, how)[None])
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(ids, scores)
    if how.top_p < 1:
        scores = TopPLogitsWarper(how.top_p)(ids, scores)
    if how.min_p:
        scores = MinPLogitsWarper(how.min_p)(ids, scores)
    return torch.softmax(scores[0].double(), -1)


def kept(logits: torch.Tensor, how: Sampling, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The kept set: uniforms laid on the middle of every probability, and just below 1."""
    expected = warped(logits, how)
    ordered = expected[torch.argsort(edited(logits, how), descending=True)]
    middles = (ordered.cumsum(0) - ordered / 2)[ordered > 0]
    uniforms = np.append(middles.numpy(), 1 - 2**-53)
    monkeypatch.setattr(sampling, "uniforms", lambda seeds, positions: uniforms)
    return set(choose(logits.expand(len(uniforms), -1), [request(how)] * len(uniforms)))


BIAS = ((7, -4.0), (12, 3.0), (41, 100.0), (600, 5.5), (601, -100.0))
CASES: list[dict[str, Any]] = [
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"min_p": 1.0},
    {"min_p": 1e-4, "temperature": 3.0},
    {"min_p": 0.02, "temperature": 8.0},  # wider than the shortlist
    {"min_p": 0.1, "top_k": 20},
    {"min_p": 0.1, "top_p": 0.9},
    {"min_p": 0.3, "top_p": 0.5, "temperature": 2.0},
    {"min_p": 0.02, "top_k": 700, "top_p": 0.95, "temperature": 5.0},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "top_k": 30},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.8, "top_p": 0.9},
    {"frequency_penalty": -0.5, "presence_penalty": -1.0},
    {"logit_bias": BIAS[:2], "top_p": 0.8},
    {"logit_bias": BIAS},
    {"min_tokens": 20, "stop_ids": (12, 30)},
    {"min_tokens": 7},  # reached: nothing is suppressed
    {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": BIAS[:2],
        "min_tokens": 9,
        "top_k": 100,
        "top_p": 0.95,
        "min_p": 0.01,
        "temperature": 1.7,
    },
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_support_and_frequencies_are_those_of_transformers(case: dict[str, Any]) -> None:
    case = {"temperature": 1.0, **case}
    logits = logits_of()
    expected = warped(logits, Sampling(**case)).numpy()
    ids = draws(logits, **case)
    counts = np.bincount(ids, minlength=VOCAB)
    assert set(ids) <= set(np.flatnonzero(expected)), "nothing outside the kept set"
    assert chi_square(counts, expected * DRAWS) < 5


@pytest.mark.parametrize("case", [c for c in CASES if "min_p" in c or "top_p" in c], ids=str)
def test_the_kept_set_is_exactly_that_of_transformers(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(seed=3)
    how = Sampling(**{"temperature": 1.0, **case})
    expected = set(torch.nonzero(warped(logits, how)).ravel().tolist())
    assert kept(logits, how, monkeypatch) == expected


def test_min_p_wider_than_the_shortlist_was_tried() -> None:
    wide = warped(logits_of(), Sampling(temperature=8.0, min_p=0.02))
    assert (wide > 0).sum() > SHORTLIST


def test_min_p_looks_at_what_top_p_left_and_not_the_other_way_round() -> None:
    """Here the orders of transformers and vLLM differ: the sum that top-p is a share of."""
    logits = torch.log(torch.tensor([0.4, 0.3, 0.1, 0.1, 0.1]))
    how: dict[str, Any] = {"temperature": 1.0, "top_p": 0.75, "min_p": 0.5}
    # top-p first keeps 0.4, 0.3 and 0.1; min-p of these 0.4 and 0.3. With min-p first top-p would
    # see 0.57 and 0.43 and keep both as well; a smaller share tells them apart.
    assert set(draws5(logits, **how)) == {0, 1}
    how["top_p"] = 0.55  # of everything: 0.4 and 0.3; of what min-p left: 0.57, the first alone
    assert set(draws5(logits, **how)) == {0, 1}


def draws5(logits: torch.Tensor, **how: Any) -> list[int]:
    asked = [ask(i, [0], temperature=0.0) for i in range(500)]
    for i, r in enumerate(asked):
        r.sampling = Sampling(seed=i, **how)
    return choose(logits.expand(500, -1), asked)


def test_min_p_keeps_what_ties_with_the_best() -> None:
    logits = torch.tensor([2.0, 1.0, 2.0, 2.0, 0.0])
    assert set(draws5(logits, temperature=1.0, min_p=1.0)) == {0, 2, 3}


# ------------------------------------------------------------------ edits

biases = st.dictionaries(st.integers(0, 63), st.floats(-20, 20, width=32), max_size=5)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 63), max_size=12),
    st.sampled_from([1.0, 0.5, 1.3, 2.0]),
    st.floats(-2, 2, width=32),
    st.floats(-2, 2, width=32),
    biases,
    st.integers(0, 14),
    st.booleans(),
)
def test_edited_logits_are_those_of_the_reference(
    seed: int,
    output: list[int],
    repetition: float,
    presence: float,
    frequency: float,
    bias: dict[int, float],
    least: int,
    ignore_eos: bool,
) -> None:
    how = Sampling(
        repetition_penalty=repetition,
        presence_penalty=presence,
        frequency_penalty=frequency,
        logit_bias=tuple(sorted(bias.items())),
        min_tokens=least,
        ignore_eos=ignore_eos,
        stop_ids=(9,),
    )
    prompt = [t % 64 for t in PROMPT]
    made = ask(0, prompt)
    made.sampling, made.tokens = how, [*prompt, *output]
    neighbour = request(Sampling(logit_bias=((1, 5.0),), repetition_penalty=3.0), [4, 4])
    neighbour.tokens = [t % 64 for t in neighbour.tokens]
    rows = torch.stack([logits_of(seed, 64), logits_of(seed + 1, 64), logits_of(seed + 2, 64)])
    plain = request(Sampling(), [])
    edits = plan_edits([neighbour, plain, made], 64, EOS, CPU)
    assert edits is not None
    changed = edits.apply(rows)
    assert 1 not in edits.row_list, "a plain row is not even copied"
    got = changed[edits.row_list.index(2)] if 2 in edits.row_list else rows[2]
    torch.testing.assert_close(got, reference(rows[2], how, prompt, output), atol=1e-5, rtol=1e-5)


def reference(
    logits: torch.Tensor, how: Sampling, prompt: list[int], output: list[int]
) -> torch.Tensor:
    """Token by token, in plain Python."""
    values = []
    for token, x in enumerate(logits.tolist()):
        x += dict(how.logit_bias).get(token, 0.0)
        if token in prompt or token in output:
            x = x / how.repetition_penalty if x > 0 else x * how.repetition_penalty
        x -= how.frequency_penalty * output.count(token)
        x -= how.presence_penalty * (token in output)
        early = len(output) < how.min_tokens
        ends = token in how.stop_ids or (token in EOS and not how.ignore_eos)
        values.append(-math.inf if early and ends else x)
    return torch.tensor(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [c for c in CASES if "temperature" not in c], ids=str)
def test_greedy_takes_the_best_of_the_edited_logits(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    """In float32 whatever the model computes in, as transformers and vLLM do."""
    rows = torch.stack([logits_of(s, spread=0.3) for s in range(8)]).to(dtype)
    how = Sampling(**case)
    before = rows.clone()
    asked = [request(how if i % 2 else Sampling()) for i in range(8)]
    expected = [
        int((edited(row, how) if i % 2 else row.float()).argmax()) for i, row in enumerate(rows)
    ]
    assert choose(rows, asked) == expected
    assert torch.equal(rows, before), "the model's logits are left alone"


def test_the_last_eos_before_min_tokens_is_suppressed_and_the_next_is_not() -> None:
    logits = torch.zeros(VOCAB)
    logits[[EOS[0], EOS[1], 30]] = torch.tensor([9.0, 8.0, 7.0])
    how = Sampling(min_tokens=4, stop_ids=(30,))
    for count in range(8):
        best = choose(logits[None], [request(how, [1] * count)])[0]
        assert best == (0 if count < 4 else EOS[0])
    ignoring = Sampling(min_tokens=4, stop_ids=(30,), ignore_eos=True)
    assert choose(logits[None], [request(ignoring, [1])]) == [EOS[0]]
