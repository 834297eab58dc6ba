"""`make bench`: decode ms per step of this engine and of transformers, paired in one run.

Same weights, dtype, threads; those compared are timed in turn, block by block, so that a change of
the machine's speed hits all. Four parts, each of which prints its table and writes JSON as soon as
it is done (--only chooses):

eager     this engine against transformers with its dynamic cache. transformers has no int8 of this
          kind and runs in bf16 beside it.
formats   each quantized format against this engine's own bf16: the speed-up beside the ratio of
          bytes, which is the most it could be where reading is all there is.
compiled  this engine with --graphs compile against transformers eager, and compiled with its static
          cache. The marks are what vLLM's CPU backend, compiled, reached against transformers eager
          in bf16 at context 128 on another two-core machine.
quality   what each format costs in quality.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from stepscope.device.host import describe_host
from stepscope.device.kept_ceilings import load_or_measure
from stepscope.models.load import LoadedModel, load_model
from stepscope.roofline import Ceilings
from stepscope.runner.compiled import CompiledDecode
from stepscope.runner.job import build_decoder
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner
from stepscope.spec import QUANTIZED, ModelSpec, compute_dtype
from tests.bench_theirs import CompiledDecoding, Decoding, hugging_face
from tests.quality import report

MODEL = "smollm2-135m"
BLOCKS = 7
STEPS_PER_BLOCK = 6
BLOCK_MS = 1000  # a block of slow steps is shorter, but never less than two
PAGE_SIZE = 16
PARTS = ("eager", "formats", "compiled", "quality")
# Batch -> times transformers' eager step: vLLM's CPU backend in bf16 at context 128.
EAGER_MARKS = {1: 1.4, 4: 1.3, 16: 1.5, 32: 1.5}
COMPILED_MARKS = {1: 2.0, 4: 1.9, 16: 2.1, 32: 2.2}

Block = Callable[[], list[float]]  # ms of each of its steps
Row = dict[str, Any]


def block_of(step: Callable[[], None], back: Callable[[], None]) -> Block:
    """Steps from the same context on; `back` returns to it."""

    def block() -> list[float]:
        times: list[float] = []
        while len(times) < 2 or (len(times) < STEPS_PER_BLOCK and sum(times) < BLOCK_MS):
            begin = time.perf_counter_ns()
            step()
            times.append((time.perf_counter_ns() - begin) / 1e6)
        back()
        return times

    return block


def theirs(model: Any, batch: int, context: int) -> Block:
    decoding = Decoding(model, batch, context)
    return block_of(decoding.step, decoding.back)


def theirs_compiled(model: Any, batch: int, context: int) -> Block:
    decoding = CompiledDecoding(model, batch, context, room=STEPS_PER_BLOCK)
    return block_of(decoding.step, decoding.back)


def ours(runner: TorchRunner, batch: int, context: int) -> Block:
    plan = decode_plan(batch, context, PAGE_SIZE)
    return block_of(lambda: _one_step(runner, plan), lambda: None)


def _one_step(runner: TorchRunner, plan: Any) -> None:
    steps(runner, plan, 1)


def in_turn(blocks: dict[str, Block]) -> dict[str, Any]:
    """Median ms of each over interleaved blocks; of all but the first also its ms over the
    first one's: the median and the range over the rounds."""
    for block in blocks.values():
        block()
    rounds = [{k: statistics.median(b()) for k, b in blocks.items()} for _ in range(BLOCKS)]
    first, *others = blocks
    found: dict[str, Any] = {f"{k}_ms": statistics.median(r[k] for r in rounds) for k in blocks}
    for name in others:
        ratios = [r[name] / r[first] for r in rounds]
        found[f"over_{name}"] = statistics.median(ratios)
        found[f"over_{name}_range"] = [min(ratios), max(ratios)]
    return found


