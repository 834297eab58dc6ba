"""Whatever is asked and however it is set: overlap changes no text, loses no step and no page."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.plan import StepPlan
from stepscope.engine.policies import POLICIES, Policy, policy_of
from stepscope.engine.request import Request, TokenLogprobs
from stepscope.engine.scheduler import Limits
from stepscope.records import PHASES
from tests.engine.harness import (
    VOCAB,
    Clock,
    ContentRunner,
    Outcome,
    alone,
    ask,
    build,
    finish,
    next_token,
)

EOS: list[list[int]] = [[], [17, 80, 113, 200], list(range(0, VOCAB, 4))]
PREFIXES = ("off", "hash", "radix")


class Odd(ContentRunner):
    """Logits of some (request, context) are not finite, and log-probabilities name their place."""

    def __init__(self, page_size: int, broken: set[tuple[int, int]]) -> None:
        super().__init__(page_size)
        self.broken = broken

    def _tokens(self, piece: Any) -> list[int]:
        return [max(token, 0) for token in super()._tokens(piece)]

    def sample(self, logits: list[list[int]], batch: StepPlan) -> list[int]:
        sampled = [s for s in batch.slices if s.samples]
        ids = [
            -1 if (s.request.id, s.context) in self.broken else next_token(tokens)
            for s, tokens in zip(sampled, logits, strict=True)
        ]
        self._sampled.update(zip((s.request for s in sampled), ids, strict=True))
        return ids

    def logprobs(self, batch: StepPlan) -> list[TokenLogprobs]:
        asked = [s for s in batch.slices if s.samples and s.request.sampling.logprobs is not None]
        return [TokenLogprobs(float(s.context), [], []) for s in asked]


class Jumpy(Clock):
    """Stands still, or jumps ahead."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.random = random

    def now(self) -> int:
        self.ns += self.random.choice([0, 0, 1, 5, 1_000, 10_000_000])
        return self.ns


