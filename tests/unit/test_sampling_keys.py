"""How tokens are drawn and where texts stop, as a scenario says it: keys, ranges, refusals."""

from __future__ import annotations

from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.report.console import token_table
from stepscope.runner.replay import Replay
from stepscope.scenario import Scenario, apply_overrides, parse_scenario

WORK = '[workload]\nprompts = ["a", "b"]\narrivals = "burst"\n'
EVERY = """
[sampling]
min_p = 0.1
repetition_penalty = 1.2
presence_penalty = 0.5
frequency_penalty = -0.25
logit_bias = { 15 = -3.5, "7" = 2 }
logprobs = 3
min_tokens = 4
stop = ["\\n\\n", "User:"]
stop_ids = [1, 2]
"""
RESOLVED: dict[str, Any] = {
    "min_p": 0.1,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "logit_bias": ((7, 2.0), (15, -3.5)),
    "logprobs": 3,
    "min_tokens": 4,
    "stop": ("\n\n", "User:"),
    "stop_ids": (1, 2),
}


def scenario(text: str) -> Scenario:
    return parse_scenario(text, "t.toml")


def test_every_key_reaches_the_requests_and_the_engine() -> None:
    made = scenario(WORK + EVERY)
    sampling = Replay([*made.requests], FakeTokenizer(), 100).poll(0)[0].sampling  # type: ignore[arg-type]
    for name, value in RESOLVED.items():
        assert getattr(made.requests[0], name) == value
        assert getattr(sampling, name) == value
        assert made.origins()[f"sampling.{name}"] == (value, "file")


class FakeTokenizer:
    def encode(self, text: str) -> list[int]:
        return [1] * len(text)

    chat = encode


def test_a_request_overrides_what_the_sampling_section_says() -> None:
    made = scenario(
        EVERY
        + '[[request]]\nprompt = "a"\nstop = "."\nstop_ids = []\nlogit_bias = {}\nmin_p = 0\n'
        + '[[request]]\nprompt = "b"\nlogprobs = 0\nseed = 11\n'
        + '[[request]]\nprompt = "c"\nstop = []\ncount = 2\nseed = -1\n'
    )
    first, second, *last = made.requests
    assert (first.stop, first.stop_ids, first.logit_bias, first.min_p) == ((".",), (), (), 0)
    assert first.repetition_penalty == 1.2 and first.logprobs == 3
    assert (second.logprobs, second.stop, second.seed) == (0, ("\n\n", "User:"), 11)
    assert [(r.stop, r.seed) for r in last] == [((), -1)] * 2
    assert first.seed not in (11, -1, 0)


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        (("sampling.stop", "###"), ("###",)),
        (("sampling.stop", '["a", "b"]'), ("a", "b")),
        (("sampling.stop_ids", "[3]"), (3,)),
        (("sampling.logit_bias", '{"5" = 1}'), ((5, 1.0),)),
        (("sampling.logit_bias", "{5 = -1.5, 6 = 2}"), ((5, -1.5), (6, 2.0))),
        (("sampling.logprobs", "0"), 0),
        (("sampling.min_p", "0.25"), 0.25),
    ],
)
def test_set_takes_them(pair: tuple[str, str], value: Any) -> None:
    made = apply_overrides(scenario(WORK), dict([pair]))
    assert made.origins()[pair[0]] == (value, "--set")
    assert getattr(made.requests[0], pair[0].split(".")[1]) == value


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("min_p = 1.5", "sampling.min_p is 1.5, must be at least 0 and at most 1"),
        ("repetition_penalty = 0", "must be more than 0 and at most 10"),
        ("presence_penalty = -11", "must be at least -10"),
        ("frequency_penalty = 'x'", "expected a number"),
        ("logprobs = 21", "must be at least 0 and at most 20"),
        ("logprobs = true", "expected a whole number"),
        ("min_tokens = -1", "must be at least 0"),
        ("stop = ['']", "expected a list of texts, none of them empty"),
        ("stop = ''", "expected a list of texts, none of them empty"),
        ("stop = 3", "expected a list of texts"),
        ("stop_ids = [1.5]", "expected a list of token ids"),
        ("stop_ids = 7", "expected a list of token ids"),
        ("stop_ids = [-1]", "expected a list of token ids"),
        ("logit_bias = [1]", "expected a table of token id = bias between -100 and 100"),
        ("logit_bias = { x = 1 }", "expected a table of token id = bias"),
        ("logit_bias = { 5 = 101 }", "expected a table of token id = bias"),
        ("logit_bias = { 5 = inf }", "expected a finite number"),
        ("logit_bias = { '05' = 1, 5 = 1 }", "expected a table of token id = bias"),
        ("logit_bias = { 99999999999 = 1 }", "expected a table of token id = bias"),
        ("min_tokens = 65", "t.toml: min_tokens 65 is more than max_tokens 64"),
        ("minp = 0.1", "sampling.minp is not known"),
    ],
)
def test_mistakes_are_told(line: str, words: str) -> None:
    with pytest.raises(UsageError) as error:
        scenario(f"{WORK}[sampling]\n{line}\n")
    assert words in str(error.value) and "\n" not in str(error.value)


def test_requests_without_the_new_settings_keep_their_identity() -> None:
    """A run recorded before they existed still counts as the same workload."""
    old = scenario(WORK + "[sampling]\ntop_k = 5\n")
    # Computed by the version that knew none of them.
    assert old.sha256() == "cfd6ca57409cdef64f2cc0dd66beea9426fbc73390f19862831a2a9f44f5f90f"
    for name, value in RESOLVED.items():
        changed = apply_overrides(old, {f"sampling.{name}": _toml(value)})
        assert changed.sha256() != old.sha256(), name


def _toml(value: Any) -> Any:
    if isinstance(value, tuple) and isinstance(value[0], tuple):
        return {str(token): bias for token, bias in value}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("logit_bias = { 100 = 1 }", "request 0: logit_bias names token 100 and the vocabulary"),
        ("stop_ids = [3, 100]", "request 0: stop_ids names token 100 and the vocabulary has 100"),
        ('stop = "x"', "request 0: this model has no tokenizer, so it makes no text"),
    ],
)
def test_what_the_model_cannot_do_fails_that_request_alone(how: str, words: str) -> None:
    made = scenario(
        f"[[request]]\nprompt_tokens = 4\n{how}\n[[request]]\nprompt_tokens = 4\nstop_ids = [99]\n"
    )
    first, second = Replay(made.requests, None, 100).poll(0)
    assert words in str(first.record.error)
    assert second.record.error is None


def test_the_token_table_shows_logprobs_where_they_were_asked_for() -> None:
    from stepscope.analyze import analyze
    from stepscope.records import Sample
    from tests.synthetic import make_run

    recorded = make_run(batch=1)
    analysis = analyze(recorded)
    plain = Sample(0, "p", "ab", [5, 6], ["a", "b"])
    recorded.meta.samples = [plain]
    assert "logprob" not in [str(c.header) for c in token_table(recorded, analysis).columns]
    plain.logprobs, plain.top_ids, plain.top_logprobs = [-0.5, -12.25], [[], []], [[], []]
    column = token_table(recorded, analysis).columns[-1]
    assert str(column.header) == "logprob"
    assert [str(cell) for cell in column.cells] == ["-0.500", "-12.250"]