def runner_for(model: LoadedModel, tokens: int) -> TorchRunner:
    """With a cache of at least so many tokens."""
    return TorchRunner(build_decoder(model, "auto"), -(-tokens // PAGE_SIZE), PAGE_SIZE)


def step_bytes(spec: ModelSpec, batch: int, context: int) -> int:
    return spec.weight_bytes + spec.kv_bytes_per_token * batch * context


def bound(spec: ModelSpec, ceilings: Ceilings, batch: int, context: int, ms: float) -> Row:
    """What reading the step's bytes takes at the measured bandwidth, and its share of `ms`."""
    read = step_bytes(spec, batch, context)
    least = read / ceilings.read_rate(read) * 1e3
    return {"bound_ms": least, "ours_of_bound": least / ms}


def over(row: Row, name: str) -> str:
    low, high = row[f"over_{name}_range"]
    return f"{row[f'over_{name}']:>5.2f}x {low:>5.2f}-{high:.2f}"


def mark(marks: dict[int, float], row: Row) -> str:
    if row["dtype"] != "bf16" or row["context"] != 128 or row["batch"] not in marks:
        return "    -"
    return f"{marks[row['batch']]:>4.1f}x"


# ---------------------------------------------------------------- eager


def eager(options: argparse.Namespace) -> list[Row]:
    print(
        "weights batch context   ours ms  transformers  ratio (range)       mark  bound ms  of it"
    )
    return [
        row
        for dtype in options.dtype or ["bf16", "fp32", "int8"]
        for context in options.context
        for row in eager_rows(dtype, options.batch, context, options.threads)
    ]


def eager_rows(dtype: str, batches: list[int], context: int, threads: int) -> list[Row]:
    model = load_model(MODEL, dtype)
    floats = load_model(MODEL, compute_dtype(dtype)) if dtype in QUANTIZED else model
    other = hugging_face(floats)  # before the decoder takes the weights
    ceilings = load_or_measure(model.spec, threads)
    runner = runner_for(model, max(batches) * (context + PAGE_SIZE))
    found = []
    for batch in batches:
        pair = {"ours": ours(runner, batch, context), "theirs": theirs(other, batch, context)}
        row: Row = {"dtype": dtype, "batch": batch, "context": context, **in_turn(pair)}
        row |= bound(model.spec, ceilings, batch, context, row["ours_ms"])
        found.append(row)
        print(
            f"{dtype:<7} {batch:>5} {context:>7} {row['ours_ms']:>9.1f} {row['theirs_ms']:>13.1f} "
            f"{over(row, 'theirs')} {mark(EAGER_MARKS, row):>9} {row['bound_ms']:>9.1f} "
            f"{row['ours_of_bound'] * 100:>4.0f} %",
            flush=True,
        )
    return found


# ---------------------------------------------------------------- compiled


def compiled(options: argparse.Namespace) -> list[Row]:
    print(
        "weights batch context   ours ms  their eager  ratio (range)    mark  "
        "their compiled  ratio (range)   bound ms  of it"
    )
    return [
        row
        for dtype in options.dtype or ["bf16"]
        for row in compiled_rows(dtype, options.batch, options.context, options.threads)
    ]


def compiled_rows(dtype: str, batches: list[int], contexts: list[int], threads: int) -> list[Row]:
    model = load_model(MODEL, dtype)
    other = hugging_face(model)
    ceilings = load_or_measure(model.spec, threads)
    runner = runner_for(model, max(batches) * (max(contexts) + PAGE_SIZE))
    runner.graphs = CompiledDecode(runner.decoder, runner.attention, batches, print)
    found = []
    for context in contexts:
        for batch in batches:
            blocks = {
                "ours": ours(runner, batch, context),
                "theirs": theirs(other, batch, context),
                "theirs_compiled": theirs_compiled(other, batch, context),
            }
            row: Row = {"dtype": dtype, "batch": batch, "context": context, **in_turn(blocks)}
            row |= bound(model.spec, ceilings, batch, context, row["ours_ms"])
            found.append(row)
            print(
                f"{dtype:<7} {batch:>5} {context:>7} {row['ours_ms']:>9.1f} "
                f"{row['theirs_ms']:>12.1f} {over(row, 'theirs')} {mark(COMPILED_MARKS, row):>6} "
                f"{row['theirs_compiled_ms']:>15.1f} {over(row, 'theirs_compiled')} "
                f"{row['bound_ms']:>9.1f} {row['ours_of_bound'] * 100:>4.0f} %",
                flush=True,
            )
    return found


# ---------------------------------------------------------------- formats, quality


def formats(options: argparse.Namespace) -> list[Row]:
    """Each format against this engine's own bf16, paired, at the shortest context."""
    context = min(options.context)
    tokens = max(options.batch) * (context + PAGE_SIZE)
    base = runner_for(load_model(MODEL, "bf16"), tokens)
    found = []
    print("weights    batch context   its ms   bf16 ms  speed-up (range)     bytes  of them")
    for dtype in options.formats:
        runner = runner_for(load_model(MODEL, dtype), tokens)
        for batch in options.batch:
            found.append(against(base, runner, batch, context))
            print(format_line(found[-1]), flush=True)
    return found


def against(base: TorchRunner, runner: TorchRunner, batch: int, context: int) -> Row:
    pair = {"its": ours(runner, batch, context), "bf16": ours(base, batch, context)}
    its, more = (step_bytes(r.decoder.spec, batch, context) for r in (runner, base))
    row: Row = {
        "dtype": runner.decoder.spec.dtype,
        "products": runner.decoder.products,
        "batch": batch,
        "context": context,
        **in_turn(pair),
    }
    return {**row, "bytes_ratio": more / its, "of_bytes_ratio": row["over_bf16"] * its / more}


def format_line(row: Row) -> str:
    return (
        f"{row['dtype']:<10} {row['batch']:>5} {row['context']:>7} {row['its_ms']:>8.1f} "
        f"{row['bf16_ms']:>9.1f} {over(row, 'bf16'):>20} "
        f"{row['bytes_ratio']:>6.2f}x {row['of_bytes_ratio'] * 100:>6.0f} %"
    )


def quality(options: argparse.Namespace) -> list[Row]:
    return [asdict(row) for row in report(["bf16", *options.formats], MODEL)]


# ---------------------------------------------------------------- the command


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    parser.add_argument("--only", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--dtype", nargs="+", help="eager: all three; compiled: bf16")
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"], choices=QUANTIZED)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run = {"eager": eager, "formats": formats, "compiled": compiled, "quality": quality}
    for part in PARTS:
        if part in options.only:
            begin = time.monotonic()
            print(f"\n{part}")
            rows = run[part](options)
            write(options, part, rows)
            print(f"{time.monotonic() - begin:.0f} s; wrote {options.output}", flush=True)


def write(options: argparse.Namespace, part: str, rows: list[Row]) -> None:
    """Beside the parts of an earlier run on the same machine and torch, if the file has any."""
    same = {
        "host": describe_host(),
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blocks": BLOCKS,
    }
    document: dict[str, Any] = {**same}
    if options.output.exists():
        before = json.loads(options.output.read_text())
        if all(before.get(key) == value for key, value in same.items()):
            document = before
    options.output.write_text(json.dumps({**document, part: rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
