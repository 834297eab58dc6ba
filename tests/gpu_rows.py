"""The timed part of the GPU check: a row per shape, batch and mode, each one a run.

It is a process of its own (`python -m tests.gpu_rows PLAN RUNS`, see `gpu_check`), as a kernel that
fails takes the whole process's device with it: then a new one goes on behind the row that failed.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOST = 3  # exit code: the device does not answer any more
Row = dict[str, Any]
Key = tuple[Any, ...]
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


EAGER, GRAPHS = Mode("eager"), Mode("graphs", graphs="cuda")
OVERLAPPED = Mode("graphs, overlap", graphs="cuda", overlap=True)
MODES = (
    EAGER,
    GRAPHS,
    OVERLAPPED,
    Mode("eager, overlap", overlap=True),
    Mode("eager, gather", "gather"),
)


@dataclass(frozen=True)
class Shape:
    model: str
    dtype: str
    modes: tuple[Mode, ...] = MODES


@dataclass(frozen=True)
class Plan:
    """What is run, the most telling first. The defaults are for a large GPU; tests are tiny."""

    device: str = "cuda"
    shapes: tuple[Shape, ...] = (
        Shape("dummy:Llama-3.1-8B", "bf16"),
        Shape("dummy:SmolLM2-135M", "bf16"),
        Shape("dummy:Llama-3.1-8B", "fp8", (EAGER, GRAPHS, OVERLAPPED)),
    )
    batches: tuple[int, ...] = (1, 128, 32, 8)
    prompt: int = 512
    output: int = 48
    ends_at: float = 0.0  # by time.monotonic(): no row is begun later
    overrides: tuple[tuple[str, int], ...] = ()
    reported: tuple[str, int, tuple[str, ...]] = ("dummy:Llama-3.1-8B", 1, ("eager", "graphs"))
    kernel_tests: bool = True


def key(row: Row) -> Key:
    return row["model"], row["dtype"], row.get("batch"), row.get("mode")


def measured(plan: Plan, runs: Path, done: Collection[Key] = ()) -> Iterator[Row]:
    """What is out of time or breaks is a row that says so; `begun` comes before each that is run.

    Each shape has its share of the time, and what those before it left. Raises SystemExit(LOST).
    """
    begin = time.monotonic()
    loaded: list[tuple[Shape, Any]] = []
    for number, shape in enumerate(plan.shapes, start=1):
        share = (plan.ends_at - begin) * number / len(plan.shapes)
        yield from _rows(plan, shape, runs, done, begin + share, loaded)
    if plan.device == "cuda":  # last, as the profiler slows launching down in what follows
        for shape, decoder in loaded:
            if time.monotonic() < plan.ends_at:
                yield from _launches(plan, shape, decoder)


def _rows(
    plan: Plan,
    shape: Shape,
    runs: Path,
    done: Collection[Key],
    ends_at: float,
    loaded: list[tuple[Shape, Any]],
) -> Iterator[Row]:
    import torch

    from stepscope.device.kept_ceilings import load_or_measure
    from stepscope.models.load import load_model
    from stepscope.runner.job import build_decoder

    card: Row = {"model": shape.model, "dtype": shape.dtype}
    cases = [(batch, mode) for batch in plan.batches for mode in shape.modes]
    rows = [({**card, "batch": batch, "mode": mode.name}, batch, mode) for batch, mode in cases]
    left = [row for row in rows if key(row[0]) not in done]
    if not left:
        return
    try:
        begin = time.monotonic()
        overrides = dict(plan.overrides)
        model = load_model(shape.model, shape.dtype, overrides=overrides, device=plan.device)
        ceilings = load_or_measure(model.spec, torch.get_num_threads(), device=plan.device)
        decoder = build_decoder(model, "plain")
        loaded.append((shape, decoder))
    except Exception as error:  # the other shapes are still measured
        yield {**card, "error": _short(error)}
        _still_there(plan.device)
        return
    if key(card) not in done:
        yield {**card, **_card(ceilings), "setup_s": round(time.monotonic() - begin, 1)}
    for row, batch, mode in left:
        if time.monotonic() > ends_at:
            yield {**row, "error": "not run: out of time"}
            continue
        yield {"begun": row}
        begin = time.monotonic()
        try:
            found = _one(plan, runs, decoder, ceilings, batch, mode)
        except Exception as error:  # likewise
            yield {**row, "error": _short(error)}
            _still_there(plan.device)
            continue
        yield {**row, **found, "took_s": round(time.monotonic() - begin, 2)}


def _still_there(device: str) -> None:
    """After an error: one that the device keeps would be that of every row to come."""
    import torch

    if device != "cuda":
        return
    try:
        torch.cuda.synchronize()
        torch.ones(1, device=device).item()
    except RuntimeError:
        raise SystemExit(LOST) from None


def _card(ceilings: Any) -> Row:
    return {
        "read_gb_per_s": {f"{size >> 20} MiB": rate / 1e9 for size, rate in ceilings.read_curve},
        "best_read_gb_per_s": max(rate for _, rate in ceilings.read_curve) / 1e9,
        "copy_gb_per_s": ceilings.copy_bytes_per_s / 1e9,
        "gemm_tflops": {k: v / 1e12 for k, v in ceilings.gemm_flops.items()},
        "gemv_gb_per_s": {p.name: p.bytes_per_s / 1e9 for p in ceilings.gemv},
    }


def _one(plan: Plan, runs: Path, decoder: Any, ceilings: Any, batch: int, mode: Mode) -> Row:
    from stepscope.analyze import analyze
    from stepscope.runner.execute import execute
    from stepscope.runner.job import Beside, Job, Watcher
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
    name = f"{decoder.spec.name}-{decoder.spec.dtype}-{batch}-{mode.name}"
    directory = runs / name.replace(":", "-").replace(", ", "-")
    job = Job(
        scenario,
        scenario.engine.policies[0],
        decoder,
        None,
        1 if plan.device == "cuda" else 2,
        ceilings,
        ["gpu-check"],
        runs,
        directory,
        True,
        beside=Beside((batch,), (plan.prompt + plan.output // 2,), launches=False),
    )
    execute(job, Watcher())
    run = read_run(directory)
    return _facts(run, analyze(run))


def _facts(run: Any, analysis: Any) -> Row:
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
        "host_prepare_ms": _ms(typical("prepare_ns")),
        "host_launch_ms": _ms(typical("forward_ns")),
        "d2h_wait_ms": _ms(typical("d2h_wait_ns")),
        "graph_hits": sum(r.graph_hit or 0 for r in decodes),
        "mbu": median([v.mbu for v in views if v.mbu is not None]),
        "floor_ms": _ms(median([v.floor_ns for v in views if v.floor_ns is not None])),
        "twin_ms": _ms(median([v.twin_ns for v in views if v.twin_ns is not None])),
        "tokens_per_s": analysis.throughput.output_tokens_per_s,
        "sm_clock_mhz": typical("sm_clock_mhz"),
        "power_mw": typical("power_mw"),
        "throttle_reasons": typical("throttle_reasons"),
        "verdict": analysis.verdict.name,
        "sentence": analysis.verdict.sentence,
        "clock": run.meta.clock,
        "basis": run.meta.basis,
        "finish_reasons": dict(analysis.finish_reasons),
    }


def _launches(plan: Plan, shape: Shape, decoder: Any) -> Iterator[Row]:
    """Launches of a decode step at the smallest batch, by mode."""
    from stepscope.runner.graphs import CudaGraphs
    from stepscope.runner.launching import launches_of
    from stepscope.runner.probe import decode_plan
    from stepscope.runner.torch_runner import TorchRunner

    batch = min(plan.batches)
    row: Row = {"model": shape.model, "dtype": shape.dtype}
    found: dict[str, int | None] = {}
    for mode in shape.modes:
        if mode.overlap:
            continue  # launched alike
        try:
            runner = TorchRunner(decoder, batch, 16, mode.attention)
            if mode.graphs == "cuda":
                graphs = runner.graphs = CudaGraphs(decoder, runner.attention, (batch,))
                graphs.prepare()
            found[mode.name] = launches_of(runner, decode_plan(batch, 16, 16))
        except Exception as error:  # a profiler may be refused
            yield {**row, "mode": f"launches of {mode.name}", "error": _short(error)}
            _still_there(plan.device)
    yield {**row, "mode": "launches", "launches": found}


def _ms(ns: float | None) -> float | None:
    return None if ns is None else round(ns / 1e6, 4)


def _short(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"


def main(plan_file: str, runs: str) -> None:
    plan, done = pickle.loads(Path(plan_file).read_bytes())
    for row in measured(plan, Path(runs), done):
        print(json.dumps(row, default=str), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
