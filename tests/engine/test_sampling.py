"""Drawing tokens: against transformers' own warpers, over many seeds, in any company."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.request import Request, Sampling
from stepscope.engine.scheduler import Limits
from stepscope.models import sampling
from stepscope.models.decoder import Decoder
from stepscope.models.sampling import SHORTLIST, plan_draw, sample, uniforms
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import Outcome, ask, run, small_decoder

VOCAB = 1000
DRAWS = 20_000


def logits_of(seed: int = 0, vocab: int = VOCAB, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def draw(
    rows: torch.Tensor, settings: Sequence[Sampling], positions: Sequence[int] | None = None
) -> list[int]:
    positions = positions or [7] * len(settings)
    plan = plan_draw(settings, positions, rows.shape[-1], rows.device)
    ids: list[int] = sample(rows, plan).tolist()
    return ids


def draws(logits: torch.Tensor, count: int = DRAWS, **how: Any) -> np.ndarray:
    """The ids that `count` seeds draw from the same logits."""
    found: list[int] = []
    for first in range(0, count, 1000):
        settings = [Sampling(seed=s, **how) for s in range(first, first + 1000)]
        found += draw(logits.expand(1000, -1), settings)
    return np.array(found)


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Standardised: (X2 - k) / sqrt(2k) is about normal. Cells below 5 are put together."""
    large = expected >= 5
    observed = np.append(observed[large], observed[~large].sum())
    expected = np.append(expected[large], expected[~large].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    if freedom < 1:
        return 0.0
    statistic = ((observed - expected) ** 2 / expected).sum()
    return float((statistic - freedom) / np.sqrt(2 * freedom))


# ------------------------------------------------------------------ uniforms


def test_uniforms_lie_in_the_unit_interval_and_are_reproducible() -> None:
    seeds, positions = [0, 1, -1, 2**63, 2**64 - 1, 2**80 + 3], [0, 1, 2**31, 5, 0, 9]
    values = uniforms(seeds, positions)
    assert values.dtype == np.float64 and ((values >= 0) & (values < 1)).all()
    assert (values == uniforms(seeds, positions)).all()
    assert [float(uniforms([s], [p])[0]) for s, p in zip(seeds, positions, strict=True)] == list(
        values
    )


def grid(seeds: Sequence[int], positions: int) -> np.ndarray:
    return np.stack([uniforms([s] * positions, range(positions)) for s in seeds])


@pytest.mark.parametrize("seeds", [range(500), [2**40 * s for s in range(500)]], ids=str)
def test_neighbouring_seeds_and_positions_do_not_collide(seeds: Sequence[int]) -> None:
    values = grid(seeds, 400)
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize("seeds", [range(300), [97 * 2**32 * s for s in range(300)]], ids=str)
def test_uniforms_are_uniform_over_seeds_over_positions_and_over_pairs(
    seeds: Sequence[int],
) -> None:
    values = grid(seeds, 300)
    for flat in (values.reshape(-1), values[:, 0], values[0], values[:, 299]):
        counts = np.histogram(flat, bins=20, range=(0, 1))[0]
        assert chi_square(counts, np.full(20, flat.size / 20)) < 5
    for first, second in (  # neighbours along positions, along seeds
        (values[:, :-1], values[:, 1:]),
        (values[:-1], values[1:]),
    ):
        pairs = np.histogram2d(first.ravel(), second.ravel(), bins=10, range=[[0, 1]] * 2)[0]
        assert chi_square(pairs.ravel(), np.full(100, first.size / 100)) < 5


# ------------------------------------------------------------------ against transformers


def warped(logits: torch.Tensor, how: Sampling) -> torch.Tensor:
    """Probabilities after transformers' warpers, in the order in which generate applies them."""
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = logits[None].clone()
    ids = torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(how.temperature)(ids, scores)
    if how.top_k:
        scores = TopKLogitsWarper(how.top_k)(ids, scores)
    if how.top_p < 1:
        scores = TopPLogitsWarper(how.top_p)(ids, scores)
    return torch.softmax(scores[0].double(), -1)


CASES: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_k": 50},
    {"temperature": 1.0, "top_k": SHORTLIST},
    {"temperature": 5.0, "top_k": SHORTLIST + 1},
    {"temperature": 5.0, "top_k": 400},
    {"temperature": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.5, "top_p": 0.3},
    {"temperature": 5.0, "top_p": 0.95},  # about 800 tokens: wider than the shortlist
    {"temperature": 1.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 0.999},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.8},
    {"temperature": 5.0, "top_k": 500, "top_p": 0.7},
    {"temperature": 1.0, "top_k": 1, "top_p": 0.1},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_support_and_frequencies_are_those_of_transformers(case: dict[str, Any]) -> None:
    logits = logits_of()
    how = Sampling(**case)
    expected = warped(logits, how).numpy()
    ids = draws(logits, **case)
    counts = np.bincount(ids, minlength=VOCAB)
    assert set(ids) <= set(np.flatnonzero(expected)), "nothing outside the kept set"
    assert chi_square(counts, expected * DRAWS) < 5
    likely = np.flatnonzero(expected * DRAWS > 30)
    assert set(likely) <= set(ids), "and all of it that 20,000 draws must hit"