@dataclass
class Case:
    """One draw of everything; made anew for each run, as requests carry what became of them."""

    seed: int

    def requests(self) -> list[Request]:
        random = Random(self.seed)
        shared = [random.randrange(VOCAB) for _ in range(40)]
        return [self._request(random, i, shared) for i in range(random.randrange(1, 8))]

    def _request(self, random: Random, id: int, shared: list[int]) -> Request:
        length = random.choice([1, 1, 2, 5, 9, 17, 33, random.randrange(1, 60)])
        common = random.choice([0, random.randrange(min(length, 40) + 1)])
        prompt = shared[:common] + [(31 * id + 7 * k + 1) % VOCAB for k in range(common, length)]
        most = random.choice([1, 1, 2, 3, 12, 25, 40])
        text = alone(prompt, most)
        choices: list[dict[str, Any]] = [
            {"repetition_penalty": 1.5},
            {"min_tokens": random.randrange(most + 1)},
            {"logprobs": 0},
            {"ignore_eos": True},
            {"stop": (str(random.choice(text)),)},
            {"stop": (f"{text[-1]} {text[0]}", f"{text[0]} {text[-1]}")},
            {"stop_ids": (random.choice(text),)},
        ]
        how: dict[str, Any] = {}
        for choice in choices:
            if random.random() < 0.25:
                how |= choice
        error = "refused" if random.random() < 0.05 else None
        arrival = random.choice([0, 40 * id, random.randrange(3_000)])
        request = ask(id, prompt, most, arrival, error, **how)
        request.record.priority, request.record.client = random.randrange(3), random.choice("ab")
        return request

    def options(self, requests: list[Request]) -> dict[str, Any]:
        random = Random(self.seed + 1)
        size = random.choice([1, 1, 2, 4, 16, 256])
        need = max(-(-(r.prompt_tokens + r.max_tokens) // size) for r in requests)
        return {
            "page_size": size,
            "pages": max(1, need + random.choice([-1, 0, 1, 2, need, 1000])),
            "limits": Limits(
                max_seqs=random.choice([1, 2, 3, 16]),
                token_budget=random.choice([16, 64, 512]),
                chunk=random.choice([1, 5, 16, 512]),
                max_context=random.choice([8192, 8192, 30, 12]),
            ),
            "eos": random.choice(EOS),
            "prefix": random.choice(PREFIXES),
            "swap": random.random() < 0.5,
            "swap_pages": random.choice([None, None, 0, 1, 3]),
        }

    def policy(self) -> Policy:
        random = Random(self.seed + 2)
        text = random.choice(sorted(POLICIES))
        if random.random() < 0.3:
            text += f",admission={random.choice(['reserve-max', 'optimistic', 'peak'])}"
        if random.random() < 0.3:
            text += f",victim={random.choice(['lowest-priority', 'fewest-output'])}"
        return policy_of(text + (",preempt=yes" if text.startswith("priority") else ""))

    def run(self, overlap: bool, stop_at: int | None = None) -> Outcome:
        requests = self.requests()
        options, random = self.options(requests), Random(self.seed + 3)
        broken = {(r.id, r.prompt_tokens + random.randrange(r.max_tokens)) for r in requests}
        runner = Odd(options["page_size"], {b for b in broken if random.random() < 0.15})
        made = build(
            requests, self.policy(), runner=runner, clock=Jumpy(random), overlap=overlap, **options
        )
        if stop_at is not None:
            engine = made.engine
            engine.on_step = lambda row: setattr(
                engine, "stopping", engine.stopping or row.step >= stop_at
            )
        return finish(made)


def check(done: Outcome) -> None:
    for row in done.steps:
        assert sum(row.phase_ns(name) or 0 for name in PHASES) == row.wall_ns
    assert all(a.end_ns == b.begin_ns for a, b in pairwise(done.steps))
    landed = [row.result_step for row in done.steps if row.result_step is not None]
    assert landed == [row.step for row in done.steps if row.num_decode_requests is not None]
    check_tokens(done)
    check_parts(done)
    pool = done.scheduler.pool
    assert pool.used == 0 and pool.free + pool.idle == pool.total
    assert done.scheduler.memory.host.used == 0


def check_tokens(done: Outcome) -> None:
    """Requests, rows, parts and the client tell of the same tokens."""
    given_out: dict[int, int] = dict.fromkeys(done.requests, 0)
    for outputs in done.emitted:
        for out in outputs:
            given_out[out.request.id] += 1
            if out.request.sampling.logprobs is not None:
                assert out.logprobs is not None
                position = out.request.prompt_tokens + given_out[out.request.id] - 1
                assert out.logprobs.logprob == position, "of another token"
    told = dict.fromkeys(done.requests, 0)
    for part in done.parts:
        told[part.request] += part.output_tokens
    assert told == given_out == {i: len(out) for i, out in done.outputs.items()}
    assert told == {i: record.output_tokens for i, record in done.records.items()}
    assert sum(row.num_output_tokens or 0 for row in done.steps) == sum(told.values())
    assert not any(r.pending or r.pages or r.host_pages for r in done.requests.values())


def check_parts(done: Outcome) -> None:
    """They tell every slice of every step once; what they do not tell is extra."""
    steps = [row.step for row in done.steps if row.num_decode_requests is not None]
    slices = {
        (request, step): count
        for step, row in zip(steps, done.scheduler.slices, strict=True)
        for request, _, _, count in row
    }
    told = [
        (part.request, step)
        for part in done.parts
        for step in range(part.first_step, part.last_step + 1)
    ]
    assert len(set(told)) == len(told) and set(told) <= slices.keys()
    extra = sum(row.num_extra_tokens or 0 for row in done.steps)
    assert extra == sum(count for where, count in slices.items() if where not in set(told))


def text_of(done: Outcome) -> dict[int, str]:
    text: dict[int, str] = dict.fromkeys(done.requests, "")
    for outputs in done.emitted:
        for out in outputs:
            text[out.request.id] += out.piece
    return text


def ends(done: Outcome) -> dict[int, tuple[str | None, str | None]]:
    return {i: (r.finish_reason, r.error) for i, r in done.records.items()}


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9))
def test_overlap_changes_nothing_that_a_client_sees(seed: int) -> None:
    plain, overlapped = Case(seed).run(False), Case(seed).run(True)
    for done in (plain, overlapped):
        check(done)
        assert all(reason for reason, _ in ends(done).values())
    assert overlapped.outputs == plain.outputs
    assert text_of(overlapped) == text_of(plain)
    assert ends(overlapped) == ends(plain)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 40), st.booleans())
def test_an_interrupt_leaves_nothing_behind(seed: int, step: int, overlap: bool) -> None:
    check(Case(seed).run(overlap, step))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("least,tokens", [(0, 1), (1, 2), (2, 3)])
def test_a_pending_token_does_not_count_for_min_tokens(
    least: int, tokens: int, overlap: bool
) -> None:
    """Every piece of its text has the space that stops it."""
    done = finish(build([ask(0, 4, 5, stop=(" ",), min_tokens=least)], overlap=overlap))
    assert (done.records[0].finish_reason, len(done.outputs[0])) == ("stop", tokens)
