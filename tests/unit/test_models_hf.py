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
from stepscope.models.hf_config import TRAITS, spec_from_config
from stepscope.models.load import load_model
from stepscope.models.rope import inverse_frequencies
from stepscope.models.shapes import check_shape
from tests import tiny_llama as tiny

SCALED_LOCALLY = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
}


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
    with pytest.raises(UsageError, match="fp12"):
        load_model(str(tmp_path / "a"), "fp12")


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
        ({"model_type": "phi3"}, "model_type 'phi3'"),
        ({"model_type": ["llama"]}, "model_type '['llama']'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "scales RoPE by 'dynamic'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "scales RoPE by 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": False}},
            "without rounding its bounds",
        ),
        ({"attention_bias": True}, "biases"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"model_type": "gemma2", "use_bidirectional_attention": True}, "both directions"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers"),
        (
            {"model_type": "gemma3_text", "rope_parameters": SCALED_LOCALLY},
            "on its sliding layers",
        ),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ({"partial_rotary_factor": 0.5}, "partial rotation"),
    ],
)
def test_unsupported_models(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights(), **config)
    assert words in load_error(path, UsageError)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 0.5}}, "at least 1"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": "high"}, "'high' as rope_theta"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window"),
        ({"model_type": "mistral", "sliding_window": 9, "layer_types": ["x"]}, "layer_types"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "mixtral", "num_local_experts": 2.5}, "num_local_experts"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "9 of 8 experts"),
        ({"model_type": "qwen2"}, "self_attn.q_proj.bias"),
        ({"model_type": "qwen3"}, "self_attn.q_norm"),
        ({"model_type": "gemma2"}, "pre_feedforward_layernorm"),
        ({"model_type": "mixtral"}, "block_sparse_moe"),
    ],
)
def test_configs_that_make_no_model(tmp_path: Path, config: dict[str, Any], words: str) -> None:
    path = tiny.write_hf(tmp_path / "a", tiny.hf_weights(), **config)
    with pytest.raises(StepscopeError, match=words) as caught:
        load_model(str(path), "fp32")
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


JUNK = [None, "x", [], [1], {}, {"a": 1}, -1, 0, 1, 2.5, 10**30, float("nan"), True]
ALL_KEYS = [
    *(*tiny.CONFIG, "rope_scaling", "rope_parameters", "sliding_window", "layer_types"),
    *("max_window_layers", "use_sliding_window", "num_experts", "num_local_experts"),
    *("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"),
    *("decoder_sparse_step", "query_pre_attn_scalar", "hidden_activation", "hidden_act"),
    *("attn_logit_softcapping", "final_logit_softcapping", "sliding_window_pattern"),
    *("rope_local_base_freq", "partial_rotary_factor"),
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    {"rope_type": "yarn", "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0}
    | {"mscale_all_dim": 1.0, "attention_factor": 1.1},
    {"type": "linear", "factor": 8.0},
]


@pytest.mark.parametrize("kind", list(TRAITS))
def test_junk_in_a_config_is_named_or_does_no_harm(tmp_path: Path, kind: str) -> None:
    """One key at a time: no other exception, and what passes can make its tables."""
    good = {**tiny.CONFIG, "model_type": kind, "use_sliding_window": True}
    cases = [good | {key: value} for key in ALL_KEYS for value in JUNK if key != "model_type"]
    for rope in ROPES:
        common = {"original_max_position_embeddings": 32, "rope_theta": 1e4}
        whole = rope | common
        cases += [
            good | {"rope_parameters": whole | {key: value}} for key in whole for value in JUNK
        ]
    passed = 0
    for case in cases:
        try:
            spec = spec_from_config(tmp_path, case, None)
            check_shape(spec)
        except StepscopeError as error:
            assert str(error).endswith(".") and "\n" not in str(error)
            continue
        passed += 1
        if spec.head_dim < 1000:  # larger ones are stopped by the memory they would take
            frequencies = inverse_frequencies(spec.head_dim, spec.rope_theta, spec.rope)
            assert frequencies.isfinite().all()
    assert 0 < passed < len(cases)


def test_mistral_with_full_attention_has_no_window(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    path = tiny.write_hf(tmp_path / "a", weights, model_type="mistral", sliding_window=None)
    assert load_model(str(path), "fp32").spec.local_layers == 0
    path = tiny.write_hf(tmp_path / "b", weights, model_type="mistral")
    assert load_model(str(path), "fp32").spec.window == 4096  # MistralConfig's default


def test_older_and_newer_configs_of_gemma3_say_the_same(tmp_path: Path) -> None:
    common = {**tiny.CONFIG, "model_type": "gemma3_text", "num_hidden_layers": 3}
    common["rope_theta"] = None
    older = {"rope_theta": 1e6, "rope_local_base_freq": 5e3, "sliding_window_pattern": 3} | {
        "rope_scaling": {"rope_type": "linear", "factor": 8.0}
    }
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    local = {"rope_type": "default", "rope_theta": 5e3}
    newer = {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    }
    specs = [spec_from_config(tmp_path, {**common, **c}, None) for c in (older, newer)]
    assert specs[0] == specs[1]
    spec = specs[0]
    assert (spec.rope_theta, spec.local_rope_theta, spec.layer_pattern) == (1e6, 5e3, "ssf")
    assert spec.rope is not None and spec.rope.factor == 8.0


def test_qwen_windows_are_off_unless_switched_on(tmp_path: Path) -> None:
    values = {**tiny.CONFIG, "model_type": "qwen2", "sliding_window": 4096}
    assert spec_from_config(tmp_path, values, None).window is None
    on = {**values, "use_sliding_window": True, "max_window_layers": 1}
    spec = spec_from_config(tmp_path, on, None)
    assert [spec.is_local(i) for i in range(2)] == [False, True]


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
