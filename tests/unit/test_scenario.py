"""Scenario files: what they resolve to, and that every mistake is a sentence with its place."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean, pstdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepscope.errors import UsageError
from stepscope.scenario import (
    Scenario,
    apply_overrides,
    load_scenario,
    parse_policy,
    parse_scenario,
)
from stepscope.workload import arrival_times, derived_seed, draw

FULL = """
name = "quickstart"
description = "prefills stall decodes"
[model]
name = "dummy:llama"
dtype = "bf16"
layers = 2
[engine]
policy = ["prefill-first", "chunked,chunk=64"]
kv_tokens = 1000
token_budget = 256
[sampling]
max_tokens = 8
temperature = 0.5
seed = 3
[workload]
requests = 6
rate_per_s = 2
prompts = ["a", "b"]
[[request]]
at_s = 0.0
prompt_tokens = 1500
max_tokens = 4
ignore_eos = true
client = "long"
[[request]]
at_s = 0.5
count = 3
every_s = 0.25
prompt = "hello"
[slo]
ttft_ms = 1000
itl_ms = 100
"""
SMALL = "[workload]\nrequests = 4\nrate_per_s = 1\nprompt_tokens = 8\n"


def scenario(text: str = SMALL, source: str = "s.toml") -> Scenario:
    return parse_scenario(text, source)


def test_a_full_scenario() -> None:
    full = scenario(FULL)
    assert (full.name, full.model.dtype, full.model.dimensions) == (
        "quickstart",
        "bf16",
        {"layers": 2},
    )
    assert full.engine.policies == ("prefill-first", "chunked,chunk=64")
    assert full.engine.total_pages(1) == 63
    assert full.slo.ttft_ms == 1000
    assert len(full.requests) == 10
    long = next(r for r in full.requests if r.client == "long")
    assert (long.prompt, long.prompt_tokens, long.max_tokens) == (None, 1500, 4)
    assert long.ignore_eos
    assert not long.chat  # a synthetic prompt has exactly its tokens, no template around it
    hello = [r for r in full.requests if r.prompt == "hello"]
    assert [r.arrival_ns for r in hello] == [500_000_000, 750_000_000, 1_000_000_000]
    assert all(r.chat and r.max_tokens == 8 and r.temperature == 0.5 for r in hello)


def test_ids_follow_arrivals_and_seeds_differ() -> None:
    requests = scenario(FULL).requests
    assert [r.id for r in requests] == list(range(10))
    assert [r.arrival_ns for r in requests] == sorted(r.arrival_ns for r in requests)
    assert len({r.seed for r in requests}) == 10


def test_the_same_file_gives_the_same_requests_and_another_seed_others() -> None:
    first, again = scenario(FULL), scenario(FULL)
    assert first.requests == again.requests
    assert first.sha256() == again.sha256()
    assert apply_overrides(first, {"workload.seed": 9}).sha256() != first.sha256()


def test_the_hash_does_not_depend_on_the_engine() -> None:
    base = scenario(FULL)
    other = apply_overrides(base, {"engine.max_seqs": "2", "engine.policy": "chunked"})
    assert other.sha256() == base.sha256()


def test_output_lengths_do_not_move_arrivals_or_prompts() -> None:
    fixed = scenario(SMALL.replace("= 8", "= [1, 99]") + "output_tokens = 5\n")
    drawn = scenario(SMALL.replace("= 8", "= [1, 99]") + "output_tokens = [3, 7]\n")
    same = [replace(r, max_tokens=5) for r in drawn.requests]
    assert tuple(same) == fixed.requests
    assert all(3 <= r.max_tokens <= 7 for r in drawn.requests)


def test_prompts_give_the_number_of_requests_and_repeat() -> None:
    text = '[workload]\narrivals = "burst"\nprompts = ["a", "b"]\n'
    assert [r.prompt for r in scenario(text).requests] == ["a", "b"]
    more = scenario(text + "requests = 5\n").requests
    assert [r.prompt for r in more] == ["a", "b", "a", "b", "a"]
    assert {r.arrival_ns for r in more} == {0}


# ---------------------------------------------------------------- arrivals


def gaps(process: str, rate: float, cv: float = 2.0) -> list[float]:
    times = arrival_times(process, 20_001, rate, cv, Random(1))
    return [b - a for a, b in pairwise(times)]


@pytest.mark.parametrize(
    ("process", "cv", "expected"), [("poisson", 2, 1), ("gamma", 2, 2), ("gamma", 0.5, 0.5)]
)
def test_gaps_have_the_rate_and_the_spread_asked_for(
    process: str, cv: float, expected: float
) -> None:
    found = gaps(process, 4.0, cv)
    assert fmean(found) == pytest.approx(0.25, rel=0.06)
    assert pstdev(found) / fmean(found) == pytest.approx(expected, rel=0.06)


def test_uniform_gaps_are_equal_and_a_burst_has_none() -> None:
    assert arrival_times("uniform", 3, 4.0, 2.0, Random(1)) == [0, 0.25, 0.5]
    assert arrival_times("burst", 3, None, 2.0, Random(1)) == [0, 0, 0]


@given(st.integers(1, 50), st.integers(0, 50), st.integers())
def test_a_draw_is_inside_its_span(low: int, width: int, seed: int) -> None:
    assert low <= draw((low, low + width), Random(seed)) <= low + width


def test_derived_seeds_are_fixed_for_good() -> None:
    # printf '0/0/0' | sha256sum, the first 16 hex digits, halved
    assert derived_seed("0/0", 0) == 3051931488724851722


# ---------------------------------------------------------------- files beside the scenario


def test_prompts_and_traces_are_read_from_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("one\n\n two \n")
    (tmp_path / "t.csv").write_text(
        "client,arrival_s,prompt_tokens,output_tokens\na,0,5,6\nb,3,7,8\nc,4,9,9\n"
    )
    file = tmp_path / "s.toml"
    file.write_text('[workload]\nprompts_file = "p.txt"\narrivals = "burst"\n')
    assert [r.prompt for r in load_scenario(str(file)).requests] == ["one", "two"]
    file.write_text('[workload]\ntrace = "t.csv"\nlimit = 2\nspeedup = 2\nstart_s = 1\n')
    loaded = load_scenario(str(file))
    assert [(r.arrival_ns, r.prompt_tokens, r.max_tokens, r.client) for r in loaded.requests] == [
        (1_000_000_000, 5, 6, "a"),
        (2_500_000_000, 7, 8, "b"),
    ]
    assert loaded.name == "s"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ("x,1,1", r"t\.csv line 2: arrival_s 'x' is not a number"),
        ("0,0,1", r"line 2: prompt_tokens 0 is outside"),
        ("0,1.5,1", r"line 2: prompt_tokens 1.5 is not a whole"),
        ("nan,1,1", r"line 2: arrival_s nan is outside"),
        ("0,1", r"line 2: output_tokens '' is not a number"),
        ("", r"holds no request"),
    ],
)
def test_a_bad_trace_names_file_and_line(tmp_path: Path, row: str, sentence: str) -> None:
    (tmp_path / "t.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{row}\n")
    with pytest.raises(UsageError, match=sentence):
        scenario('[workload]\ntrace = "t.csv"\n', str(tmp_path / "s.toml"))


def test_a_trace_without_its_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt\n0,1\n")
    with pytest.raises(UsageError, match=r"line 1 has no column prompt_tokens"):
        scenario('[workload]\ntrace = "t.csv"\n', str(tmp_path / "s.toml"))


# ---------------------------------------------------------------- mistakes

ONE = "[[request]]\nprompt_tokens = 8\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("\n[model\n", r"s\.toml is not valid TOML.*line 2"),
        ("[engin]\n", r"s\.toml: engin is not known; did you mean engine\?"),
        ("[engine]\nmax_seq = 1\n", r"engine\.max_seq is not known; did you mean max_seqs\?"),
        ('[engine]\nmax_seqs = "8"\n', r"engine\.max_seqs is '8', expected a whole number"),
        ("[engine]\nmax_seqs = 0\n", r"max_seqs is 0, must be at least 1"),
        ("[engine]\nmax_seqs = true\n", r"max_seqs is True, expected a whole number"),
        ("[engine]\nmax_seqs = 99999999999\n", r"must be .*at most 65,536"),
        ("[engine]\nkv_tokens = 5\nkv_pages = 5\n", r"engine has both kv_tokens and kv_pages"),
        ("[engine]\npolicy = []\n", r"engine\.policy is \[\], expected a list"),
        ('[engine]\npolicy = ["a", "a"]\n', r"expected a list of different policies"),
        ('[engine]\npolicy = "a,b"\n', r"engine\.policy: policy 'a,b': 'b' is not key=value"),
        ("engine = 3\n", r"engine is 3, expected a table"),
        ("request = {}\n", r"write \[\[request\]\]"),
        ("request = [3]\n", r"request\.0 is 3, expected a table"),
        ("name = 3\n", r"name is not text"),
        ("[sampling]\ntop_p = 0\n", r"top_p is 0, must be more than 0 and at most 1"),
        ("[sampling]\ntop_p = 1.1\n", r"top_p is 1\.1"),
        ("[sampling]\ntemperature = nan\n", r"temperature is nan, expected a finite number"),
        ("[sampling]\ntemperature = -1\n", r"temperature is -1, must be at least 0"),
        ("[slo]\nitl_ms = inf\n", r"itl_ms is inf, expected a finite number"),
        ("[slo]\nitl_ms = 0\n", r"itl_ms is 0, must be more than 0"),
        ("[model]\nlayers = 3\n", r"model\.layers can be set for a model named dummy"),
        ('[model]\nname = ""\n', r"expected text that is not empty"),
        ("[workload]\nrequests = 0\n", r"requests is 0, must be at least 1"),
        ("[workload]\nrequests = 3\n", r"needs one of prompts"),
        (SMALL + "rate_per_s = 2\n", r"not valid TOML"),
        (SMALL.replace("= 1", "= -1"), r"rate_per_s is -1, must be more than 0"),
        (SMALL.replace("= 1", "= 1e-8"), r"the last request arrives after"),
        (SMALL.replace("= 8", "= [9, 8]"), r"expected a whole number or \[least, most\]"),
        (SMALL.replace("= 8", "= [-9, 8]"), r"prompt_tokens is \[-9, 8\], must be at least 1"),
        (SMALL.replace("requests = 4", ""), r"needs requests"),
        (SMALL.replace("rate_per_s = 1", ""), r"needs rate_per_s"),
        (SMALL + 'arrivals = "poison"\n', r"did you mean poisson\?"),
        (SMALL + 'prompts = ["a"]\n', r"workload has both prompts and prompt_tokens"),
        (SMALL + "limit = 3\n", r"limit is for a trace"),
        ('[workload]\nprompts_file = "no.txt"\narrivals = "burst"\n', r"cannot read no\.txt"),
        ('[workload]\ntrace = "no.csv"\nrequests = 1\n', r"workload\.requests and the trace"),
        ("[[request]]\nat_s = 1\n", r"request\.0 needs prompt or prompt_tokens"),
        (ONE + 'prompt = "x"\n', r"request\.0 has both prompt and prompt_tokens"),
        (ONE + ONE + "count = -1\n", r"request\.1\.count is -1"),
        (ONE + "count = 1000000\n" + ONE, r"more than 1,000,000 requests"),
        ('name = "nothing"\n', r"sends no request"),
        ("", r"sends no request"),
        ("[" * 100_000, r"not valid TOML"),
    ],
)
def test_a_mistake_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as error:
        scenario(text)
    assert "\n" not in str(error.value).strip()
    assert len(str(error.value)) < 300


def test_a_huge_integer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"temperature is 1000.*finite"):
        scenario(ONE + "[sampling]\ntemperature = 1" + "0" * 400 + "\n")


@given(st.text(max_size=60))
def test_any_text_is_a_scenario_or_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        scenario(text)


def test_an_unknown_scenario_suggests_near_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios").mkdir()
    (tmp_path / "scenarios" / "my-steady.toml").write_text(SMALL)
    assert load_scenario("my-steady").name == "my-steady"
    with pytest.raises(UsageError, match=r"no scenario 'my-stedy'; did you mean my-steady\?"):
        load_scenario("my-stedy")
    with pytest.raises(UsageError, match=r"cannot read scenarios \("):
        load_scenario("scenarios")


def test_a_scenario_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="not UTF-8"):
        load_scenario(str(tmp_path / "s.toml"))


# ---------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("engine.max_seqs", "8", 8),
        ("engine.max_seqs", 8, 8),
        ("engine.policy", "chunked,chunk=64", ("chunked,chunk=64",)),
        ("engine.policy", '["a", "b"]', ("a", "b")),
        ("workload.prompt_tokens", "[2, 3]", (2, 3)),
        ("workload.arrivals", "burst", "burst"),
        ("workload.client", "7", "7"),
        ("workload.client", "true", "true"),
        ("sampling.ignore_eos", "true", True),
        ("slo.itl_ms", "50", 50.0),
        ("name", "12", "12"),
        ("request.0.at_s", "2", 2.0),
        ("workload.client", "x\nname = 2", "x\nname = 2"),
    ],
)
def test_an_override_is_a_toml_value_or_a_bare_text(key: str, value: Any, expected: Any) -> None:
    changed = apply_overrides(scenario(SMALL + ONE), {key: value})
    assert changed.origins()[key] == (expected, "--set")


def test_an_override_leaves_the_scenario_it_came_from_alone() -> None:
    base = scenario()
    apply_overrides(base, {"engine.max_seqs": "8"})
    assert base.engine.max_seqs == 16
    assert base.origins()["engine.max_seqs"] == (16, "default")
    assert base.origins()["workload.requests"] == (4, "file")


def test_an_override_takes_the_place_of_what_excludes_it() -> None:
    changed = apply_overrides(scenario(), {"workload.prompts": ["x"]}, origin="--prompt")
    assert {r.prompt for r in changed.requests} == {"x"}
    assert changed.origins()["workload.prompts"].origin == "--prompt"
    assert changed.origins()["workload.prompt_tokens"] == (None, "default")


def test_none_takes_a_key_out() -> None:
    changed = apply_overrides(scenario(SMALL + "chat = false\n"), {"workload.chat": None})
    assert changed.origins()["workload.chat"] == (True, "default")


@pytest.mark.parametrize(
    ("key", "value", "sentence"),
    [
        ("engine.max_seq", "8", r"--set engine\.max_seq is not known; did you mean max_seqs"),
        ("engin.max_seqs", "8", r"did you mean engine\.max_seqs"),
        ("engine.max_seqs", "x", r"--set engine\.max_seqs is 'x', expected a whole number"),
        ("engine.max_seqs", "inf", r"--set engine\.max_seqs is inf"),
        ("engine.max_seqs.x", "1", r"--set engine\.max_seqs\.x is not known"),
        ("request.5.at_s", "1", r"there are 0 \[\[request\]\]"),
        ("", "1", r"--set  is not known"),
        ("engine", "1", r"--set engine is not known"),
    ],
)
def test_a_bad_override_is_named_as_such(key: str, value: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        apply_overrides(scenario(), {key: value})


def test_a_scenario_as_dict_is_json_and_names_its_requests() -> None:
    import json

    resolved = json.loads(json.dumps(scenario(FULL).to_dict()))
    assert resolved["num_requests"] == 10
    assert resolved["requests_sha256"] == scenario(FULL).sha256()
    assert resolved["engine.policy"] == ["prefill-first", "chunked,chunk=64"]


# ---------------------------------------------------------------- policies


def test_a_policy_is_a_name_and_settings() -> None:
    assert parse_policy("chunked") == ("chunked", {})
    assert parse_policy("x-1, a=1,b=-1.5 ,c=text,d=1e3") == (
        "x-1",
        {"a": 1, "b": -1.5, "c": "text", "d": 1000.0},
    )
    assert type(parse_policy("p,a=1")[1]["a"]) is int


@pytest.mark.parametrize(
    "text", ["", ",a=1", "a=1", "p,", "p,a", "p,a=", "p,=1", "p,a=1,a=2", "p,a=nan"]
)
def test_a_policy_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UsageError, match="policy"):
        parse_policy(text)
