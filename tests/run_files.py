"""Small run directories for the tests of reading, writing and checking them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stepscope.records import Event, Part, RequestRecord, RunMeta, Sample, StepRecord
from stepscope.store import RunWriter
from tests.synthetic_device import make_spec


def a_meta(run_id: str = "20260101T000000Z-quick-fcfs-aa", **changes: Any) -> RunMeta:
    meta = RunMeta(
        run_id=run_id,
        label="fcfs",
        stamp="MEASURED",
        created_utc="2026-01-01T00:00:00Z",
        scenario="quick",
        policy="fcfs",
        model={**make_spec().to_dict(), "eos_ids": [2]},  # JSON knows no tuples
        device={"kind": "cpu"},
        engine={"page_size": 16},
        samples=[Sample(0, "hi", "there", [1, 2], ["the", "re"])],
    )
    for name, value in changes.items():
        setattr(meta, name, value)
    return meta


def a_step(i: int) -> StepRecord:
    return StepRecord(i, "decode", i * 10, i * 10 + 10, forward_ns=9, other_ns=1, graph="eager")


def a_run(directory: Path, steps: int = 3, **changes: Any) -> Path:
    with RunWriter.create(directory, a_meta(**changes)) as writer:
        writer.append(
            [a_step(i) for i in range(steps)],
            [Part(0, "prefill", 0, 0, 8, 1)],
            [Event(1, 2, "gc", None, "generation 2")],
        )
        writer.requests([RequestRecord(0, 0, 8, client="a,b", finish_reason="eos")])
    return directory


def set_cell(file: Path, line: int, column: str, text: str) -> None:
    rows = [row.split(",") for row in file.read_text().splitlines()]
    rows[line - 1][rows[0].index(column)] = text
    file.write_text("".join(",".join(row) + "\n" for row in rows))
