"""`make gpu-check`: what has to be seen on a real GPU, in one call of less than six minutes.

Parity of a tiny checkpoint with ids that were computed on a CPU, and the kernel's own cases; then
decode steps of real shapes with random weights, eager against graphs against overlap, each a run
with its records (`gpu_rows`). Tables and reports go to $OUT, or to reports/gpu; the tables are
written again after every row. It needs nothing outside the repository but torch, triton and the
packages that reports are drawn with. Without a GPU it says so and exits with 4.

Each part is a process of its own: what breaks a device breaks it for one of them alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.gpu_rows import Key, Plan, Row, key

BEGAN = time.monotonic()  # loading torch for the first time is part of the call
ROOT = Path(__file__).parent.parent
BUDGET_S = 300.0  # after which no row is begun; reports follow
ROW_S = 60.0  # one that takes longer hangs
GRACE_S = 15.0  # for the row that was begun last
PARITY_S, KERNEL_TESTS_S = 90.0, 90.0
CLOSING_S = 20.0  # from the last line that a part prints to its end
MOST_STARTS = 4  # of the process that makes the rows
ROWS = ("-m", "tests.gpu_rows")
# Compiling is what takes long, so where pytest can do several cases at once, it does.
AT_ONCE = ("-n", "6") if find_spec("xdist") else ()
PYTEST = ("-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", *AT_ONCE)
KERNEL_CASES = (*PYTEST, "tests/engine/paged_cases.py", "tests/engine/fp8_cases.py")


def check(plan: Plan, out: Path) -> int:
    """The exit code: 0, or 1 if something differs or failed."""
    out.mkdir(parents=True, exist_ok=True)
    kernel = _Outside(KERNEL_CASES, TRITON_INTERPRET="0") if plan.kernel_tests else None
    parity = _Outside(("-m", "tests.gpu_parity", plan.device))
    found: dict[str, Any] = {"environment": environment(plan.device)}
    found["parity"] = _parity(parity)
    _say(f"parity: {len(found['parity'])} ways, {_failures(found)} differ, {_elapsed()} s")
    if kernel is not None:
        found["kernel_tests"] = _kernel_tests(kernel)
        _say(f"kernel: {found['kernel_tests']['last_line']}, {_elapsed()} s")
    found["steps"] = []
    _save(out, found)
    with tempfile.TemporaryDirectory() as runs:
        for row in _rows(plan, Path(runs)):
            found["steps"].append(row)
            found["seconds"] = _elapsed()
            _save(out, found)
            _say(_line(row))
        try:
            _reports(plan, Path(runs), out)
        except Exception as error:  # the tables say more than a page
            found["reports"] = f"{type(error).__name__}: {error}"
            _say(f"reports: {found['reports']}")
        found["seconds"] = _elapsed()
        _save(out, found)
    return int(_failures(found) > 0)


def environment(device: str) -> dict[str, Any]:
    from stepscope.device.cuda import describe_gpu
    from stepscope.device.host import describe_host, versions

    found = {**describe_host(), **versions()}
    return {**found, **describe_gpu()} if device == "cuda" else found


def _elapsed() -> float:
    return round(time.monotonic() - BEGAN, 1)


# ---------------------------------------------------------------- the parts


class _Outside:
    """A part of the check in a process of its own; whatever it started ends with it."""

    def __init__(self, arguments: Sequence[str], **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def lines(self, ends_at: float, patience: float = math.inf) -> Iterator[str]:
        """What it prints. It is ended at that time, or when so many seconds brought no line."""
        assert self._process.stdout is not None
        try:
            while True:
                left = min(ends_at - time.monotonic(), patience)
                watch = threading.Timer(max(left, 0), self._end)
                watch.start()
                line = self._process.stdout.readline()
                watch.cancel()
                if not line:
                    break
                yield line.rstrip("\n")
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=CLOSING_S)
        finally:
            self._end()

    def _end(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    @property
    def code(self) -> int:
        return self._process.wait()


def _parity(part: _Outside) -> list[Row]:
    rows, seen = [], []
    for line in part.lines(time.monotonic() + PARITY_S):
        if line.startswith("{"):
            rows.append(json.loads(line))
        else:
            seen.append(line)
    if part.code != 0:
        told = f"ended with {part.code}: {' '.join(seen[-3:])[-300:]}"
        rows.append({"way": "all the others", "dtype": "n/a", "differs": told})
    return rows


def _kernel_tests(part: _Outside) -> dict[str, Any]:
    """The kernel's own cases, compiled for this GPU."""
    lines = list(part.lines(time.monotonic() + KERNEL_TESTS_S)) or ["nothing was printed"]
    return {"code": part.code, "last_line": lines[-1], "tail": lines[-60:]}


def _rows(plan: Plan, runs: Path) -> Iterator[Row]:
    """Rows of `gpu_rows`, whose process is started again behind a row that ended it."""
    done: list[Key] = []
    file = runs / "plan"
    for _ in range(MOST_STARTS):
        file.write_bytes(pickle.dumps((plan, done)))
        part = _Outside((*ROWS, str(file), str(runs)))
        begun, seen = None, list[str]()
        for line in part.lines(plan.ends_at + GRACE_S, ROW_S):
            if not line.startswith("{"):
                seen.append(line)
                continue
            row = json.loads(line)
            begun = row.get("begun")
            if begun is None:
                done.append(key(row))
                yield row
        if part.code == 0 or time.monotonic() > plan.ends_at:
            return
        if begun is not None:
            done.append(key(begun))
            yield {**begun, "error": f"ended with {part.code}: {' '.join(seen[-3:])[-300:]}"}


