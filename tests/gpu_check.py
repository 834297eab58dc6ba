"""`make gpu-check`: what has to be seen on a real GPU, in one call of less than six minutes.

Parity of a tiny checkpoint with ids that were computed on a CPU; then decode steps of real shapes
with random weights, eager against graphs against overlap, each a run with its records. Tables and
reports go to $OUT, or to reports/gpu. It needs nothing outside the repository but torch, triton and
the packages that reports are drawn with. Without a GPU it says so and exits with 4.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
BUDGET_S = 330.0
KERNEL_TEST_S = 100.0
SCENARIO = """
name = "gpu-check"
description = "{batch} equal requests at once: a prefill, then decode steps of one batch size."
[engine]
policy = "prefill-first"
token_budget = 16384
max_seqs = {batch}
kv_tokens = {kv_tokens}
attention = "{attention}"
graphs = "{graphs}"
graph_buckets = [{batch}]
overlap = {overlap}
[sampling]
max_tokens = {output}
ignore_eos = true
[workload]
requests = {batch}
prompt_tokens = {prompt}
arrivals = "burst"
"""


@dataclass(frozen=True)
class Mode:
    name: str
    attention: str = "paged"
    graphs: str = "eager"
    overlap: bool = False


MODES = (
    Mode("eager, gather", "gather"),
    Mode("eager"),
    Mode("eager, overlap", overlap=True),
    Mode("graphs", graphs="cuda"),
    Mode("graphs, overlap", graphs="cuda", overlap=True),
)


@dataclass(frozen=True)
class Plan:
    """What is run. The defaults are for a large GPU; tests make it tiny."""

    device: str = "cuda"
    shapes: tuple[tuple[str, str], ...] = (
        ("dummy:SmolLM2-135M", "bf16"),
        ("dummy:Llama-3.1-8B", "bf16"),
        ("dummy:Llama-3.1-8B", "fp8"),
    )
    batches: tuple[int, ...] = (1, 8, 32, 128)
    modes: tuple[Mode, ...] = MODES
    prompt: int = 512
    output: int = 48
    budget_s: float = BUDGET_S
    kernel_tests: bool = True
    overrides: tuple[tuple[str, int], ...] = ()
    reported: tuple[str, int, tuple[str, ...]] = ("dummy:Llama-3.1-8B", 1, ("eager", "graphs"))


def check(plan: Plan, out: Path) -> int:
    """The exit code: 0, or 1 if something differs or failed."""
    from tests.gpu_parity import parity

    begin = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"environment": environment(plan.device)}
    found["parity"] = parity(plan.device)
    _say(f"parity: {len(found['parity'])} ways, {_failures(found)} differ")
    if plan.kernel_tests:
        found["kernel_tests"] = _kernel_tests()
        _say(f"kernel: {found['kernel_tests']['last_line']}")
    _save(out, found)
    with tempfile.TemporaryDirectory() as runs:
        found["steps"] = []
        for row in _measured(plan, Path(runs), begin):
            found["steps"].append(row)
            _say(_line(row))
        found["seconds"] = round(time.monotonic() - begin, 1)
        _save(out, found)
        _reports(plan, Path(runs), out)
    return int(_failures(found) > 0)


def environment(device: str) -> dict[str, Any]:
    from stepscope.device.cuda import describe_gpu
    from stepscope.device.host import describe_host, versions

    found = {**describe_host(), **versions()}
    return {**found, **describe_gpu()} if device == "cuda" else found


def _kernel_tests() -> dict[str, Any]:
    """The kernel's own cases, compiled for this GPU."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "cuda", "tests/engine/test_paged.py"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=KERNEL_TEST_S
        )
    except subprocess.TimeoutExpired:
        return {"code": None, "last_line": f"took more than {KERNEL_TEST_S:g} s"}
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    return {"code": done.returncode, "last_line": lines[-1], "tail": lines[-40:]}


def _measured(plan: Plan, runs: Path, begin: float) -> Any:
    """A row per shape, batch and mode. What is out of time or breaks is a row that says so."""
    import torch

    from stepscope.device.kept_ceilings import load_or_measure
    from stepscope.models.load import load_model
    from stepscope.runner.job import build_decoder

    for name, dtype in plan.shapes:
        cases = [(batch, mode) for batch in plan.batches for mode in plan.modes]
        try:
            model = load_model(name, dtype, overrides=dict(plan.overrides), device=plan.device)
            ceilings = load_or_measure(model.spec, torch.get_num_threads(), device=plan.device)
            decoder = build_decoder(model, "plain")
        except Exception as error:  # the other shapes are still measured
            yield {"model": name, "dtype": dtype, "error": _short(error)}
            continue
        yield _card(name, dtype, ceilings)
        for batch, mode in cases:
            row = {"model": name, "dtype": dtype, "batch": batch, "mode": mode.name}
            if time.monotonic() - begin > plan.budget_s:
                yield {**row, "error": "not run: out of time"}
                continue
            try:
                yield {**row, **_one(plan, runs, decoder, ceilings, batch, mode)}
            except Exception as error:  # likewise
                yield {**row, "error": _short(error)}
        del model, decoder
        if plan.device == "cuda":
            torch.cuda.empty_cache()


