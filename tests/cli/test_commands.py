"""Each command on a small run: what it prints, where, and how it ends."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

Call = Callable[..., Result]


@pytest.fixture
def ran(stepscope: Call, tiny: Path, tmp_path: Path) -> Path:
    directory = tmp_path / "runs" / "one"
    result = stepscope("run", tiny, "-o", directory, "--no-ceilings")
    assert result.code == 0, result.err
    return directory


def test_run_writes_every_file_and_announces_it(
    stepscope: Call, tiny: Path, tmp_path: Path
) -> None:
    result = stepscope("run", tiny, "-o", tmp_path / "out", "--no-ceilings")
    assert result.code == 0
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {"run.json", "steps.csv", "requests.csv", "parts.csv", "events.csv"}
    assert f"wrote {tmp_path / 'out'}" in result.err
    assert "next: stepscope report" in result.err
    assert "MEASURED" in result.out
    questions = [line for line in result.out.splitlines() if line[:3] in ("1  ", "2  ", "3  ")]
    assert len(questions) == 3
    assert max(map(len, result.out.splitlines())) <= 80 or "next:" in result.out


def test_every_request_of_the_run_is_complete(ran: Path) -> None:
    rows = (ran / "requests.csv").read_text().splitlines()
    assert len(rows) == 1 + 4
    assert all(",length," in row for row in rows[1:])
    assert json.loads((ran / "run.json").read_text())["complete"] is True


def test_phases_sum_to_the_wall_time_of_every_recorded_step(ran: Path) -> None:
    from stepscope.records import PHASES
    from stepscope.store import read_run

    run = read_run(ran)
    assert len(run.steps) > 20
    for before, row in zip(run.steps, run.steps[1:], strict=False):
        assert before.end_ns == row.begin_ns
    for row in run.steps:
        assert sum(row.phase_ns(p) or 0 for p in PHASES) == row.wall_ns
    assert run.meta.recorder["ns_per_step"] > 0


def test_run_with_json_prints_one_document(stepscope: Call, tiny: Path) -> None:
    result = stepscope("run", tiny, "--json", "--no-ceilings")
    document = json.loads(result.out)
    assert len(document["runs"][0]["answers"]) == 3
    assert document["comparison"] is None


def test_ceilings_are_measured_cached_and_shown(
    stepscope: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.device import ceilings

    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    small = ceilings.Plan(
        largest_bytes=4 << 20, repeats=2, seconds_per_repeat=1e-4, gemm_sizes=(64,),
        most_copy_bytes=1 << 20, most_gemv_bytes=1 << 20,
    )  # fmt: skip
    monkeypatch.setattr(ceilings, "Plan", lambda: small)
    monkeypatch.setattr(ceilings, "foreign_share", lambda before, after, cores: 0.0)
    result = stepscope("run", tiny, "--json")
    assert result.code == 0, result.err
    analysis = json.loads(result.out)["runs"][0]
    assert analysis["card"]["read_bytes_per_s"] > 0
    assert analysis["card"]["twin_ns"] > 0
    assert analysis["verdict"]["name"] != "undetermined"
    assert sum(line["ns"] for line in analysis["budget"]) > 0
    assert list((tmp_path / "cache").rglob("*.json"))


@pytest.mark.parametrize("arguments", [[], ["--steps", "0:5"], ["--step", "3"], ["--top", "2"]])
@pytest.mark.parametrize("fmt", ["text", "json", "csv", "md"])
def test_show(stepscope: Call, ran: Path, arguments: list[str], fmt: str) -> None:
    result = stepscope("show", ran, "--format", fmt, *arguments)
    assert result.code == 0, result.err
    assert len(result.out) > 50
    if fmt == "json":
        json.loads(result.out)


def test_the_name_of_a_run_alone_shows_it(stepscope: Call, ran: Path) -> None:
    assert stepscope("last").out == stepscope("show", "last").out
    assert "verdict" in stepscope("last").out


def test_last_is_the_latest_run_wherever_it_went(
    stepscope: Call, tiny: Path, ran: Path, tmp_path: Path
) -> None:
    away = tmp_path / "away"
    assert stepscope("run", tiny, "-o", away, "--no-ceilings").code == 0
    assert json.loads(stepscope("show", "last", "--json").out)["run"] == str(away)
    assert stepscope("run", tiny, "-o", ran, "--force", "--no-ceilings").code == 0
    assert json.loads(stepscope("show", "last", "--json").out)["run"] == str(Path("runs") / "one")


def test_ceilings_of_a_busy_machine_are_told_and_not_kept(
    stepscope: Call, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepscope.device import ceilings

    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    small = ceilings.Plan(largest_bytes=1 << 20, repeats=1, seconds_per_repeat=0, gemm_sizes=(8,))
    monkeypatch.setattr(ceilings, "Plan", lambda: small)
    monkeypatch.setattr(ceilings, "foreign_share", lambda before, after, cores: 0.4)
    result = stepscope("run", tiny, "-o", "out")
    assert result.code == 0 and "used 40 % of the cores" in result.err
    notes = json.loads(Path("out/run.json").read_text())["notes"]
    assert any("used 40 % of the cores" in note for note in notes)
    assert not list((tmp_path / "cache").glob("ceilings-*"))
    card = stepscope("ceilings", "--model", "dummy:llama", "--dtype", "bf16").out
    assert "matrix-vector products at the model's shapes, by F.linear" in card
    assert "used 40 % of the cores" in " ".join(card.split())
    card = stepscope("ceilings", "--model", "dummy:llama", "--dtype", "int8").out
    assert "straight from the codes" in card and "F.linear" not in card


def test_show_a_step_that_is_not_there(stepscope: Call, ran: Path) -> None:
    result = stepscope("show", ran, "--step", "99999")
    assert result.code == 2
    assert "no step" in result.err


@pytest.mark.parametrize("name", ["page.html", "page.png", "page.md"])
def test_report(stepscope: Call, ran: Path, tmp_path: Path, name: str) -> None:
    assert stepscope("report", ran, "-o", tmp_path / name).code == 0
    assert (tmp_path / name).stat().st_size > 500
    again = stepscope("report", ran, "-o", tmp_path / name)
    assert again.code == 2 and "--force" in again.err
    assert stepscope("report", ran, "-o", tmp_path / name, "--force").code == 0


def test_report_of_an_unknown_kind(stepscope: Call, ran: Path) -> None:
    result = stepscope("report", ran, "-o", "page.docx")
    assert result.code == 2 and ".html" in result.err


def test_two_policies_are_compared_on_identical_arrivals(
    stepscope: Call, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "both"
    result = stepscope(
        "run", tiny, "--policy", "prefill-first", "--policy", "chunked,chunk=8", "-o", out,
        "--no-ceilings",
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "comparable: yes" in result.out
    first, second = sorted(p for p in out.iterdir())
    arrivals = [
        [line.split(",")[:3] for line in (p / "requests.csv").read_text().splitlines()]
        for p in (first, second)
    ]
    assert arrivals[0] == arrivals[1]
    compared = stepscope("compare", first, f"other={second}", "--json")
    rows = {row["metric"] for row in json.loads(compared.out)["rows"]}
    assert {"preemptions", "recomputed_tokens"} <= rows
    assert stepscope("compare", first, second, "--format", "md").code == 0


def test_gates(stepscope: Call, ran: Path, tiny: Path) -> None:
    held = stepscope("run", tiny, "--no-ceilings", "--fail-on", "p50_itl_ms>100000")
    assert held.code == 0, held.err
    failed = stepscope("run", tiny, "--no-ceilings", "--fail-on", "p50_itl_ms>0")
    assert failed.code == 3 and "p50_itl_ms" in failed.err
    unjudged = stepscope("run", tiny, "--no-ceilings", "--fail-on", "mbu<0.1")
    assert unjudged.code == 4
    assert stepscope("run", tiny, "--fail-on", "nonsense").code == 2
    assert stepscope("run", tiny, "--no-ceilings", "--fail-on", "no_such>1").code == 2


def test_compare_gate(stepscope: Call, ran: Path) -> None:
    metric = json.loads(stepscope("compare", ran, ran, "--json").out)["rows"][0]["metric"]
    assert stepscope("compare", ran, ran, "--fail-on", f"{metric}:+5%").code == 0
    assert stepscope("compare", ran, ran, "--fail-on", "x").code == 2


@pytest.mark.parametrize("kind", ["scenarios", "policies", "devices", "models", "metrics", "runs"])
def test_list(stepscope: Call, ran: Path, kind: str) -> None:
    result = stepscope("list", kind)
    assert result.code == 0, result.err
    assert len(result.out.splitlines()) >= 1


def test_every_verdict_and_flag_is_explained(stepscope: Call) -> None:
    from stepscope.analyze.rules import FLAGS, RULES

    for name in (*RULES, *FLAGS):
        result = stepscope("explain", name)
        assert result.code == 0, name
        assert len(result.out) > 40
    unknown = stepscope("explain", "bandwith_bound")
    assert unknown.code == 2 and "bandwidth_bound" in unknown.err


def test_doctor(stepscope: Call) -> None:
    result = stepscope("doctor", "--json")
    found = json.loads(result.out)
    assert "clock" in found and "cuda" in found


def test_dry_run_tells_where_each_value_comes_from(
    stepscope: Call, tiny: Path, tmp_path: Path
) -> None:
    result = stepscope(
        "run", tiny, "--dry-run", "--json", "--threads", "1", "--set", "engine.max_seqs=2"
    )
    values = json.loads(result.out)
    assert values["engine.max_seqs"] == {"value": 2, "from": "--set"}
    assert values["engine.threads"]["from"] == "flag"
    assert values["model.name"]["from"] == "file"
    assert values["engine.page_size"]["from"] == "default"
    assert not (tmp_path / "runs").exists()


def test_help_everywhere(stepscope: Call) -> None:
    for command in ([], ["run"], ["show"], ["report"], ["compare"], ["ceilings"], ["models"]):
        result = stepscope(*command, "-h")
        assert result.code == 0 and "Usage" in result.out


def test_gpu_check_without_a_gpu_says_so_and_exits_with_4() -> None:
    import subprocess
    import sys

    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    ended = subprocess.run(
        [sys.executable, "-m", "tests.gpu_check"], capture_output=True, text=True
    )
    assert ended.returncode == 4
    assert len(ended.stderr.splitlines()) == 1


def test_the_gate_of_the_readme_names_a_metric_that_exists(stepscope: Call, ran: Path) -> None:
    assert stepscope("compare", ran, ran, "--fail-on", "p99_itl_ms:+5%").code == 0
    assert stepscope("compare", ran, ran, "--metric", "max_itl_ms").out.count("max_itl_ms") == 1
