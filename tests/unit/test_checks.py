"""A run that can be parsed but not analysed is refused with a sentence that names the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stepscope.errors import UsageError
from stepscope.records import Part
from stepscope.store import read_run
from stepscope.tables import EVENTS, LARGEST, PARTS, REQUESTS, STEPS, read_rows
from tests.run_files import a_run, set_cell
from tests.synthetic_device import make_ceilings


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"schema_version": 0}, "has schema version 0 and this stepscope reads"),
        ({"schema_version": 99}, "has schema version 99"),
        ({"schema_version": None}, "has no schema_version"),
        ({"model": 3}, "model is 3, expected an object"),
        ({"policy": None}, "policy is null, expected text"),
        ({"complete": 1}, "complete is 1, expected true or false"),
        ({"seed": True}, "seed is true, expected a whole number"),
        ({"seed": 10**30}, "seed is 1000.*64 bits"),
        ({"stamp": "FOO"}, "stamp is 'FOO', expected one of MEASURED"),
        ({"notes": "x"}, "notes is 'x', expected a list"),
        ({"notes": ["a", 3]}, r"notes\[1\] is 3, expected text"),
        ({"command": [3]}, r"command\[0\] is 3, expected text"),
        ({"versions": {"a": 3}}, r"versions\.a is 3, expected text"),
        ({"samples": [3]}, r"samples\[0\] is 3, expected an object"),
        ({"samples": [{}]}, r"samples\[0\]\.request is missing"),
        ({"samples": [{"request": 0, "prompt": 3, "text": ""}]}, r"samples\[0\]\.prompt is 3"),
        ({"slo": {"itl_ms": "x"}}, r"slo\.itl_ms is 'x', expected a number"),
        ({"slo": {"itl_ms": -1}}, r"slo\.itl_ms is -1, expected 0 to"),
        ({"device": {"threads": "x"}}, r"device\.threads is 'x', expected a whole number"),
        ({"recorder": {"ns_per_step": "x"}}, r"recorder\.ns_per_step is 'x'"),
        ({"engine": {"a": [{"b": 10**30}]}}, r"engine\.a\[0\]\.b is 1000"),
        ({"workload": {"a": float("inf")}}, r"workload\.a is inf, expected a finite number"),
        ({"ceilings": {}}, r"ceilings\.device is missing"),
    ],
)
def test_a_run_json_that_cannot_be_used_is_refused(
    tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    file = a_run(tmp_path / "r") / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(UsageError, match=sentence):
        read_run(tmp_path / "r")


@pytest.mark.parametrize(
    ("part", "key", "value", "sentence"),
    [
        ("model", "layers", "x", "layers is 'x', expected a whole number"),
        ("model", "layers", 0, "layers is 0, expected 1 to"),
        ("model", "layers", True, "layers is true"),
        ("model", "hidden", -1, "hidden is -1, expected 1 to"),
        ("model", "hidden", 10**12, "hidden is 1000000000000"),
        ("model", "dtype", "int3", "dtype is 'int3', expected one of fp32, bf16, fp16, int8"),
        ("model", "kv_dtype", ["fp32"], "kv_dtype is a list, expected text"),
        ("model", "linear_bytes", -5, "linear_bytes is -5"),
        ("model", "eos_ids", None, "eos_ids is null, expected a list"),
        ("model", "colour", 1, "colour is not known"),
        ("ceilings", "read_curve", [[0, 0]], r"read_curve\[0\]\[0\] is 0, expected 1 to"),
        ("ceilings", "read_curve", [["a", "b"]], r"read_curve\[0\]\[0\] is 'a'"),
        ("ceilings", "read_curve", [[1]], r"read_curve\[0\] has 1 item, expected 2"),
        ("ceilings", "gemm_flops", {"bf16": 0}, r"gemm_flops\.bf16 is 0"),
        ("ceilings", "twin", [{}], r"twin\[0\]\.batch is missing"),
        ("ceilings", "gemv", 3, "gemv is 3, expected a list"),
    ],
)
def test_a_wrong_value_inside_a_part_of_run_json_is_named(
    tmp_path: Path, part: str, key: str, value: Any, sentence: str
) -> None:
    file = a_run(tmp_path / "r", ceilings=make_ceilings().to_dict()) / "run.json"
    read_run(tmp_path / "r")
    raw = json.loads(file.read_text())
    raw[part][key] = value
    file.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=rf"run\.json: {part}\.{sentence}"):
        read_run(tmp_path / "r")


@pytest.mark.parametrize("key", ["name", "layers", "eos_ids"])
def test_a_model_without_one_of_its_keys_is_named(tmp_path: Path, key: str) -> None:
    file = a_run(tmp_path / "r") / "run.json"
    raw = json.loads(file.read_text())
    del raw["model"][key]
    file.write_text(json.dumps(raw))
    with pytest.raises(UsageError, match=rf"run\.json: model\.{key} is missing"):
        read_run(tmp_path / "r")


def test_what_only_a_later_version_knows_is_left_alone(tmp_path: Path) -> None:
    file = a_run(tmp_path / "r") / "run.json"
    raw = json.loads(file.read_text())
    raw["new"] = raw["device"]["new"] = raw["recorder"]["new"] = {"a": None}
    file.write_text(json.dumps(raw))
    assert read_run(tmp_path / "r").meta.device["new"] == {"a": None}


# ---------------------------------------------------------------- numbers that cannot be


def test_the_largest_integers_are_read_and_larger_ones_named(tmp_path: Path) -> None:
    file = a_run(tmp_path / "r") / "steps.csv"
    set_cell(file, 3, "power_mw", str(LARGEST))
    assert read_run(tmp_path / "r").steps[1].power_mw == LARGEST
    for text in (str(LARGEST + 1), str(-LARGEST - 1), "9" * 400, "9" * 5000):
        for column in ("power_mw", "end_ns"):
            set_cell(file, 3, column, text)
            with pytest.raises(UsageError, match=rf"steps\.csv line 3, column {column}: .*64 bits"):
                read_run(tmp_path / "r")
            set_cell(file, 3, column, "20")


@pytest.mark.parametrize("table", [STEPS, PARTS, REQUESTS, EVENTS])
def test_every_column_of_numbers_has_its_bound(table: Any) -> None:
    for column in table.columns:
        if column.is_text:
            continue
        cells = ["" if c.optional or c.is_text else "1" for c in table.columns]
        for i, c in enumerate(table.columns):
            cells[i] = c.choices[0] if c.choices else cells[i]
            cells[i] = "9" * 30 if c.name == column.name else cells[i]
        with pytest.raises(UsageError, match=f"line 2, column {column.name}:"):
            read_rows(table.header + ",".join(cells) + "\n", table, table.file)


@pytest.mark.parametrize(("first", "last"), [(-1, 0), (2, 1), (-(10**12), 1), (10**12, 0)])
def test_a_part_that_cannot_be_is_named(tmp_path: Path, first: int, last: int) -> None:
    file = a_run(tmp_path / "r") / "parts.csv"
    with file.open("a") as rows:
        rows.write(f"0,decode,{first},{last},1,1\n")
    with pytest.raises(UsageError, match=rf"parts\.csv line 3: a part from step {first} to {last}"):
        read_run(tmp_path / "r")


def test_parts_end_with_the_last_step_that_is_there(tmp_path: Path) -> None:
    """A disk that lost the end of steps.csv; or an absurd number, which must not be counted to."""
    file = a_run(tmp_path / "r") / "parts.csv"
    with file.open("a") as rows:
        rows.write(f"0,decode,1,{10**15},1,1\n0,decode,{10**15},{10**15},1,1\n")
    run = read_run(tmp_path / "r")
    assert run.parts == [Part(0, "prefill", 0, 0, 8, 1), Part(0, "decode", 1, 2, 1, 1)]
    assert [n for n in run.meta.notes if "parts.csv line 3" in n and "2 such lines" in n]


@pytest.mark.parametrize("step", [-1, 10**12])
def test_a_step_that_cannot_be_is_named(tmp_path: Path, step: int) -> None:
    set_cell(a_run(tmp_path / "r") / "steps.csv", 4, "step", str(step))
    with pytest.raises(UsageError, match=rf"steps\.csv line 4: step {step} after step 1 cannot be"):
        read_run(tmp_path / "r")
