"""Directories in Hugging Face layout: single and sharded weights, and every damage named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import hf_tokenizer
from stepscope.models.load import load_model
from tests import tiny_llama as tiny


def load_error(path: Path, kind: type[StepscopeError] = StepscopeError) -> str:
    with pytest.raises(kind) as caught:
        load_model(str(path), "fp32")
    text = str(caught.value)
    assert str(path) in text
    assert text.endswith(".") and "\n" not in text
    return text


def test_single_and_sharded_weights_are_the_same(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    single = load_model(str(tiny.write_hf(tmp_path / "a", weights)), "fp32")
    sharded = load_model(str(tiny.write_hf(tmp_path / "b", weights, shards=3)), "fp32")
    assert all(torch.equal(single.weights[n], sharded.weights[n]) for n in single.weights)
    assert single.spec.eos_ids == (2, 7) and single.spec.bos_id == 1
    assert single.spec.rope_theta == 500.0 and single.spec.name == "a"


def test_auto_is_bf16(tmp_path: Path) -> None:
    model = load_model(str(tiny.write_hf(tmp_path / "a", tiny.hf_weights())))
    assert {w.dtype for w in model.weights.values()} == {torch.bfloat16}
    with pytest.raises(UsageError, match="fp16"):
        load_model(str(tmp_path / "a"), "fp16")


def test_what_carries_no_weights_is_passed_over(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    model = load_model(
        str(tiny.write_hf(tmp_path / "a", weights, tie_word_embeddings=True)), "fp32"
    )
    assert model.spec.tied and "head" not in model.weights


def test_eos_of_the_generation_config_comes_first(tmp_path: Path) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    (path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert load_model(str(path), "fp32").spec.eos_ids == (5,)


def test_rope_base_of_newer_configs(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 777.0}
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights(), rope_theta=None, rope_parameters=rope)
    assert load_model(str(path), "fp32").spec.rope_theta == 777.0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "RoPE scaling (llama3)"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE scaling (linear)"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "RoPE scaling (yarn)"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding window"),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ({"partial_rotary_factor": 0.5}, "partial rotation"),
    ],
)
def test_unsupported_models(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights(), **config)
    assert words in load_error(path, UsageError)


def test_mistral_with_full_attention_is_a_llama(tmp_path: Path) -> None:
    path = tiny.write_hf(
        tmp_path / "a", tiny.hf_weights(), model_type="mistral", sliding_window=None
    )
    assert load_model(str(path), "fp32").spec.arch == "llama"


@pytest.mark.parametrize("content", ["{", "[]", "", '{"model_type": "llama", "hidden_size": "x"}'])
def test_bad_config(tmp_path: Path, content: str) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    (path / "config.json").write_text(content)
    assert "config.json" in load_error(path) or "model_type" in load_error(path)


def tokenizer_json(**changes: Any) -> str:
    """A valid tokenizer.json, as `tokenizers` writes it, with some of its parts replaced."""
    backend = Tokenizer(BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    backend.decoder = decoders.ByteLevel()
    return json.dumps({**json.loads(backend.to_str()), **changes})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("version", "9.0"),
        ("model", {"vocab": 3}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "q\n"]]}),
        ("model", {"type": "Unigram", "unk_id": 9, "vocab": [["a", 0.0]]}),
        ("added_tokens", [{"id": 1}]),
        ("decoder", {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, 3]}),
    ],
)
def test_tokenizers_that_the_library_rejects(tmp_path: Path, part: str, value: Any) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    (path / "tokenizer.json").write_text(tokenizer_json())
    assert load_model(str(path), "fp32").tokenizer is not None
    (path / "tokenizer.json").write_text(tokenizer_json(**{part: value}))
    assert "tokenizer.json is no tokenizer that can be read" in load_error(path)


def test_errors_that_are_not_of_the_file_are_not_hidden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        @staticmethod
        def from_str(_: str) -> None:
            raise RuntimeError("a defect")

    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    (path / "tokenizer.json").write_text(tokenizer_json())
    monkeypatch.setattr(hf_tokenizer, "Tokenizer", Broken)
    with pytest.raises(RuntimeError, match="a defect"):
        load_model(str(path), "fp32")


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", ["1", -1, 2**32, True, ["1"]])
def test_special_tokens_that_are_no_ids(tmp_path: Path, key: str, value: Any) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights(), **{key: value})
    (path / "tokenizer.json").write_text(tokenizer_json())
    assert f"as {key} where a token id belongs" in load_error(path)


def test_a_bos_token_that_no_vocabulary_can_hold(tmp_path: Path) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    (path / "tokenizer.json").write_text(tokenizer_json())
    (path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "\ud800"}))
    assert load_model(str(path), "fp32").spec.bos_id == tiny.CONFIG["bos_token_id"]


def test_directories_without_the_files(tmp_path: Path) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    (path / "model.safetensors").unlink()
    assert "no .safetensors files" in load_error(path, UsageError)
    (path / "config.json").unlink()
    assert "no config.json" in load_error(path, UsageError)


def test_truncated_weights(tmp_path: Path) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights())
    file = path / "model.safetensors"
    raw = file.read_bytes()
    for length in (0, 4, 8, 300, len(raw) // 2, len(raw) - 1):
        file.write_bytes(raw[:length])
        assert "truncated or damaged" in load_error(path)


def test_missing_shard(tmp_path: Path) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights(), shards=2)
    (path / "model-1.safetensors").unlink()
    assert "model-1.safetensors is missing" in load_error(path)


def test_missing_extra_misshapen_and_integer_tensors(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    name = "model.layers.1.mlp.up_proj.weight"
    folder = tmp_path / "a"
    missing = {n: w for n, w in weights.items() if n != name}
    assert f"({name})" in load_error(tiny.write_hf(folder, missing))
    extra = {**weights, "model.layers.0.self_attn.q_norm.weight": np.ones(8, np.float32)}
    assert "q_norm" in load_error(tiny.write_hf(folder, extra))
    bent = {**weights, name: np.zeros((16, 24), np.float32)}
    assert "[16, 24]" in load_error(tiny.write_hf(folder, bent))
    whole: dict[str, Any] = {**weights, name: np.zeros((24, 16), np.int8)}
    assert "stored as I8" in load_error(tiny.write_hf(folder, whole))


def test_unknown_names_and_paths(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nearest are smollm2-135m"):
        load_model("SmolLM2-135M")
    with pytest.raises(UsageError, match="no model file or directory"):
        load_model(str(tmp_path / "none.gguf"))
    with pytest.raises(UsageError, match="cannot be overridden"):
        load_model(str(tmp_path), overrides={"layers": 1})
