"""Loading against independent witnesses: transformers' checkpoints and the golden token ids."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.models.fetch import fetch
from stepscope.models.load import LoadedModel, load_model
from stepscope.models.tokenizer import Detokenizer, TextTokenizer
from tests import tiny_llama as tiny

GOLDENS = Path(__file__).parents[1] / "data" / "goldens"
TRANSFORMERS = json.loads((GOLDENS / "smollm2_greedy_transformers_fp32.json").read_text())["items"]
NUMPY = json.loads((GOLDENS / "gguf_numpy_f32.json").read_text())["smollm2"]

# What a load may hold at its peak: the weights, a third more, and Python's tokenizer tables.
PEAK_SHARE = 1.3
PEAK_SCRIPT = """
import json, re, sys
from stepscope.models.load import load_model
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
weights = load_model(sys.argv[1], sys.argv[2]).weights
print(json.dumps([peak() - before, sum(w.nbytes for w in weights.values())]))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {k: v for k, v in tiny.CONFIG.items() if k != "model_type"}
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder, max_shard_size="8KB")
    return folder


def state(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import LlamaForCausalLM

    tensors: dict[str, torch.Tensor] = LlamaForCausalLM.from_pretrained(folder).state_dict()
    return tensors


def test_a_checkpoint_of_transformers(checkpoint: Path) -> None:
    """Its own names and shapes, sharded, with a config of the current version."""
    model = load_model(str(checkpoint), "fp32")
    tensors = state(checkpoint)
    assert list(checkpoint.glob("*.index.json"))
    assert model.spec.rope_theta == 500.0 and model.spec.eos_ids == (2, 7)
    layer = "model.layers.1.self_attn."
    qkv = torch.cat([tensors[f"{layer}{n}_proj.weight"] for n in "qkv"])
    assert torch.equal(model.weights["layers.1.qkv"], qkv)
    assert torch.equal(model.weights["head"], tensors["lm_head.weight"])
    assert sum(w.numel() for w in model.weights.values()) == sum(
        t.numel() for t in tensors.values()
    )


def test_the_same_checkpoint_as_gguf(checkpoint: Path, tmp_path: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in state(checkpoint).items()}
    path = tiny.write_gguf(tmp_path / "same.gguf", tiny.gguf_weights(arrays))
    as_gguf, as_hf = load_model(str(path), "fp32"), load_model(str(checkpoint), "fp32")
    assert as_gguf.weights.keys() == as_hf.weights.keys()
    for name, tensor in as_hf.weights.items():
        assert torch.equal(as_gguf.weights[name], tensor), name


@pytest.fixture(scope="module")
def tokenizer(smollm2: LoadedModel) -> TextTokenizer:
    assert smollm2.tokenizer is not None
    return smollm2.tokenizer


@pytest.mark.model
def test_smollm2_is_what_its_card_says(smollm2: LoadedModel) -> None:
    spec = smollm2.spec
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads) == (30, 576, 9, 3)
    assert (spec.head_dim, spec.intermediate, spec.vocab) == (64, 1536, 49152)
    assert (spec.max_context, spec.rope_theta, spec.tied) == (8192, 1e5, True)
    assert (spec.eos_ids, spec.bos_id, spec.add_bos) == ((2, 0), 1, False)
    assert sum(w.numel() for w in smollm2.weights.values()) == 134_515_008
    assert spec.weight_bytes == 4 * 134_515_008
    assert spec.linear_bytes == 4 * spec.linear_params


@pytest.mark.model
def test_smollm2_weights_are_its_dequantized_tensors(
    smollm2: LoadedModel, smollm2_path: Path
) -> None:
    """The `gguf` package reads the file its own way."""
    import gguf

    tensors = {t.name: t for t in gguf.GGUFReader(smollm2_path).tensors}

    def values(name: str) -> Any:
        tensor = tensors[name]
        return gguf.quants.dequantize(tensor.data, tensor.tensor_type)

    embed = smollm2.weights["embed"].numpy()
    np.testing.assert_array_equal(embed, values("token_embd.weight"))
    down = smollm2.weights["layers.29.down"].numpy()
    np.testing.assert_array_equal(down, values("blk.29.ffn_down.weight"))
    k_rows = smollm2.weights["layers.7.qkv"][9 * 64 : 12 * 64].numpy()
    np.testing.assert_array_equal(tiny.interleaved(k_rows, 3), values("blk.7.attn_k.weight"))


@pytest.mark.model
@pytest.mark.parametrize("item", TRANSFORMERS, ids=lambda i: f"{i['mode']}-{i['prompt'][:12]}")
def test_golden_prompts_and_texts(tokenizer: TextTokenizer, item: dict[str, Any]) -> None:
    encode = tokenizer.chat if item["mode"] == "chat" else tokenizer.encode
    assert encode(item["prompt"]) == item["prompt_ids"]
    assert tokenizer.encode(item["text"]) == item["prompt_ids"]
    assert tokenizer.decode(item["greedy_ids"], skip_special=False) == item["greedy_text"]


@pytest.mark.model
@pytest.mark.parametrize("item", NUMPY, ids=lambda i: i["prompt"][:12])
def test_numpy_goldens(tokenizer: TextTokenizer, item: dict[str, Any]) -> None:
    assert tokenizer.encode(item["prompt"]) == item["prompt_ids"]
    assert tokenizer.decode(item["greedy"]) == item["text"]


@pytest.mark.model
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=80))
def test_streaming_random_ids(tokenizer: TextTokenizer, ids: list[int]) -> None:
    stream = Detokenizer(tokenizer)
    pieces = [*(stream.push(i) for i in ids), stream.flush()]
    assert "".join(pieces) == tokenizer.decode(ids) == tokenizer._backend.decode(ids)


@pytest.mark.model
def test_a_system_message_replaces_the_default(tokenizer: TextTokenizer) -> None:
    text = tokenizer.decode(tokenizer.chat("Hi", system="Be brief."), skip_special=False)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi")
    assert text.endswith("<|im_start|>assistant\n") and "Hugging Face" not in text


@pytest.mark.model
def test_the_catalogue_name_loads_the_cached_file(smollm2_path: Path) -> None:
    said: list[str] = []
    model = load_model("smollm2-135m", progress=said.append)
    assert model.spec.name == "smollm2-135m" and model.spec.dtype == "bf16"
    assert said[-1] == f"Loading {smollm2_path}: 182 of 182 tensors"
    assert fetch("smollm2-135m", verify=True) == smollm2_path


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_no_second_copy_of_the_weights(smollm2_path: Path, dtype: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PEAK_SCRIPT, str(smollm2_path), dtype],
        capture_output=True,
        text=True,
        check=True,
    )
    grown, weights = json.loads(done.stdout)
    assert weights < grown < PEAK_SHARE * weights