def _card(name: str, dtype: str, ceilings: Any) -> dict[str, Any]:
    most = max(rate for _, rate in ceilings.read_curve)
    return {
        "model": name,
        "dtype": dtype,
        "read_gb_per_s": {f"{size >> 20} MiB": rate / 1e9 for size, rate in ceilings.read_curve},
        "best_read_gb_per_s": most / 1e9,
        "copy_gb_per_s": ceilings.copy_bytes_per_s / 1e9,
        "gemm_tflops": {k: v / 1e12 for k, v in ceilings.gemm_flops.items()},
        "gemv_gb_per_s": {p.name: p.bytes_per_s / 1e9 for p in ceilings.gemv},
    }


def _one(
    plan: Plan, runs: Path, decoder: Any, ceilings: Any, batch: int, mode: Mode
) -> dict[str, Any]:
    from stepscope.analyze import analyze
    from stepscope.runner.execute import execute
    from stepscope.runner.job import Job, Watcher
    from stepscope.scenario import parse_scenario
    from stepscope.store import read_run

    text = SCENARIO.format(
        batch=batch,
        kv_tokens=batch * (plan.prompt + plan.output + 16),
        attention=mode.attention,
        graphs=mode.graphs,
        overlap=str(mode.overlap).lower(),
        output=plan.output,
        prompt=plan.prompt,
    )
    scenario = parse_scenario(text, "gpu-check")
    directory = runs / f"{decoder.spec.name}-{decoder.spec.dtype}-{batch}-{mode.name}".replace(
        ":", "-"
    ).replace(", ", "-")
    policy = scenario.engine.policies[0]
    threads = 1 if plan.device == "cuda" else 2
    job = Job(
        scenario, policy, decoder, None, threads, ceilings, ["gpu-check"], runs, directory, True
    )
    execute(job, Watcher())
    run = read_run(directory)
    return _facts(run, analyze(run))


def _facts(run: Any, analysis: Any) -> dict[str, Any]:
    from stepscope.stats import median

    decodes = [r for r in run.steps if r.kind == "decode" and not r.warmup]

    def typical(name: str) -> float | None:
        values = [v for r in decodes if (v := getattr(r, name)) is not None]
        return median(values) if values else None

    views = [s for s in analysis.steps if s.kind == "decode"]
    return {
        "steps": len(decodes),
        "step_ms": _ms(median([v.wall_ns for v in views])),
        "dev_forward_ms": _ms(typical("dev_forward_ns")),
        "dev_gather_ms": _ms(typical("dev_gather_ns")),
        "dev_sample_ms": _ms(typical("dev_sample_ns")),
        "host_launch_ms": _ms(typical("forward_ns")),
        "d2h_wait_ms": _ms(typical("d2h_wait_ns")),
        "launches": typical("num_launches"),
        "graph_hits": sum(r.graph_hit or 0 for r in decodes),
        "mbu": median([v.mbu for v in views if v.mbu is not None]),
        "floor_ms": _ms(median([v.floor_ns for v in views if v.floor_ns is not None])),
        "twin_ms": _ms(median([v.twin_ns for v in views if v.twin_ns is not None])),
        "tokens_per_s": analysis.throughput.output_tokens_per_s,
        "sm_clock_mhz": typical("sm_clock_mhz"),
        "verdict": analysis.verdict.name,
        "sentence": analysis.verdict.sentence,
        "clock": run.meta.clock,
        "basis": run.meta.basis,
        "finish_reasons": dict(analysis.finish_reasons),
    }


def _ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 4)


def _short(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


# ---------------------------------------------------------------- what is written


COLUMNS = (
    "batch",
    "mode",
    "step_ms",
    "dev_forward_ms",
    "dev_gather_ms",
    "dev_sample_ms",
    "host_launch_ms",
    "launches",
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
    return differ + broken + int(kernel)


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


def _step_tables(rows: Sequence[dict[str, Any]]) -> list[str]:
    lines: list[str] = []
    for row in rows:
        if "batch" not in row:
            lines += ["", f"## {row['model']} in {row['dtype']}", "", *_card_lines(row)]
            lines += ["", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
        elif "error" in row:
            lines.append(f"| {row['batch']} | {row['mode']} | {row['error']} |")
        else:
            lines.append(f"| {' | '.join(_cell(row.get(c)) for c in COLUMNS)} |")
    return lines


def _card_lines(row: dict[str, Any]) -> list[str]:
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


def _line(row: dict[str, Any]) -> str:
    if "batch" not in row:
        return f"{row['model']} {row['dtype']}: {row.get('error') or row['best_read_gb_per_s']}"
    what = row.get("error") or f"{row['step_ms']} ms, {row['verdict']}"
    return f"  batch {row['batch']}, {row['mode']}: {what}"


def _reports(plan: Plan, runs: Path, out: Path) -> None:
    """A page for each of the chosen runs, and all runs as records."""
    from stepscope.analyze import analyze
    from stepscope.report import write
    from stepscope.store import read_run

    with tarfile.open(out / "runs.tar.gz", "w:gz") as archive:
        archive.add(runs, "runs")
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
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for everything")
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
    return check(replace(Plan(), budget_s=given.budget), given.out)


if __name__ == "__main__":
    sys.exit(main())
