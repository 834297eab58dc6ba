"""GGUF files: what is read is what was written, and every damage is named."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import gguf_file, gguf_model
from stepscope.models.gguf_file import read_gguf
from stepscope.models.load import load_model
from tests import tiny_llama as tiny

BPE: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab"],
    "tokenizer.ggml.merges": ["a b"],
}


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
    for at, what in (
        (key, "'utf-8' codec"),
        (key + len("llama.block_count"), "255 is not a valid"),
    ):
        path.write_bytes(raw[:at] + b"\xff" + raw[at + 1 :])
        assert what in load_error(path) and "damaged" in load_error(path)


HUGE = 2**62
ENDLESS = struct.pack("<Q", HUGE)  # the length of a text
U8, U32, F32, STRING, ARRAY = 0, 4, 0, 8, 9
Q8_0, UNKNOWN_TYPE = 8, 99


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def container(keys: list[bytes], tensors: list[bytes], more: tuple[int, int] = (0, 0)) -> bytes:
    """A GGUF file with 256 bytes of data that promises `more` tensors and keys than it has."""
    counts = (len(tensors) + more[0], len(keys) + more[1])
    head = b"GGUF" + struct.pack("<IQQ", 3, *counts) + b"".join([*keys, *tensors])
    return head + bytes(-len(head) % 32 + 256)


def pair(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def listed(kind: int, count: int, values: bytes = b"") -> bytes:
    return pair(b"list", ARRAY, struct.pack("<IQ", kind, count) + values)


def info(dims: list[int], kind: int = F32, offset: int = 0, num_dims: int | None = None) -> bytes:
    count = len(dims) if num_dims is None else num_dims
    layout = struct.pack(f"<I{len(dims)}QIQ", count, *dims, kind, offset)
    return text(b"w") + layout


NESTED = struct.pack("<IQ", ARRAY, 1) * 5000
HOSTILE: dict[str, tuple[bytes, str]] = {
    "many keys": (container([], [], (0, HUGE)), "Duplicate|truncated"),
    "many tensors": (container([], [], (HUGE, 0)), "truncated"),
    "long key": (container([ENDLESS], []), "truncated"),
    "longest key": (container([b"\xff" * 8], []), "truncated"),
    "long value": (container([pair(b"k", STRING, ENDLESS)], []), "truncated"),
    "long list of bytes": (container([listed(U8, HUGE)], []), "truncated"),
    "long list of texts": (container([listed(STRING, HUGE)], []), "truncated"),
    "long text in a list": (container([listed(STRING, 1, ENDLESS)], []), "truncated"),
    "lists in lists": (container([listed(ARRAY, 1, NESTED)], []), "array of arrays"),
    "long name": (container([], [ENDLESS]), "truncated"),
    "many dimensions": (container([], [info([1], num_dims=2**32 - 1)]), "truncated"),
    "no dimensions": (container([], [info([])]), "no dimensions"),
    "dimensions that wrap around": (container([], [info([2**32, 2**32])]), "damaged"),
    "a large tensor": (container([], [info([HUGE])]), "truncated"),
    "an offset past the end": (container([], [info([1], offset=HUGE)]), "truncated"),
    "an offset that wraps around": (container([], [info([1], offset=2**64 - 64)]), "damaged"),
    "data past the end": (container([], [info([8, 8], offset=4)]), "truncated"),
    "an unknown type": (container([], [info([32], UNKNOWN_TYPE)]), "99"),
    "part of a block": (container([], [info([33, 1], Q8_0)]), "block size"),
    "a tensor twice": (container([], [info([1]), info([1])]), "duplicated tensor"),
    "no alignment": (container([pair(b"general.alignment", U32, bytes(4))], []), "alignment|zero"),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(tmp_path: Path, name: str) -> None:
    content, words = HOSTILE[name]
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    with pytest.raises(StepscopeError, match=words) as caught:
        read_gguf(path)
    assert re.fullmatch(rf"{path} is .*; download or convert it again\.", str(caught.value))


def test_the_container_of_these_tests_is_sound(tmp_path: Path) -> None:
    """Otherwise the hostile ones could be refused for another reason."""
    path = tmp_path / "tiny.gguf"
    path.write_bytes(container([listed(U8, 2, b"\1\2")], [info([8, 4], offset=32)]))
    file = read_gguf(path)
    assert file.metadata["list"] == [1, 2] and file.tensors["w"].shape == (4, 8)


def test_a_header_of_too_many_values_is_not_read_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(container([listed(U8, 2000, bytes(2000))], []))
    assert len(read_gguf(path).metadata["list"]) == 2000
    monkeypatch.setattr(gguf_file, "MOST_READS", 1000)
    with pytest.raises(StepscopeError, match="more than 1,000 values"):
        read_gguf(path)


@pytest.mark.filterwarnings("error")
@settings(deadline=None)
@given(data=st.data())
def test_any_changed_byte_is_borne_or_named(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("changed")
    path = whole_file(folder)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, min(e.begin for e in read_gguf(path).tensors.values()) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        load_model(str(path), "fp32")
    except StepscopeError as error:
        assert str(error).endswith(".") and "\n" not in str(error)


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
        ({"llama.block_count": 2**32 - 1}, "at most 10,000"),
        (BPE | {"tokenizer.ggml.tokens": [1, 2]}, "tokens that are not text"),
        (BPE | {"tokenizer.ggml.tokens": "a"}, "is a str where a list"),
        (BPE | {"tokenizer.ggml.token_type": 3}, "is a int where a list"),
        (BPE | {"tokenizer.ggml.bos_token_id": "1"}, "is a str where a int"),
        (BPE | {"tokenizer.ggml.eos_token_id": [2]}, "is a list where a int"),
        (BPE | {"tokenizer.ggml.unknown_token_id": 0.5}, "is a float where a int"),
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