def kept(logits: torch.Tensor, how: Sampling, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The kept set itself: draw with uniforms laid on the middle of every probability."""
    expected = warped(logits, how)
    order = torch.argsort(logits, descending=True)
    ordered = expected[order]
    middles = (ordered.cumsum(0) - ordered / 2)[ordered > 0]
    rows = len(middles) + 1
    monkeypatch.setattr(
        sampling, "uniforms", lambda seeds, positions: np.append(middles.numpy(), 1 - 2**-53)
    )
    return set(draw(logits.expand(rows, -1), [how] * rows))


@pytest.mark.parametrize(
    "case", [c for c in CASES if len(c) > 1 and c.get("top_k", 0) < VOCAB], ids=str
)
def test_the_kept_set_is_exactly_that_of_transformers(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every kept token is hit in the middle of its share; u just below 1 hits the last."""
    logits = logits_of(seed=3)
    how = Sampling(**case)
    expected = set(torch.nonzero(warped(logits, how)).ravel().tolist())
    assert kept(logits, how, monkeypatch) == expected


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([5, 100, 256, 257, 600]),
    st.floats(0.05, 8),
    st.integers(0, 700),
    st.floats(0.01, 1),
    st.floats(0.1, 6),
)
def test_never_outside_the_kept_set(
    seed: int, vocab: int, temperature: float, top_k: int, top_p: float, spread: float
) -> None:
    logits = logits_of(seed, vocab, spread)
    how = [Sampling(temperature, top_k, top_p, seed=s) for s in range(40)]
    expected = warped(logits, how[0])
    # A cumulated probability within rounding of top_p may fall on either side of it.
    rounding = warped(logits, Sampling(temperature, top_k, min(1, top_p + 1e-5)))
    allowed = set(torch.nonzero(expected + rounding).ravel().tolist())
    assert set(draw(logits.expand(40, -1), how)) <= allowed


def test_a_nucleus_wider_than_the_shortlist_was_tried() -> None:
    """The cases above include both ways through the code."""
    wide = warped(logits_of(), Sampling(temperature=5.0, top_p=0.95))
    assert (wide > 0).sum() > SHORTLIST


# ------------------------------------------------------------------ greedy, ties, extremes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_rows_are_the_argmax_even_of_ties(dtype: torch.dtype) -> None:
    """bfloat16 logits tie often; the first of the largest is taken, in every batch."""
    rows = torch.stack([logits_of(s, 5003, 1.0) for s in range(50)]).to(dtype)
    expected = [int(np.argmax(row.float().numpy())) for row in rows]
    assert draw(rows, [Sampling()] * 50) == expected
    assert [draw(row[None], [Sampling()])[0] for row in rows] == expected
    if dtype == torch.bfloat16:
        assert any((row == row.max()).sum() > 1 for row in rows)


def test_greedy_beside_sampled_rows() -> None:
    rows = torch.stack([logits_of(s) for s in range(4)])
    how = [Sampling(), Sampling(temperature=5.0, seed=1), Sampling(top_k=3), Sampling(5.0, 400)]
    ids = draw(rows, how)
    assert ids[0] == int(rows[0].argmax()) and ids[2] == int(rows[2].argmax())
    assert ids[1] == draw(rows[1:2], how[1:2])[0]


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    """transformers keeps every token that ties with the k-th; here k is k."""
    ids = draws(torch.zeros(VOCAB), count=3000, temperature=1.0, top_k=3)
    assert len(set(ids)) == 3


def test_ties_at_the_top_are_drawn_equally() -> None:
    logits = torch.full((VOCAB,), -30.0)
    logits[[10, 500, 999]] = 4.0
    ways: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.99}, {}]
    for how in ways:
        counts = np.bincount(draws(logits, temperature=1.0, **how), minlength=VOCAB)
        assert chi_square(counts[[10, 500, 999]], np.full(3, DRAWS / 3)) < 5


