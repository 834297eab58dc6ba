"""`make bench`: decode ms per step of this engine and of transformers, paired in one run.

Same weights, dtype, threads; the two are timed in turn, block by block, so that a change of the
machine's speed hits both. transformers has no int8 and int4 of this kind and runs in bf16 beside
them. A second table sets each quantized format against this engine's own bf16: the speed-up beside
the ratio of bytes, which is the most it could be where reading is all there is. A third one shows
what each format costs in quality. Prints the tables and writes JSON.
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
from stepscope.runner.job import build_decoder
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner
from stepscope.spec import QUANTIZED, ModelSpec, compute_dtype
from tests.quality import report

MODEL = "smollm2-135m"
BLOCKS = 7
STEPS_PER_BLOCK = 6
PAGE_SIZE = 16


def hugging_face(model: LoadedModel) -> Any:
    """The same weights in transformers' LlamaForCausalLM; the fused tensors are split as views."""
    from transformers import LlamaConfig, LlamaForCausalLM

    spec = model.spec
    config = LlamaConfig(
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        rms_norm_eps=spec.norm_eps,
        tie_word_embeddings=spec.tied,
        attn_implementation="sdpa",
    )
    other = LlamaForCausalLM(config)
    other.load_state_dict(_state(model), assign=True)
    return other.eval()


def _state(model: LoadedModel) -> dict[str, torch.Tensor]:
    spec, w = model.spec, model.weights
    q, k = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    state = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["final_norm"]}
    state["lm_head.weight"] = w.get("head", w["embed"])
    for i in range(spec.layers):
        here, there = f"layers.{i}.", f"model.layers.{i}."
        for name, part in zip("qkv", w[here + "qkv"].split([q, k, k]), strict=True):
            state[f"{there}self_attn.{name}_proj.weight"] = part
        gate, up = w[here + "gate_up"].chunk(2)
        state[f"{there}mlp.gate_proj.weight"], state[f"{there}mlp.up_proj.weight"] = gate, up
        state[f"{there}mlp.down_proj.weight"] = w[here + "down"]
        state[f"{there}self_attn.o_proj.weight"] = w[here + "o"]
        state[f"{there}input_layernorm.weight"] = w[here + "attn_norm"]
        state[f"{there}post_attention_layernorm.weight"] = w[here + "mlp_norm"]
    return state


def theirs(model: Any, batch: int, context: int) -> Callable[[], list[float]]:
    """Blocks of decode steps with a dynamic cache; the greedy token is read back each step."""
    with torch.inference_mode():
        prompt = torch.randint(5, 1000, (1, context - 1))
        first = model(prompt, use_cache=True, logits_to_keep=1)
        token = first.logits[:, -1].argmax(-1, keepdim=True).repeat(batch, 1)
        cache = first.past_key_values
        cache.batch_repeat_interleave(batch)  # one prefill is enough: only its size matters here

    @torch.inference_mode()
    def block() -> list[float]:
        nonlocal token
        times = []
        for _ in range(STEPS_PER_BLOCK):
            begin = time.perf_counter_ns()
            logits = model(token, past_key_values=cache, use_cache=True).logits[:, -1]
            token = logits.argmax(-1, keepdim=True)
            token.tolist()
            times.append((time.perf_counter_ns() - begin) / 1e6)
        cache.crop(-STEPS_PER_BLOCK)
        return times

    return block


def ours(runner: TorchRunner, batch: int, context: int) -> Callable[[], list[float]]:
    plan = decode_plan(batch, context, PAGE_SIZE)

    def block() -> list[float]:
        return [row.wall_ns / 1e6 for row in steps(runner, plan, STEPS_PER_BLOCK)]

    return block


