"""GGUF files: what is read is what was written, and every damage is named."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import gguf_model
from stepscope.models.gguf_file import read_gguf
from stepscope.models.load import load_model
from tests import tiny_llama as tiny


@pytest.fixture
def weights() -> dict[str, tiny.Array]:
    return tiny.hf_weights()


def whole_file(folder: Path) -> Path:
    return tiny.write_gguf(folder / "tiny.gguf", tiny.gguf_weights(tiny.hf_weights()))


def load_error(path: Path, kind: type[StepscopeError] = StepscopeError) -> str:
    with pytest.raises(kind) as caught:
        load_model(str(path), "fp32")
    text = str(caught.value)
    assert path.name in text or "tiny" in text
    assert text.endswith(".") and "\n" not in text
    return text


def test_canonical_weights_are_those_of_the_hugging_face_model(
    tmp_path: Path, weights: dict[str, tiny.Array]
) -> None:
    path = whole_file(tmp_path)
    model = load_model(str(path), "fp32")
    layer = "model.layers.1."
    expected = np.concatenate([weights[f"{layer}self_attn.{n}_proj.weight"] for n in "qkv"])
    np.testing.assert_array_equal(model.weights["layers.1.qkv"].numpy(), expected)
    stored = read_gguf(path).rows("blk.1.attn_q.weight", 0, tiny.HEADS * tiny.HEAD_DIM)
    assert not np.array_equal(stored, weights[layer + "self_attn.q_proj.weight"])
    expected = np.concatenate([weights[f"{layer}mlp.{n}_proj.weight"] for n in ("gate", "up")])
    np.testing.assert_array_equal(model.weights["layers.1.gate_up"].numpy(), expected)
    np.testing.assert_array_equal(model.weights["head"].numpy(), weights["lm_head.weight"])


def test_both_formats_of_one_model_give_the_same_weights(
    tmp_path: Path, weights: dict[str, tiny.Array]
) -> None:
    from_gguf = load_model(str(whole_file(tmp_path)), "bf16").weights
    from_hf = load_model(str(tiny.write_hf(tmp_path / "hf", weights, shards=3)), "bf16").weights
    assert list(from_gguf) == list(from_hf)
    for name, tensor in from_gguf.items():
        assert tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
        assert torch.equal(tensor, from_hf[name]), name


def test_chunks_of_rows_leave_the_weights_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = whole_file(tmp_path)
    at_once = load_model(str(path), "fp32").weights
    monkeypatch.setattr(gguf_model, "CHUNK_ELEMENTS", 3 * tiny.HIDDEN)
    in_chunks = load_model(str(path), "fp32").weights
    assert all(torch.equal(at_once[name], in_chunks[name]) for name in at_once)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16", "BF16"])
def test_quantized_rows_are_decoded(tmp_path: Path, kind: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    stored = gguf.quants.quantize(values, quantization)
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "llama")
    writer.add_tensor("w", stored, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "q.gguf")
    assert file.tensors["w"].shape == (6, 64)
    expected = gguf.quants.dequantize(stored, quantization)
    np.testing.assert_array_equal(file.rows("w", 2, 5), expected[2:5])
    assert np.abs(file.rows("w", 0, 6) - values).max() < 0.2


def test_spec_and_byte_counts(tmp_path: Path) -> None:
    model = load_model(str(whole_file(tmp_path)), "bf16")
    spec = model.spec
    assert (spec.name, spec.arch, spec.dtype, spec.kv_dtype) == ("tiny", "llama", "bf16", "bf16")
    assert (spec.layers, spec.hidden, spec.heads, spec.kv_heads) == (2, 16, 4, 2)
    assert (spec.head_dim, spec.intermediate, spec.vocab, spec.max_context) == (8, 24, 40, 64)
    assert spec.rope_theta == 500.0 and spec.norm_eps == pytest.approx(1e-5) and not spec.tied
    assert spec.linear_bytes == 2 * 2 * (64 * 16 + 16 * 32 + 48 * 16 + 16 * 24)
    assert spec.norm_bytes == 2 * 5 * 16
    assert spec.head_bytes == spec.embedding_bytes == 2 * 40 * 16
    assert model.tokenizer is None and spec.eos_ids == ()


def test_tied_head_is_the_embedding(tmp_path: Path, weights: dict[str, tiny.Array]) -> None:
    del weights["lm_head.weight"]
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_weights(weights))
    model = load_model(str(path), "fp32")
    assert model.spec.tied and "head" not in model.weights
    assert model.spec.head_bytes == model.weights["embed"].nbytes


def test_defaults_of_absent_keys(tmp_path: Path, weights: dict[str, tiny.Array]) -> None:
    """head_dim = hidden / heads, as many kv heads as heads, theta 10000 (GGUF specification)."""
    square = np.zeros((16, 16), np.float32)
    weights |= {n: square for n in weights if "self_attn" in n}
    absent = ["attention.key_length", "attention.value_length", "attention.head_count_kv"]
    metadata = {f"llama.{key}": None for key in [*absent, "rope.freq_base"]}
    tensors = tiny.gguf_weights(weights)
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tensors, metadata)
    spec = load_model(str(path), "fp32").spec
    assert (spec.head_dim, spec.kv_heads, spec.rope_theta) == (4, 4, 10000.0)


def test_a_file_cut_anywhere_is_named_as_truncated(tmp_path: Path) -> None:
    raw = whole_file(tmp_path).read_bytes()
    file = read_gguf(tmp_path / "tiny.gguf")
    header_end = min(entry.begin for entry in file.tensors.values())
    data_end = max(entry.begin + entry.num_bytes for entry in file.tensors.values())
    in_data = range(header_end, data_end, 97)
    cut = tmp_path / "cut.gguf"
    for length in [*range(4, header_end), *in_data, data_end - 1]:
        cut.write_bytes(raw[:length])
        with pytest.raises(StepscopeError, match=r"cut\.gguf is truncated.*again\.$"):
            read_gguf(cut)
    cut.write_bytes(raw[:data_end])
    assert read_gguf(cut).tensors.keys() == file.tensors.keys()


@pytest.mark.parametrize("content", [b"", b"GG", b"PK\x03\x04 a wheel, perhaps", b"\x00" * 64])
def test_not_a_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    assert "GGUF file" in load_error(path, UsageError)


@pytest.mark.parametrize("version", [1, 4, struct.unpack(">I", struct.pack("<I", 3))[0]])
def test_other_versions_and_byte_orders(tmp_path: Path, version: int) -> None:
    path = whole_file(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:4] + struct.pack("<I", version) + raw[8:])
    assert f"version {version}" in load_error(path, UsageError)


def test_damaged_header_is_named(tmp_path: Path) -> None:
    path = whole_file(tmp_path)
    raw = path.read_bytes()
    key = raw.index(b"llama.block_count")
    for at, what in ((key, "not UTF-8"), (key + len("llama.block_count"), "value type 255")):
        path.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
        assert what in load_error(path) and "damaged" in load_error(path)


@pytest.mark.parametrize(
    ("metadata", "arch", "words"),
    [
        ({}, "phi3", "architecture 'phi3'"),
        ({"llama.rope.scaling.type": "longrope"}, "llama", "scales RoPE by 'longrope'"),
        (
            {key.replace("llama", "qwen2"): v for key, v in tiny.METADATA.items()}
            | {"qwen2.attention.sliding_window": 16},
            "qwen2",
            "sliding window without saying",
        ),
        ({"tokenizer.ggml.model": "bert"}, "llama", "tokenizer of the kind 'bert'"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "tekken"},
            "llama",
            "pre-tokenizer 'tekken'",
        ),
    ],
)
def test_unsupported_models(
    tmp_path: Path, metadata: dict[str, Any], arch: str, words: str
) -> None:
    tensors = tiny.gguf_weights(tiny.hf_weights())
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tensors, metadata, arch)
    assert words in load_error(path, UsageError)


def test_divisors_of_rope_belong_to_the_spec(tmp_path: Path) -> None:
    tensors = tiny.gguf_weights(tiny.hf_weights())
    tensors["rope_freqs.weight"] = np.array([1, 1, 2, 8], np.float32)
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tensors)
    spec = load_model(str(path), "fp32").spec
    assert spec.rope is not None and spec.rope.divisors == (1, 1, 2, 8)
    assert spec.resized(head_dim=4).rope is None
    tensors["rope_freqs.weight"] = np.ones(3, np.float32)
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tensors)
    assert "'rope_freqs.weight'" in load_error(path)


def test_window_of_a_mistral_and_older_scaling(tmp_path: Path) -> None:
    tensors = tiny.gguf_weights(tiny.hf_weights())
    keys = {"llama.attention.sliding_window": 16, "llama.rope.scale_linear": 4.0}
    spec = load_model(str(tiny.write_gguf(tmp_path / "tiny.gguf", tensors, keys)), "fp32").spec
    assert (spec.window, spec.local_layers) == (16, 2)
    assert spec.rope is not None and (spec.rope.kind, spec.rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": None}, "'llama.block_count'"),
        ({"llama.block_count": "two"}, "is a str where a int"),
        ({"llama.attention.head_count_kv": [2, 1]}, "is a list where a int"),
        ({"llama.attention.value_length": 4}, "keys of 8, values of 4"),
        ({"llama.rope.dimension_count": 4}, "4 rotated"),
        ({"llama.attention.head_count": 0}, "heads of tiny is 0"),
        ({"llama.expert_count": 4}, "expert_used_count"),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2}, "ffn_gate_inp"),
        ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.factor"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 0.5}, "no frequencies"),
        ({"llama.rope.freq_base": 0.0}, "no frequencies"),
        ({"llama.rope.freq_base": float("nan")}, "no frequencies"),
        ({"llama.attention.head_count_kv": 3}, "4 heads on 3 kv_heads"),
    ],
)
def test_metadata_that_makes_no_model(tmp_path: Path, metadata: dict[str, Any], words: str) -> None:
    tensors = tiny.gguf_weights(tiny.hf_weights())
    path = tiny.write_gguf(tmp_path / "tiny.gguf", tensors, metadata)
    assert words in load_error(path)


def test_missing_extra_and_misshapen_tensors(tmp_path: Path) -> None:
    tensors = tiny.gguf_weights(tiny.hf_weights())
    path = tmp_path / "tiny.gguf"
    missing = {n: t for n, t in tensors.items() if n != "blk.1.ffn_up.weight"}
    assert "lacks 1 tensor" in load_error(tiny.write_gguf(path, missing))
    extra = {**tensors, "blk.0.attn_q.bias": np.zeros(32, np.float32)}
    assert "(blk.0.attn_q.bias)" in load_error(tiny.write_gguf(path, extra))
    bent = {**tensors, "blk.0.ffn_down.weight": np.zeros((16, 25), np.float32)}
    assert "[16, 25]" in load_error(tiny.write_gguf(path, bent))