# ---------------------------------------------------------------- what is written


COLUMNS = (
    "batch",
    "mode",
    "step_ms",
    "dev_forward_ms",
    "dev_gather_ms",
    "dev_sample_ms",
    "host_prepare_ms",
    "host_launch_ms",
    "floor_ms",
    "twin_ms",
    "mbu",
    "tokens_per_s",
    "verdict",
)


def _failures(found: dict[str, Any]) -> int:
    differ = sum(bool(row["differs"]) for row in found["parity"])
    broken = sum(
        "error" in row and "out of time" not in row["error"] for row in found.get("steps", ())
    )
    kernel = found.get("kernel_tests", {"code": 0})["code"] != 0
    return differ + broken + int(kernel) + int("reports" in found)


def _save(out: Path, found: dict[str, Any]) -> None:
    (out / "gpu-check.json").write_text(json.dumps(found, indent=1, default=str) + "\n")
    (out / "gpu-check.md").write_text(_markdown(found))


def _markdown(found: dict[str, Any]) -> str:
    where = found["environment"]
    lines = [
        f"# GPU check: {where.get('name') or where.get('cpu')}",
        "",
        f"torch {where.get('torch')}, Python {where.get('python')}, CUDA {where.get('cuda')}; "
        f"{_failures(found)} failures; {found.get('seconds', 'n/a')} s in all. Times are medians "
        "over decode-only steps, with CUDA events on the device; every row is one run.",
        "",
        "## Parity with fp32 ids from a CPU",
        "",
        "| way | dtype | differs |",
        "|---|---|---|",
        *(f"| {r['way']} | {r['dtype']} | {r['differs'] or 'no'} |" for r in found["parity"]),
    ]
    if "kernel_tests" in found:
        lines += ["", f"Kernel cases compiled here: {found['kernel_tests']['last_line']}"]
    return "\n".join([*lines, *_step_tables(found.get("steps", ()))]) + "\n"


def _step_tables(rows: Sequence[Row]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if "mode" in row and "batch" not in row:
            lines += ["", f"{row['model']} in {row['dtype']}, {_launches(row)}"]
        elif "batch" not in row:
            lines += ["", f"## {row['model']} in {row['dtype']}", "", *_card_lines(row)]
            lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        elif "error" in row:
            lines.append(f"| {row['batch']} | {row['mode']} | {row['error']} |")
        else:
            lines.append(f"| {' | '.join(_cell(row.get(c)) for c in COLUMNS)} |")
    return lines


def _launches(row: Row) -> str:
    counts = row.get("launches") or {row["mode"]: row.get("error")}
    listed = ", ".join(f"{mode} {_cell(count)}" for mode, count in counts.items())
    return f"launches of a decode step: {listed}"


def _card_lines(row: Row) -> list[str]:
    if "error" in row:
        return [row["error"]]
    reads = ", ".join(f"{size} {rate:,.0f}" for size, rate in row["read_gb_per_s"].items())
    gemm = ", ".join(f"{dtype} {rate:,.1f}" for dtype, rate in row["gemm_tflops"].items())
    gemv = ", ".join(f"{name} {rate:,.0f}" for name, rate in row["gemv_gb_per_s"].items())
    return [
        f"Measured: read GB/s at {reads}; copy {row['copy_gb_per_s']:,.0f} GB/s; GEMM TFLOP/s "
        f"{gemm}; GEMV GB/s {gemv or 'n/a'}."
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "n/a"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _line(row: Row) -> str:
    if "mode" in row and "batch" not in row:
        return f"{row['model']} {row['dtype']}, {_launches(row)}"
    if "batch" not in row:
        return f"{row['model']} {row['dtype']}: {row.get('error') or row['best_read_gb_per_s']}"
    what = row.get("error") or f"{row['step_ms']} ms, {row['verdict']}"
    return f"  batch {row['batch']}, {row['mode']}: {what}, at {_elapsed()} s"


def _reports(plan: Plan, runs: Path, out: Path) -> None:
    """A page for each of the chosen runs, and all runs as records."""
    from stepscope.analyze import analyze
    from stepscope.report import write
    from stepscope.store import read_run

    with tarfile.open(out / "runs.tar.gz", "w:gz") as archive:
        for directory in sorted(runs.glob("*/")):
            archive.add(directory, f"runs/{directory.name}")
    name, batch, modes = plan.reported
    for mode in modes:
        found = sorted(runs.glob(f"{name.replace(':', '-')}-*-{batch}-{mode}"))
        for directory in found[:1]:
            run = read_run(directory)
            write([(mode, run, analyze(run))], None, out / f"report-{mode}.html")


def _say(text: str) -> None:
    print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(os.environ.get("OUT", ROOT / "reports/gpu"))
    )
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds until the last row")
    given = parser.parse_args(arguments)
    try:
        import torch
    except ImportError:
        print(
            f"stepscope: gpu-check needs torch and {sys.executable} has none; give PYTHON=..., or "
            "run `make demo` first",
            file=sys.stderr,
        )
        return 4
    if not torch.cuda.is_available():
        print(
            "stepscope: gpu-check needs a CUDA device and torch sees none here; nothing was run",
            file=sys.stderr,
        )
        return 4
    os.environ.setdefault("STEPSCOPE_CACHE", tempfile.mkdtemp())
    return check(replace(Plan(), ends_at=BEGAN + given.budget), given.out)


if __name__ == "__main__":
    sys.exit(main())
