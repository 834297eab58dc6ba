"""Policies from the command line: one workload, the same text, other orders."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from stepscope.engine.policies import POLICIES
from stepscope.scenario import load_scenario
from stepscope.store import read_run
from tests.cli.conftest import TINY, Result

Call = Callable[..., Result]
SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
# So few requests that a run keeps the text of all of them.
FEW = {"request.0.count": 3, "request.1.count": 1, "request.2.count": 4}
AT_ONCE = {"request.1.at_s": 0, "request.2.at_s": 0, "request.2.every_s": 0}
SMALL = {"model.hidden": 64, "model.intermediate": 128, "engine.threads": 1, "engine.max_seqs": 2}


def test_every_policy_of_the_scenario_says_the_same(stepscope: Call, tmp_path: Path) -> None:
    settings = [x for k, v in {**FEW, **AT_ONCE, **SMALL}.items() for x in ("--set", f"{k}={v}")]
    own = "longest_first.py:longest_first"
    policies = [*load_scenario(str(SCENARIOS / "policies.toml")).engine.policies, own]
    given = [x for text in policies for x in ("--policy", text)]
    out = tmp_path / "out"
    result = stepscope(
        "run", SCENARIOS / "policies.toml", *settings, *given, "--no-ceilings", "-o", out
    )
    assert result.code == 0, result.err
    runs = {run.meta.policy: run for run in map(read_run, sorted(out.iterdir()))}
    assert set(runs) == set(policies)
    said = {p: {s.request: s.token_ids for s in run.meta.samples} for p, run in runs.items()}
    assert all(text == said["chunked"] and len(text) == 8 for text in said.values())
    orders = {
        policy: sorted(range(8), key=lambda i, rows=run.requests: rows[i].admitted_ns or 0)
        for policy, run in runs.items()
    }
    assert orders["chunked"] == [*range(8)] != orders[own]
    assert runs["priority,preempt=yes"].meta.engine["policy"]["preempt"] == "yes"


def test_list_policies(stepscope: Call) -> None:
    listed = stepscope("list", "policies")
    assert listed.code == 0
    for word in [*POLICIES, "PATH.py:NAME", ",admission=", "fewest-output", ",by=oracle"]:
        assert word in listed.out


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    "text,words",
    [
        ("lifo", ("there is no policy 'lifo'", "chunked", "PATH.py:NAME")),
        ("vtc,w_in=-1", ("w_in=-1", "a number from 0")),
        ("chunked,admission=peek", ("admission=peek", "reserve-max")),
        ("gone.py:mine", ("there is no policy file", "gone.py")),
    ],
)
def test_a_policy_that_cannot_be(
    stepscope: Call, tiny: Path, text: str, words: tuple[str, ...], dry: bool
) -> None:
    flags = ["--dry-run"] if dry else ["--no-ceilings"]
    result = stepscope("run", tiny, "--policy", text, *flags)
    assert result.code == 2 and "Traceback" not in result.err
    assert all(word in result.err for word in words), result.err
    assert not Path("runs").exists()


def test_a_policy_file_stands_beside_the_scenario_or_where_the_command_is_given(
    stepscope: Call, tiny: Path, tmp_path: Path
) -> None:
    beside = tmp_path / "elsewhere"
    beside.mkdir()
    code = (SCENARIOS / "longest_first.py").read_text()
    (beside / "mine.py").write_text(code)
    scenario = beside / "own.toml"
    scenario.write_text(TINY.replace('"chunked"', '"mine.py:longest_first"'))
    dry = stepscope("run", scenario, "--dry-run", "--json")
    assert dry.code == 0, dry.err
    assert json.loads(dry.out)["engine.policy"]["value"] == ["mine.py:longest_first"]
    (tmp_path / "here.py").write_text(code)
    assert stepscope("run", tiny, "--policy", "here.py:longest_first", "--dry-run").code == 0


def test_a_policy_that_fails_in_a_step_ends_the_run_in_a_sentence_and_keeps_it(
    stepscope: Call, tiny: Path, tmp_path: Path
) -> None:
    lines = [
        "from stepscope.engine.policies import Grant",
        "def mine(view):",
        "    if any(r.output_tokens > 4 for r in view.running): return 1 / 0",
        "    return [Grant(r, r.todo) for r in [*view.running, *view.admissible()]]",
    ]
    Path("mine.py").write_text("\n".join(lines))
    out = tmp_path / "out"
    result = stepscope("run", tiny, "--policy", "mine.py:mine", "--no-ceilings", "-o", out)
    assert result.code == 1 and "Traceback" not in result.err
    assert "mine.py:mine line 3: ZeroDivisionError" in result.err
    run = read_run(out)
    assert not run.meta.complete and len(run.steps) > 3
