"""`make bench`: decode ms per step of this engine and of transformers, paired in one run.

Same weights, dtype, threads; the two are timed in turn, block by block, so that a change of the
machine's speed hits both. Prints a table and writes JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from stepscope.device.ceilings import load_or_measure
from stepscope.device.host import describe_host
from stepscope.models.load import LoadedModel, load_model
from stepscope.runner.execute import build_decoder
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner

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
        prompt = torch.randint(5, 1000, (batch, context - 1))
        first = model(prompt, use_cache=True, logits_to_keep=1)
        token = first.logits[:, -1].argmax(-1, keepdim=True)
    cache = first.past_key_values

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


def rows(dtype: str, batches: list[int], context: int, threads: int) -> list[dict[str, Any]]:
    model = load_model("smollm2-135m", dtype)
    other = hugging_face(model)  # before the decoder takes the weights
    ceilings = load_or_measure(model.spec, threads)
    pages = max(batches) * -(-context // PAGE_SIZE)
    runner = TorchRunner(build_decoder(model, "auto"), pages, PAGE_SIZE)
    found = []
    for batch in batches:
        result = paired(ours(runner, batch, context), theirs(other, batch, context))
        read = model.spec.weight_bytes + model.spec.kv_bytes_per_token * batch * context
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
    parser.add_argument("--dtype", nargs="+", default=["bf16", "fp32"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("dtype batch  context   ours ms  transformers   ratio  (range)    bound ms  of bound")
    found = [
        row
        for dtype in options.dtype
        for row in rows(dtype, options.batch, options.context, options.threads)
    ]
    document = {
        "host": describe_host(),
        "threads": options.threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blocks": BLOCKS,
        "steps_per_block": STEPS_PER_BLOCK,
        "rows": found,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n")
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