def paired(a: Callable[[], list[float]], b: Callable[[], list[float]]) -> dict[str, Any]:
    """Median ms of both over interleaved blocks, and the median and range of block ratios."""
    a(), b()
    ratios, left, right = [], [], []
    for _ in range(BLOCKS):
        x, y = statistics.median(a()), statistics.median(b())
        left.append(x)
        right.append(y)
        ratios.append(y / x)
    return {
        "ours_ms": statistics.median(left),
        "theirs_ms": statistics.median(right),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def runner_for(model: LoadedModel, tokens: int) -> TorchRunner:
    """With a cache of at least so many tokens."""
    return TorchRunner(build_decoder(model, "auto"), -(-tokens // PAGE_SIZE), PAGE_SIZE)


def step_bytes(spec: ModelSpec, batch: int, context: int) -> int:
    return spec.weight_bytes + spec.kv_bytes_per_token * batch * context


def rows(dtype: str, batches: list[int], context: int, threads: int) -> list[dict[str, Any]]:
    model = load_model(MODEL, dtype)
    floats = load_model(MODEL, compute_dtype(dtype)) if dtype in QUANTIZED else model
    other = hugging_face(floats)  # before the decoder takes the weights
    ceilings = load_or_measure(model.spec, threads)
    runner = runner_for(model, max(batches) * (context + PAGE_SIZE))
    found = []
    for batch in batches:
        result = paired(ours(runner, batch, context), theirs(other, batch, context))
        read = step_bytes(model.spec, batch, context)
        bound = read / ceilings.read_rate(read) * 1e3
        found.append(
            {
                "dtype": dtype,
                "batch": batch,
                "context": context,
                **result,
                "bound_ms": bound,
                "ours_of_bound": bound / result["ours_ms"],
            }
        )
        print(line(found[-1]), flush=True)
    return found


def fewer_bytes(dtypes: list[str], batches: list[int], context: int) -> list[dict[str, Any]]:
    """Each format against this engine's own bf16, paired."""
    tokens = max(batches) * (context + PAGE_SIZE)
    base = runner_for(load_model(MODEL, "bf16"), tokens)
    found = []
    print("\nweights    batch  context   its ms   bf16 ms  speed-up  (range)     bytes  of them")
    for dtype in dtypes:
        runner = runner_for(load_model(MODEL, dtype), tokens)
        for batch in batches:
            found.append(against(base, runner, batch, context))
            print(bytes_line(found[-1]), flush=True)
    return found


def against(base: TorchRunner, runner: TorchRunner, batch: int, context: int) -> dict[str, Any]:
    result = paired(ours(runner, batch, context), ours(base, batch, context))
    its, more = (step_bytes(r.decoder.spec, batch, context) for r in (runner, base))
    return {
        "dtype": runner.decoder.spec.dtype,
        "products": runner.decoder.products,
        "batch": batch,
        "context": context,
        "its_ms": result["ours_ms"],
        "bf16_ms": result["theirs_ms"],
        "speed_up": result["ratio"],
        "speed_up_range": result["ratio_range"],
        "bytes_ratio": more / its,
        "speed_up_of_bytes_ratio": result["ratio"] * its / more,
    }


def bytes_line(row: dict[str, Any]) -> str:
    low, high = row["speed_up_range"]
    return (
        f"{row['dtype']:<10} {row['batch']:>5} {row['context']:>8} {row['its_ms']:>8.1f} "
        f"{row['bf16_ms']:>9.1f} {row['speed_up']:>8.2f}x  {low:.2f}-{high:.2f} "
        f"{row['bytes_ratio']:>8.2f}x {row['speed_up_of_bytes_ratio'] * 100:>6.0f} %"
    )


def line(row: dict[str, Any]) -> str:
    low, high = row["ratio_range"]
    return (
        f"{row['dtype']:<5} {row['batch']:>5} {row['context']:>8} {row['ours_ms']:>9.1f} "
        f"{row['theirs_ms']:>13.1f} {row['ratio']:>6.2f}x  {low:.2f}-{high:.2f} "
        f"{row['bound_ms']:>9.1f} {row['ours_of_bound'] * 100:>8.0f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32", "int8"])
    parser.add_argument("--formats", nargs="+", default=["int8", "int4"], choices=QUANTIZED)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--context", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--no-transformers", action="store_true", help="formats only")
    parser.add_argument("--no-quality", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    compared = [] if options.no_transformers else options.dtype
    if compared:
        print("dtype batch  context   ours ms  transformers   ratio  (range)    bound ms  of bound")
    found = [
        row
        for dtype in compared
        for context in options.context
        for row in rows(dtype, options.batch, context, options.threads)
    ]
    fewer = fewer_bytes(options.formats, options.batch, min(options.context))
    print()
    quality = [] if options.no_quality else report(["bf16", *options.formats], MODEL)
    document = {
        "host": describe_host(),
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blocks": BLOCKS,
        "steps_per_block": STEPS_PER_BLOCK,
        "rows": found,
        "fewer_bytes": fewer,
        "quality": [asdict(row) for row in quality],
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
