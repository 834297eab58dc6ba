"""Every family of models as a tiny random checkpoint that transformers makes and saves.

Weights are drawn large, so that logits lie far apart, and what starts as zeros or ones (norms,
biases) is drawn too, so that leaving it out shows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

COMMON: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 16}


@dataclass(frozen=True)
class Family:
    """A configuration of transformers, and what of our spec it is there to try.

    without: one value of a spec field each that switches a trait off; the logits must then differ.
    """

    name: str
    classes: str  # XConfig and XForCausalLM
    config: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] = field(default_factory=dict)
    gguf: str = "llama"  # its architecture in GGUF files
    seed: int = 11

    def __str__(self) -> str:
        return self.name


def rope(kind: str, factor: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, "factor": factor, **more}}


LLAMA3 = rope(
    *("llama3", 8.0),
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN = rope("yarn", 8.0, original_max_position_embeddings=32)
GEMMA3_ROPE = {
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    }
}

FAMILIES = [
    Family(
        "Llama 2: one kv head each, wide theta",
        "Llama",
        {"num_key_value_heads": 6, "rope_theta": 5e5},
        {"rope_theta": 1e4},
    ),
    Family("SmolLM2: grouped heads, tied", "Llama", {"tie_word_embeddings": True}),
    Family("Llama: one kv head, head_dim 20", "Llama", {"num_key_value_heads": 1, "head_dim": 20}),
    Family("Llama 3.1: llama3 RoPE", "Llama", LLAMA3, {"rope": None}),
    Family("Llama: linear RoPE", "Llama", rope("linear", 4.0), {"rope": None}),
    Family("Llama: YaRN", "Llama", YARN, {"rope": None}),
    Family("Mistral: window 16", "Mistral", {"sliding_window": 16}, {"window": None}),
    Family("Qwen 2.5: biases", "Qwen2", gguf="qwen2"),
    Family(
        "Qwen 2: window 13 from layer 1",
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
        {"window": None, "layer_pattern": "s"},
        "qwen2",
    ),
    Family("Qwen 3: qk-norm, head_dim 16", "Qwen3", {"head_dim": 16}, gguf="qwen3"),
    Family(
        "Gemma 2",
        "Gemma2",
        {**GEMMA, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
        {"attn_softcap": None, "final_softcap": None, "window": None, "layer_pattern": "s"}
        | {"scale_embeddings": False, "query_scale": None, "activation": "silu"},
        "gemma2",
    ),
    Family(
        "Gemma 3",
        "Gemma3Text",
        {**GEMMA, **GEMMA3_ROPE, "num_hidden_layers": 7},
        {"local_rope_theta": None, "rope": None, "window": None, "layer_pattern": "s"}
        | {"scale_embeddings": False, "query_scale": None, "activation": "silu"},
        "gemma3",
    ),
    Family(
        "Mixtral: 2 of 5 experts",
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 2},
        {"experts_per_token": 1, "renormalize": False},
    ),
    Family(
        "Qwen 3 MoE: 3 of 8 experts",
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"norm_topk_prob": True},
        {"experts_per_token": 2, "renormalize": False},
        "qwen3moe",
        seed=12,
    ),
    Family(
        "Qwen 3 MoE: shares as they are",
        "Qwen3Moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 12},
        {"renormalize": True},
        "qwen3moe",
    ),
]


def make(family: Family, folder: Path) -> Any:
    """transformers' model, saved to the folder; its plain attention, which knows every trait."""
    import transformers

    config_class = getattr(transformers, f"{family.classes}Config")
    name = family.classes.removesuffix("Text")
    model_class = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(family.seed)
    config = config_class(**{**COMMON, **family.config}, attn_implementation="eager")
    model: Any = model_class(config).eval()
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if "norm" in weight_name:
                mean = 0.0 if name.startswith("Gemma") else 1.0
                # Norms after a block outweigh Gemma's large embeddings, or one token repeats.
                mean += 8.0 if "post_" in weight_name and mean == 0.0 else 0.0
                weight.uniform_(mean - 0.5, mean + 0.5)
            elif weight_name.endswith("bias"):
                weight.normal_(0, 0.5)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def their_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """(tokens, vocab), without a cache."""
    rows: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return rows
