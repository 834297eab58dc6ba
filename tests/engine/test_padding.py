"""A step of decodes padded to a bucket: nothing changes but the time it takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from stepscope.engine.plan import Lap, StepPlan
from stepscope.engine.request import Request
from stepscope.models.decoder import Decoder
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import Observed, same_text, small_decoder
from tests.engine.test_forward import Bench, close, last, outcome, prefilled, whole

CONTEXTS = [9, 130, 17]


class Padded:
    """No graph at all: the padded step runs as it is."""

    kind = "cuda"
    pads = True

    def __init__(self, runner: TorchRunner, bucket: int | None) -> None:
        self.runner, self._bucket = runner, bucket

    def bucket(self, n: int) -> int | None:
        return self._bucket

    def run(
        self, tokens: torch.Tensor, positions: torch.Tensor, batch: Any, lap: Lap
    ) -> torch.Tensor:
        attention = self.runner.attention
        return self.runner.decoder.forward(tokens, positions, batch, attention, lambda phase: None)


@pytest.fixture(scope="module", params=["all", "windowed"])
def decoder(request: pytest.FixtureRequest) -> Decoder:
    """The second one's first layer sees 12 tokens."""
    made = small_decoder()
    if request.param == "windowed":
        made.spec = replace(made.spec, window=12, layer_pattern="sf")
        made.layers[0].local = True
    return made


def bench(decoder: Decoder, bucket: int | None) -> tuple[Bench, list[Request]]:
    made = Bench(decoder)
    running = prefilled(made, CONTEXTS)
    made.runner.graphs = Padded(made.runner, bucket)
    return made, running


def test_the_logits_are_the_same(decoder: Decoder) -> None:
    plain, running = bench(decoder, None)
    expected = plain.logits(*map(last, running))
    for bucket in (3, 4, 8):
        padded, running = bench(decoder, bucket)
        assert close(padded.logits(*map(last, running)), expected), bucket


def test_what_the_trash_page_holds_reaches_nobody(decoder: Decoder) -> None:
    made, running = bench(decoder, 8)
    expected = made.logits(*map(last, running))
    trash = made.runner.cache.layers[0].shape[0] // made.page_size - 1
    assert all(trash not in r.pages for r in running)
    made.runner.cache.poison([trash])
    assert torch.equal(made.logits(*map(last, running)), expected)
    for rows in made.runner.cache.layers:
        rows[trash * made.page_size :] = 1e4
    assert torch.equal(made.logits(*map(last, running)), expected)


def test_only_the_new_rows_and_the_trash_page_are_written(decoder: Decoder) -> None:
    made, running = bench(decoder, 8)
    pool = made.runner.cache.layers[0].shape[0] - made.page_size
    before = [rows.clone() for rows in made.runner.cache.layers]
    made.logits(*map(last, running))
    own = {
        r.pages[(n - 1) // 16] * 16 + (n - 1) % 16 for r, n in zip(running, CONTEXTS, strict=True)
    }
    for old, new in zip(before, made.runner.cache.layers, strict=True):
        same = (old == new) | (old.isnan() & new.isnan())
        changed = set((~same.all(1)).nonzero().flatten().tolist())
        assert changed == own | {pool}


def test_the_batch_looks_as_if_so_many_decoded(decoder: Decoder) -> None:
    """One group with a mask, even where nothing is ragged or one is much longer than the rest."""
    made, _ = bench(decoder, 4)
    for lengths in ([30, 30], [3000, 5, 5]):
        running = prefilled(made, lengths, first=20 + len(lengths))
        batch = made.runner.prepare(StepPlan(decodes=[last(r) for r in running]))
        assert batch.tokens.shape == batch.positions.shape == batch.attention.write_slots.shape
        assert batch.tokens.tolist()[len(lengths) :] == [0] * (4 - len(lengths))
        assert batch.positions.tolist()[len(lengths) :] == [0] * (4 - len(lengths))
        for view in (batch.attention.full, batch.attention.local):
            [group] = view.groups
            assert (group.first, group.last) == (0, 4) and group.mask is not None
            assert group.mask.shape == (4, 1, 1, group.length)
            assert (group.mask[3] == 0).sum() == 1, "a padded row sees one token"
        assert batch.attention.full.tokens == sum(lengths), "padding is not counted"


def test_a_full_bucket_of_equal_contexts_has_a_mask_too(decoder: Decoder) -> None:
    made, _ = bench(decoder, 2)
    running = prefilled(made, [30, 30], first=50)
    batch = made.runner.prepare(StepPlan(decodes=[last(r) for r in running]))
    assert [g.mask is not None for g in batch.attention.full.groups] == [True]
    made.runner.graphs = None
    batch = made.runner.prepare(StepPlan(decodes=[last(r) for r in running]))
    assert [g.mask is not None for g in batch.attention.full.groups] == [False]


def test_a_step_with_a_prefill_is_not_padded(decoder: Decoder) -> None:
    made, running = bench(decoder, 8)
    plan = StepPlan(decodes=[last(running[0])], prefills=[whole(made.request(9, 5))])
    assert made.runner.prepare(plan).tokens.shape[0] == 6


def test_the_pool_is_as_large_as_before() -> None:
    decoder = small_decoder()
    runner = TorchRunner(decoder, 10, 16)
    assert runner.cache.layers[0].shape[0] == 11 * 16, "and a page for what nobody reads"


def test_the_text_is_the_same(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the engine, with preemptions, freed pages poisoned."""
    plain, seen = outcome(decoder, "chunked", pages=22, forget=True)
    prepare = Observed.prepare

    def padding(self: Observed, plan: StepPlan) -> object:
        self.inner.graphs = Padded(self.inner, 8)
        return prepare(self, plan)

    monkeypatch.setattr(Observed, "prepare", padding)
    padded, _ = outcome(decoder, "chunked", pages=22, forget=True)
    assert padded.trace == plain.trace and padded.preemptions > 0
    assert same_text(plain.outputs, seen.gaps, padded.outputs) == []