@pytest.mark.parametrize("temperature", [1e-3, 1e-10, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("how", [{}, {"top_p": 0.9}, {"top_k": 7}, {"top_k": 600}], ids=str)
def test_a_tiny_temperature_is_greedy(temperature: float, how: dict[str, Any]) -> None:
    rows = torch.stack([logits_of(s) for s in range(20)])
    settings = [Sampling(temperature=temperature, seed=s, **how) for s in range(20)]
    assert draw(rows, settings) == rows.argmax(-1).tolist()


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.full((VOCAB,), float("-inf"))
    logits[[3, 998]] = 1.0
    assert set(draws(logits, count=3000, temperature=9.0)) == {3, 998}
    assert set(draws(logits, count=3000, temperature=9.0, top_k=500)) == {3, 998}
    assert set(draws(logits, count=3000, temperature=9.0, top_p=0.9999)) == {3, 998}


@pytest.mark.parametrize("uniform", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_unit_interval(uniform: float, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((VOCAB,), -200.0)  # probabilities that are zero in float32
    logits[[400, 700]] = 3.0
    monkeypatch.setattr(sampling, "uniforms", lambda s, p: np.full(len(s), uniform))
    for how in (Sampling(1.0), Sampling(1.0, top_p=0.9), Sampling(1.0, top_k=2)):
        assert draw(logits[None], [how]) == [400 if uniform == 0 else 700]


# ------------------------------------------------------------------ independence


def company() -> tuple[torch.Tensor, list[Sampling], list[int]]:
    """Rows of every kind, among them two that force the full sort."""
    rows = torch.stack([logits_of(s) for s in range(9)])
    how = [
        Sampling(),
        Sampling(1.0, seed=5),
        Sampling(1.0, top_k=5, seed=6),
        Sampling(5.0, top_p=0.97, seed=7),  # wide nucleus
        Sampling(1.0, top_p=0.9, seed=8),
        Sampling(5.0, top_k=700, seed=9),
        Sampling(0.8, top_k=20, top_p=0.8, seed=10),
        Sampling(2.0, seed=11),
        Sampling(),
    ]
    return rows, how, [3 * i for i in range(9)]


def test_a_draw_does_not_depend_on_the_company() -> None:
    rows, how, at = company()
    for shift in range(40):
        moved = [p + shift for p in at]
        together = draw(rows, how, moved)
        assert together == [
            draw(rows[i : i + 1], how[i : i + 1], moved[i : i + 1])[0] for i in range(9)
        ]
        order = np.random.default_rng(shift).permutation(9)
        shuffled = draw(rows[order], [how[i] for i in order], [moved[i] for i in order])
        assert shuffled == [together[i] for i in order]


def test_a_row_is_drawn_the_same_whether_or_not_a_neighbour_forces_the_sort() -> None:
    """With ties, the shortlist and the sort may order equal tokens differently."""
    tied = torch.round(logits_of(1, spread=0.5))
    wide = logits_of(2)
    for seed in range(100):
        how = [Sampling(1.0, top_k=30, seed=seed), Sampling(5.0, top_p=0.97, seed=seed)]
        assert draw(torch.stack([tied, wide]), how)[0] == draw(tied[None], how[:1])[0]


def test_seed_and_position_both_matter() -> None:
    row = logits_of(spread=0.5)[None]
    by_seed = {draw(row, [Sampling(1.0, seed=s)])[0] for s in range(50)}
    by_position = {draw(row, [Sampling(1.0)], [p])[0] for p in range(1, 51)}
    assert len(by_seed) > 30 and len(by_position) > 30


# ------------------------------------------------------------------ in the engine


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return small_decoder(vocab=600)


HOW: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "seed": 2},
    {"temperature": 1.3, "top_p": 0.9, "seed": 3},
    {"temperature": 4.0, "top_p": 0.98, "seed": 4},
    {"temperature": 2.0, "top_k": 400, "seed": 5},
    {},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.95, "seed": 8},
]


def sampled_requests() -> list[Request]:
    ids = np.random.default_rng(4).integers(0, 251, (8, 60))
    return [ask(i, ids[i, : 12 + 6 * i].tolist(), 30, ignore_eos=True, **HOW[i]) for i in range(8)]


def engine_run(
    decoder: Decoder, policy: str = "chunked", max_seqs: int = 8, pages: int = 500
) -> Outcome:
    limits = Limits(max_seqs=max_seqs, token_budget=100, chunk=25)
    runner = TorchRunner(decoder, pages, 8)
    return run(sampled_requests(), policy, pages=pages, page_size=8, limits=limits, runner=runner)


def test_the_same_tokens_at_batch_1_and_8_under_every_policy_and_preemption(
    decoder: Decoder,
) -> None:
    expected = engine_run(decoder, max_seqs=1).outputs
    assert all(len(set(ids)) > 10 for ids in expected.values())
    assert expected[0] != expected[6], "one seed on two prompts is two texts"
    for policy in ("static", "prefill-first", "chunked"):
        assert engine_run(decoder, policy).outputs == expected, policy
        squeezed = engine_run(decoder, policy, pages=30)
        assert squeezed.outputs == expected, f"{policy} with 30 pages"
        assert (squeezed.preemptions > 0) == (policy != "static")


def test_another_seed_is_another_text(decoder: Decoder) -> None:
    prompt = list(range(30))
    asked = [ask(i, prompt, 20, temperature=1.0, seed=i) for i in range(3)]
    runner = TorchRunner(decoder, 50, 16)
    texts = run(asked, pages=50, runner=runner).outputs
    assert len({tuple(ids) for ids in texts.values()}) == 3
