"""The settings of the KV cache from a scenario to the recorded run."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.runner.replay import Replay
from stepscope.scenario import parse_scenario
from tests.cli.conftest import Result

TRIES = 3  # other processes may take the cores in one of them
SHARED = Path(__file__).parents[2] / "scenarios" / "shared-prefix.toml"
SMALL = {
    "name": "dummy:llama",
    "dtype": "fp32",
    "layers": 2,
    "hidden": 128,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 64,
    "intermediate": 256,
    "vocab": 256,
    "max_context": 1024,
}
# Each of the four requests grows from one page of 16 to three, and there are nine.
SCARCE = ["--set", "engine.kv_pages=9", "--set", "workload.arrivals=burst"]

Call = Callable[..., Result]


def rows(run: Path, table: str) -> list[dict[str, str]]:
    with (run / f"{table}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def total(run: Path, column: str) -> int:
    return sum(int(row[column] or 0) for row in rows(run, "steps"))


def ran(stepscope: Call, tmp_path: Path, name: str, *arguments: object) -> Path:
    out = tmp_path / name
    result = stepscope("run", *arguments, "--no-ceilings", "-o", out)
    assert result.code == 0, result.err
    return out


def meta(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "run.json").read_text())
    return found


def test_the_first_token_comes_sooner_with_a_prefix_cache(stepscope: Call, tmp_path: Path) -> None:
    """The scenario on a small model, all requests one after the other: 600 tokens less for each
    but the first one."""
    shape = [x for k, v in SMALL.items() for x in ("--set", f"model.{k}={v}")]
    fewer = ["--set", "workload.requests=8", "--set", "workload.rate_per_s=25"]
    ratios = []
    for attempt in range(TRIES):
        runs = [
            ran(stepscope, tmp_path, f"{form}{attempt}", SHARED, *shape, *fewer,
                "--set", f"engine.prefix_cache={form}")
            for form in ("off", "radix")
        ]  # fmt: skip
        saved = total(runs[0], "sum_prefill_tokens") - total(runs[1], "sum_prefill_tokens")
        assert saved == total(runs[1], "prefix_hit_tokens") > 600
        assert saved == sum(int(r["cached_tokens"]) for r in rows(runs[1], "requests"))
        assert {r["cached_tokens"] for r in rows(runs[0], "requests")} == {""}
        first = [
            statistics.median(
                int(r["first_token_ns"]) - int(r["arrival_ns"]) for r in rows(run, "requests")
            )
            for run in runs
        ]
        ratios.append(first[1] / first[0])
        if ratios[-1] < 0.8:
            break
    assert min(ratios) < 0.8, ratios
    shown = stepscope("show", tmp_path / "radix0").out
    assert "tokens came from the prefix cache" in shown
    assert "prefix cache" not in stepscope("show", tmp_path / "off0").out


def test_swapping_is_recorded_and_computes_nothing_twice(
    stepscope: Call, tmp_path: Path, tiny: Path
) -> None:
    again = ran(stepscope, tmp_path, "recompute", tiny, *SCARCE)
    swap = ran(stepscope, tmp_path, "swap", tiny, *SCARCE, "--set", "engine.preemption=swap")
    assert total(again, "recompute_tokens") > 0 == total(swap, "recompute_tokens")
    assert total(again, "num_preempted") > 0 < total(swap, "num_preempted")
    assert total(swap, "swapped_pages") > 0 < total(swap, "swap_ns")
    assert {row["swapped_pages"] for row in rows(again, "steps")} == {""}
    swaps = [e for e in rows(swap, "events") if e["kind"] == "swap"]
    spent = sum(int(e["end_ns"]) - int(e["begin_ns"]) for e in swaps)
    assert spent == total(swap, "swap_ns") <= total(swap, "prepare_ns")
    assert meta(swap)["engine"]["preemption"] == "swap"
    assert meta(swap)["engine"]["swap_pages"] > 1000, "half of what is free"
    assert meta(again)["engine"]["swap_pages"] is None and meta(swap)["notes"] == []


def test_a_host_without_room_is_told(stepscope: Call, tmp_path: Path, tiny: Path) -> None:
    swap = ("--set", "engine.preemption=swap", "--set", "engine.swap_tokens=16")
    run = ran(stepscope, tmp_path, "swap", tiny, *SCARCE, *swap)
    told = [e for e in rows(run, "events") if "the host has no room" in e["detail"]]
    assert told and total(run, "recompute_tokens") > 0
    assert meta(run)["engine"]["swap_pages"] == 1
    assert f"{len(told)} preempted request" in meta(run)["notes"][0]
    assert "host memory for swapping was full at 1 page; raise" in meta(run)["notes"][0]


@pytest.mark.parametrize("kv_dtype,bytes_per_token", [("auto", 512), ("bf16", 256), ("int8", 144)])
def test_the_cache_takes_the_bytes_it_was_given(
    stepscope: Call, tmp_path: Path, tiny: Path, kv_dtype: str, bytes_per_token: int
) -> None:
    """2 layers x (K and V) of one head of 32: 4, 2, or 1 byte each and 4 for a scale."""
    run = ran(
        stepscope, tmp_path, "run", tiny,
        "--set", f"engine.kv_dtype={kv_dtype}", "--set", "engine.kv_bytes=200000",
    )  # fmt: skip
    pages = 200_000 // (16 * bytes_per_token)
    assert {int(row["kv_total_pages"]) for row in rows(run, "steps")} == {pages}
    decodes = [row for row in rows(run, "steps") if row["kind"] == "decode"]
    for row in decodes:
        context = int(row["sum_decode_kv_tokens"])
        assert int(row["kv_gather_bytes"]) == context * bytes_per_token
    assert meta(run)["model"]["kv_dtype"] == {"auto": "fp32"}.get(kv_dtype, kv_dtype)


def test_how_attention_is_done_is_chosen_recorded_and_listed(
    stepscope: Call, tmp_path: Path, tiny: Path
) -> None:
    assert meta(ran(stepscope, tmp_path, "auto", tiny))["engine"]["attention"] == "gather"
    chosen = meta(ran(stepscope, tmp_path, "given", tiny, "--attention", "gather"))
    assert chosen["engine"]["attention"] == chosen["workload"]["engine.attention"] == "gather"
    listed = stepscope("run", tiny, "--attention", "paged", "--dry-run").out
    assert "engine.attention             paged" in listed and "flag" in listed
    refused = stepscope("run", tiny, "--attention", "paged", "--no-ceilings")
    assert refused.code == 2 and "use --attention gather" in " ".join(refused.err.split())


@pytest.mark.parametrize(
    "change,says",
    [
        ("engine.kv_bytes=100", "one page of 16 tokens takes 8,192; give at least that"),
        ("engine.page_size=257", "must be at least 1 and at most 256"),
        ("engine.prefix_cache=hsah", "did you mean hash"),
        ("engine.preemption=drop", "choose recompute or swap"),
        ("engine.kv_dtype=int4", "engine.kv_dtype"),
        ("engine.attention=pagd", "did you mean paged"),
        ("engine.attention=paged", "does not run on cpu; use --attention gather"),
        ("engine.swap_tokens=-1", "engine.swap_tokens"),
    ],
)
def test_bad_settings_are_a_sentence(stepscope: Call, tiny: Path, change: str, says: str) -> None:
    result = stepscope("run", tiny, "--no-ceilings", "--set", change)
    assert result.code == 2 and says in " ".join(result.err.split())


def test_more_host_memory_than_there_is(stepscope: Call, tiny: Path) -> None:
    swap = ("--set", "engine.preemption=swap", "--set", "engine.swap_tokens=1000000000")
    result = stepscope("run", tiny, "--no-ceilings", *swap)
    assert result.code == 1
    says = " ".join(result.err.split())
    assert "62,500,000 pages swapped out of it take 512 GB" in says
    assert "lower engine.swap_tokens or engine.kv_tokens" in says


# ------------------------------------------------------------------ prompts that begin alike

WORKLOAD = '[workload]\nrequests = 4\narrivals = "burst"\nprompt_tokens = [30, 40]\n'


def prompts(text: str) -> list[list[int]]:
    found = parse_scenario(text, "s.toml")
    return [r.tokens for r in Replay(found.requests, None, 1000).poll(0)]


def test_shared_tokens_begin_every_prompt_and_the_rest_is_its_own() -> None:
    made = prompts(WORKLOAD + "shared_tokens = 20\n")
    plain = prompts(WORKLOAD)
    assert len({tuple(tokens[:20]) for tokens in made}) == 1
    assert len({tuple(tokens[20:25]) for tokens in made}) == 4
    assert [len(tokens) for tokens in made] == [len(tokens) for tokens in plain]
    assert len({tuple(tokens[:20]) for tokens in plain}) == 4


@pytest.mark.parametrize("more", ["shared_tokens = 30\n", "shared_tokens = 50\n"])
def test_every_prompt_has_a_token_of_its_own(more: str) -> None:
    with pytest.raises(UsageError, match=r"s\.toml: workload\.shared_tokens is [35]0; give prompt"):
        parse_scenario(WORKLOAD + more, "s.toml")
