"""Every policy on a real (two-layer, fp32) model: when a token is computed never changes it."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from stepscope.engine.policies import POLICIES, policy_of
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.models.decoder import Decoder
from stepscope.runner.torch_runner import TorchRunner
from tests.engine.harness import Observed, Outcome, ask, run, same_text, small_decoder

# (shared beginning, own prompt, output): 5 requests run among pages for three of them.
SIZES = [(0, 50, 20), (40, 9, 18), (0, 30, 24), (40, 12, 9), (0, 3, 20), (40, 20, 16), (0, 33, 12)]
PAGE = 16
PREEMPTIVE = ["priority,preempt=yes", "srpt,by=predicted,sigma=1", "mlfq,quantum=8,idle_s=0"]
TEXTS = [*POLICIES, *PREEMPTIVE, "chunked,admission=peak", "chunked,admission=optimistic,ratio=0"]


def requests() -> list[Request]:
    draw = np.random.default_rng(4)
    head = draw.integers(0, 251, 40)
    asked = []
    for i, (shared, own, most) in enumerate(SIZES):
        tokens = [*head[:shared], *draw.integers(0, 251, own)]
        request = ask(i, [int(t) for t in tokens], most, arrival_ns=40 * i)
        request.record.client, request.record.priority = f"client {i % 2}", i % 3
        asked.append(request)
    return asked


@cache
def decoder() -> Decoder:
    return small_decoder()


def outcome(text: str, pages: int, max_seqs: int) -> tuple[Outcome, Observed]:
    observed = Observed(TorchRunner(decoder(), pages, PAGE))
    limits = Limits(max_seqs=max_seqs, token_budget=48, chunk=24)
    done = run(
        requests(), policy_of(text), pages=pages, page_size=PAGE, limits=limits, runner=observed
    )
    return done, observed


@cache
def reference() -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    done, observed = outcome("chunked", 100, 1)
    return done.outputs, observed.gaps


@pytest.mark.parametrize("text", TEXTS)
def test_the_text_is_the_same(text: str) -> None:
    expected, gaps = reference()
    assert {len(ids) for ids in expected.values()} == {most for *_, most in SIZES}
    ties: list[str] = []
    preemptions = 0
    for pages, max_seqs in ((100, 2), (12, 5)):
        done, _ = outcome(text, pages, max_seqs)
        ties += same_text(expected, gaps, done.outputs, allowed=1.0)
        preemptions += done.preemptions
    print(f"{text}: {len(ties)} ties {ties}, {preemptions} preemptions")
    assert len(ties) <= 1
    assert preemptions or policy_of(text).admission.name in ("reserve-max", "peak")
