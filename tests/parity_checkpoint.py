"""Writes tests/data/parity: a tiny Llama and what transformers generates with it in fp32 on a CPU.

`python -m tests.parity_checkpoint` makes it again; the GPU check compares with it where neither
transformers nor a model is at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DIRECTORY = Path(__file__).parent / "data" / "parity"
LENGTHS = (3, 9, 17, 26, 40, 58)
NEW_TOKENS = 32
LOUDER = 8.0  # else the text would hardly depend on the context


def main() -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=251,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.mul_(LOUDER)
    model.save_pretrained(DIRECTORY)
    for name in ("generation_config.json",):
        (DIRECTORY / name).unlink(missing_ok=True)
    requests = [_generate(model, torch.randint(3, 251, (1, n))) for n in LENGTHS]
    (DIRECTORY / "ids.json").write_text(json.dumps(requests) + "\n")


def _generate(model: Any, prompt: Any) -> dict[str, Any]:
    """ids, and by how much each led the next best."""
    out = model.generate(
        prompt,
        attention_mask=prompt.new_ones(prompt.shape),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    best = [logits[0].topk(2).values.tolist() for logits in out.logits]
    return {
        "prompt": prompt[0].tolist(),
        "ids": out.sequences[0, prompt.shape[1] :].tolist(),
        "gaps": [round(first - second, 5) for first, second in best],
    }


if __name__ == "__main__":
    main()
