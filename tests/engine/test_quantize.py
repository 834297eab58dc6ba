"""Weights in fewer bytes: the codes, the products, what is counted, and what it costs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.decoder import Decoder
from stepscope.models.gguf_codes import four_bit
from stepscope.models.linear import Linear, choose_products, packed_rows
from stepscope.models.load import LoadedModel, load_model
from stepscope.models.packed import Int4Weight, Int8Weight, quantized
from stepscope.models.quantize import (
    Codes4,
    group_of,
    quantize4,
    quantize8,
    stored_bytes,
    weight_format,
)
from stepscope.models.tensors import plan_bytes, tensor_plan
from stepscope.runner.job import build_decoder
from stepscope.runner.probe import decode_plan, steps
from stepscope.runner.torch_runner import TorchRunner
from stepscope.runner.twin import twin_spec
from stepscope.spec import QUANTIZED
from tests import tiny_llama as tiny
from tests.engine.harness import ask, run, small_decoder
from tests.quality import quality

PACKED, UNPACKED = 1 << 30, 0  # up to how many rows the product is taken from the codes
ON_CPU = [dtype for dtype in QUANTIZED if dtype != "fp8"]
SMOLLM2 = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
ODD = [(17, 40), (8, 24), (48, 64), (16, 32), (1, 16), (33, 96), (80, 320)]
# Results are bf16: half a unit of the last place, twice where the sum is rounded before the scale.
NEAR = 2**-7
ROUNDED = 2**-8  # bf16 has eight significant bits


def normal(*shape: int, seed: int = 0, spread: float = 1.0) -> torch.Tensor:
    return torch.empty(shape).normal_(0, spread, generator=torch.Generator().manual_seed(seed))


# ------------------------------------------------------------------ codes


@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 70),
    seed=st.integers(0, 999),
    spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
)
@settings(deadline=None)
def test_int8_is_within_half_a_step(rows: int, cols: int, seed: int, spread: float) -> None:
    weight = normal(rows, cols, seed=seed, spread=spread)
    stored = quantize8(weight)
    step = stored.scales.float()[:, None]
    assert ((stored.values() - weight).abs() <= step * 0.5001).all()
    assert (step[:, 0] <= weight.abs().amax(1) / 127 * (1 + 2**-7)).all(), "no wider than needed"


@given(
    groups=st.integers(1, 3),
    group=st.sampled_from([32, 64, 128]),
    seed=st.integers(0, 999),
    spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
    shift=st.sampled_from([0.0, 1.0, -5.0]),
)
@settings(deadline=None)
def test_int4_is_within_half_a_step_and_its_zeros_rounding(
    groups: int, group: int, seed: int, spread: float, shift: float
) -> None:
    weight = normal(4, groups * group, seed=seed, spread=spread) + shift * spread
    stored = quantize4(weight, group)
    assert stored.group == group and int(stored.codes.max()) <= 15
    step = stored.scales.float().repeat_interleave(group, 1)
    zero = stored.zeros.float().repeat_interleave(group, 1)
    allowed = step * 0.5001 + zero.abs() * ROUNDED
    assert ((stored.values() - weight).abs() <= allowed).all()


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.zeros(16, 32)
    assert torch.equal(quantize8(weight).values(), weight)
    assert torch.equal(quantize4(weight, 32).values(), weight)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_codes_are_carried_over_exactly(kind: str) -> None:
    """With the file's own float16 numbers the values are `gguf`'s bit for bit (up to the order of
    Q4_1's one addition); with them in bf16 they are off by no more than the stated rounding."""
    import gguf

    floats = normal(24, 96, seed=4).numpy()
    kind_id = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(floats, kind_id)
    theirs = torch.from_numpy(gguf.quants.dequantize(stored, kind_id))
    ours = four_bit(stored, kind)
    head = 2 if kind == "Q4_0" else 4
    numbers = stored.reshape(24, 3, -1)[:, :, :head].copy().view(np.float16).astype(np.float32)
    step = torch.from_numpy(numbers[:, :, 0]).repeat_interleave(32, 1)
    if kind == "Q4_0":
        rebuilt = (ours.codes.float() - 8) * step
    else:
        rebuilt = ours.codes.float() * step + torch.from_numpy(numbers[:, :, 1]).repeat_interleave(
            32, 1
        )
    assert torch.equal(rebuilt, theirs)
    zero = ours.zeros.float().repeat_interleave(32, 1)
    allowed = (8 * step.abs() + zero.abs()) * ROUNDED * 1.01
    assert ((ours.values() - theirs).abs() <= allowed).all()


def test_which_matrix_is_held_how() -> None:
    assert weight_format("layers.0.qkv", (960, 576), "int8") == "int8"
    assert weight_format("layers.0.qkv", (960, 576), "int4") == "int4"
    assert weight_format("embed", (49152, 576), "int4") == "int8"
    assert weight_format("head", (49152, 576), "int4") == "int8"
    assert weight_format("layers.0.router", (16, 576), "int4") == "bf16"
    assert weight_format("layers.0.attn_norm", (576,), "int8") == "bf16"
    assert weight_format("layers.0.down", (40, 64), "int4") == "int8", "rows not in 16s"
    assert weight_format("layers.0.down", (64, 48), "int4") == "int8", "inputs not in 32s"
    assert weight_format("layers.0.qkv", (960, 576), "fp32") == "fp32"
    assert [group_of(576, d) for d in ("int4", "int4-g64", "int4-g128")] == [32, 64, 64]
    assert group_of(1536, "int4-g128") == 128


# ------------------------------------------------------------------ products


def close(y: torch.Tensor, expected: torch.Tensor) -> None:
    assert y.dtype == torch.bfloat16 and y.shape == expected.shape
    assert (y.double() - expected).abs().max() <= NEAR * expected.abs().max()


@pytest.mark.parametrize("shape", [*SMOLLM2, *ODD], ids=str)
@pytest.mark.parametrize("packed", [PACKED, UNPACKED], ids=["codes", "bf16"])
def test_int8_products(shape: tuple[int, int], packed: int) -> None:
    """Also where torch's own product would read past the end of a row (inputs not in 16s)."""
    stored = quantize8(normal(*shape, spread=0.02))
    weight, values = Int8Weight(stored), stored.values().double()
    for rows in (1, 2, 3, 4, 5, 16, 33, 64):
        x = normal(rows, shape[1], seed=rows).bfloat16()
        close(weight.multiply(x, packed), x.double() @ values.T)


@pytest.mark.parametrize("shape", [*SMOLLM2, (48, 64), (16, 32), (128, 320), (64, 128)], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("packed", [PACKED, UNPACKED], ids=["codes", "bf16"])
def test_int4_products(shape: tuple[int, int], group: int, packed: int) -> None:
    if shape[1] % group:
        group = 32
    stored = quantize4(normal(*shape, spread=0.02), group)
    weight, values = Int4Weight(stored), stored.values().double()
    for rows in (1, 2, 3, 4, 5, 16, 33, 64):
        x = normal(rows, shape[1], seed=rows).bfloat16()
        close(weight.multiply(x, packed), x.double() @ values.T)


def test_products_take_rows_that_are_not_contiguous() -> None:
    x = normal(64, 5).bfloat16().t()
    for form in ("int8", "int4"):
        weight = quantized(normal(32, 64), form)
        assert torch.equal(weight.multiply(x, PACKED), weight.multiply(x.contiguous(), PACKED))


def test_large_matrices_are_turned_into_bf16_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight = Int8Weight(quantize8(normal(50, 32)))
    x = normal(3, 32).bfloat16()
    whole = weight.multiply(x, UNPACKED)
    monkeypatch.setattr("stepscope.models.packed.UNPACKED_ELEMENTS", 7 * 32)
    assert torch.equal(weight.multiply(x, UNPACKED), whole)


def test_looked_up_rows_are_those_of_the_head() -> None:
    stored = quantize8(normal(40, 16))
    rows = torch.tensor([7, 0, 7, 39])
    found = Int8Weight(stored).index_select(0, rows)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), stored.values()[rows], rtol=2**-8, atol=0)


def test_linear_picks_the_product_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = quantized(normal(32, 64), "int8")
    assert isinstance(weight, Int8Weight)
    taken: list[int] = []
    op = torch.ops.aten._weight_int8pack_mm

    def spy(x: torch.Tensor, *rest: torch.Tensor) -> Any:
        taken.append(len(x))
        return op(x, *rest)

    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", spy)
    linear = Linear(weight, "packed int4=64 int8=4")
    for rows in (1, 4, 5, 16):
        linear(normal(rows, 64).bfloat16())
    Linear(weight, "plain")(normal(1, 64).bfloat16())
    assert taken == [1, 4]


def test_words_for_products() -> None:
    assert packed_rows("packed int4=64 int8=4", "int8") == 4
    assert packed_rows("packed int4=64", "int8") == 0 == packed_rows("plain", "int4")
    with pytest.raises(UsageError, match="choose auto or plain"):
        Linear(quantized(normal(32, 64), "int8"), "onednn")


@pytest.mark.parametrize(("speed", "expected"), [(1, 128), (10, 8), (10_000, 0)])
def test_the_crossover_is_measured(
    monkeypatch: pytest.MonkeyPatch, speed: int, expected: int
) -> None:
    """A product from codes that takes `speed` per row, against 100 for any number of rows."""
    clock = {"now": 0.0}

    def multiply(self: Int8Weight, x: torch.Tensor, packed: int) -> torch.Tensor:
        clock["now"] += 100 if packed == 0 else speed * x.shape[0] if speed > 1 else 1
        return x

    monkeypatch.setattr(Int8Weight, "multiply", multiply)
    monkeypatch.setattr("stepscope.models.linear.time.perf_counter", lambda: clock["now"])
    assert choose_products([quantized(normal(32, 64), "int8")]) == f"packed int8={expected}"


# ------------------------------------------------------------------ whole models


def gguf_file(path: Path, kind: str, embed: str) -> Path:
    """A tied two-layer Llama with 64 inputs, its matrices quantized by `gguf` itself."""
    import gguf

    def stored(shape: tuple[int, int], seed: int, kind: str) -> tuple[Any, Any]:
        kind_id = gguf.GGMLQuantizationType[kind]
        return gguf.quants.quantize(normal(*shape, seed=seed).numpy(), kind_id), kind_id

    sizes = {"attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64), "attn_output": (64, 64)}
    sizes |= {"ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    writer = gguf.GGUFWriter(path, "llama")
    changed = {"embedding_length": 64, "attention.key_length": 16, "attention.value_length": 16}
    changed["feed_forward_length"] = 96
    for key, value in {**tiny.METADATA, **{f"llama.{k}": v for k, v in changed.items()}}.items():
        tiny._add(writer, key, value)
    data, kind_id = stored((48, 64), 0, embed)
    writer.add_tensor("token_embd.weight", data, raw_dtype=kind_id)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    for i in range(2):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{norm}.weight", np.ones(64, np.float32))
        for n, (name, shape) in enumerate(sizes.items()):
            data, kind_id = stored(shape, 10 * i + n + 1, kind)
            writer.add_tensor(f"blk.{i}.{name}.weight", data, raw_dtype=kind_id)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def identity_product(weight: Any) -> torch.Tensor:
    """The matrix as the product sees it, (out, in), rounded to bf16."""
    found: torch.Tensor = weight.multiply(torch.eye(weight.shape[1]).bfloat16(), PACKED)
    return found.t().float()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_a_four_bit_file_becomes_int4_code_for_code(tmp_path: Path, kind: str) -> None:
    """Fused, and q and k in the order of halves, and still the file's own values."""
    path = gguf_file(tmp_path / "q.gguf", kind, "Q8_0")
    floats = load_model(str(path), "fp32").weights
    model = load_model(str(path), "int4")
    for name, weight in model.weights.items():
        if isinstance(weight, Int4Weight):
            error = (identity_product(weight) - floats[name]).abs().max()
            step = weight.scales_and_zeros[..., 0].abs().max().item()
            assert error < step / 16, name  # a second quantization would be off by up to a half
    assert isinstance(model.weights["embed"], Int8Weight)
    assert "rounded twice" in " ".join(model.notes)


def test_q8_0_becomes_int8_and_says_so(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "q.gguf", "Q8_0", "Q8_0")
    floats = load_model(str(path), "fp32").weights
    model = load_model(str(path), "int8")
    assert len(model.notes) == 1 and "rounded twice" in model.notes[0]
    for name, weight in model.weights.items():
        if isinstance(weight, Int8Weight):
            step = weight.scales.float()[:, None]
            error = (weight.codes.float() * step - floats[name]).abs()
            assert (error <= step * 0.501).all(), name


def test_what_does_not_fit_is_held_otherwise_and_told(tmp_path: Path) -> None:
    """tiny: 16 inputs here, 24 there, so most do not fit int4 and some not even int8."""
    path = tiny.write_hf(tmp_path / "tiny", tiny.hf_weights())
    model = load_model(str(path), "int4")
    assert "6 tensors held as int8, as int4 needs" in model.notes[0]
    assert "2 tensors turned into bf16" in model.notes[1] and "layers.0.down" in model.notes[1]
    decoder = build_decoder(model, "auto")
    assert decoder.products.startswith("packed int4=")
    rows = steps(TorchRunner(decoder, 4, 16), decode_plan(2, 20, 16), 1)
    assert rows[0].num_decode_requests == 2


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    path = tiny.write_hf(tmp_path / "tiny", weights)
    with pytest.raises(StepscopeError, match=r"layers\.1\.mlp\.up_proj.*no finite numbers"):
        load_model(str(path), "int8")


def test_unknown_dtype_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"no dtype 'int5'; choose .*int8, fp8, int4, int4-g64"):
        load_model("dummy:llama", "int5")


def storage(weight: Any) -> int:
    """Bytes of every tensor a weight holds, from the tensors themselves."""
    if isinstance(weight, torch.Tensor):
        return weight.numel() * weight.element_size()
    held = [
        getattr(weight, n)
        for n in ("codes", "scales", "packed", "scales_and_zeros")
        if hasattr(weight, n)
    ]
    return sum(t.numel() * t.element_size() for t in held)


@pytest.mark.parametrize("dtype", ON_CPU)
def test_bytes_are_those_of_the_tensors_held(dtype: str) -> None:
    model = load_model("dummy:llama", dtype)
    spec, weights = model.spec, model.weights
    linear = sum(storage(w) for n, w in weights.items() if n.startswith("layers") and w.dim() == 2)
    assert spec.linear_bytes == linear
    assert spec.head_bytes == spec.embedding_bytes == storage(weights["embed"])
    assert spec.weight_bytes == sum(storage(w) for w in weights.values())
    assert plan_bytes(tensor_plan(spec), dtype) == spec.weight_bytes, (
        "what was asked for in advance"
    )
    assert (spec.dtype, spec.kv_dtype) == (dtype, "bf16")
    unknown = spec.resized()
    assert unknown.weight_bytes == pytest.approx(spec.weight_bytes, rel=0.02)
    for name, weight in weights.items():
        form = weight_format(name, tuple(weight.shape), dtype)
        assert stored_bytes(tuple(weight.shape), form) == storage(weight)


@pytest.mark.parametrize("dtype", ON_CPU)
def test_the_twin_runs_the_same_products(dtype: str) -> None:
    """Its widths are such that nothing falls back to another kernel."""
    spec = load_model("dummy:llama", dtype).spec
    small = load_model("dummy:llama", dtype, overrides=overrides_of(twin_spec(spec)))
    assert small.notes == ()
    kinds = {n: type(w) for n, w in small.weights.items()}
    assert kinds == {n: type(w) for n, w in load_model("dummy:llama", dtype).weights.items()}


def overrides_of(spec: Any) -> dict[str, int]:
    return {n: getattr(spec, n) for n in ("hidden", "head_dim", "intermediate", "vocab")}


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("products", ["auto", "plain"])
def test_the_engine_runs_on_quantized_weights(dtype: str, products: str) -> None:
    """Close to a bf16 decoder on the dequantized weights, from prefill to the last token."""
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256}
    model = load_model("dummy:llama", dtype, overrides={**shape, "intermediate": 96})
    weights: dict[str, Any] = dict(model.weights)
    floats = {n: as_floats(w) for n, w in weights.items()}
    decoder = build_decoder(LoadedModel(model.spec, weights, None), products)
    runner = TorchRunner(decoder, 64, 16)
    reference = TorchRunner(Decoder(small_decoder("bf16").spec, floats, "plain"), 64, 16)
    reference.decoder.spec = model.spec
    ours = run([ask(i, 9 + i, 6) for i in range(5)], runner=runner, pages=64)
    theirs = run([ask(i, 9 + i, 6) for i in range(5)], runner=reference, pages=64)
    same = [
        a == b for i in range(5) for a, b in zip(ours.outputs[i], theirs.outputs[i], strict=True)
    ]
    assert ours.complete and sum(same) >= 0.5 * len(same)


def as_floats(weight: Any) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight
    if isinstance(weight, Int8Weight):
        return (weight.codes.float() * weight.scales.float()[:, None]).bfloat16()
    return identity_product(weight).bfloat16()


# ------------------------------------------------------------------ the real model

PEAK_SCRIPT = """
import json, re, sys
from stepscope.models.load import load_model
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
before = peak()
weights = load_model(sys.argv[1], sys.argv[2]).weights
print(json.dumps([peak() - before, sum(w.nbytes for w in weights.values())]))
"""
# The largest tensor is held in float32 while it is quantized: the embedding.
LARGEST_BYTES = 49152 * 576 * 4


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_no_float_copy_of_the_weights_while_loading(smollm2_path: Path, dtype: str) -> None:
    command = [sys.executable, "-c", PEAK_SCRIPT, str(smollm2_path), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    grown, weights = json.loads(done.stdout)
    # Pages of the mapped file may count as resident, or not; a bf16 copy would be 269 MB more.
    mapped = smollm2_path.stat().st_size
    assert weights < grown < 1.3 * weights + LARGEST_BYTES + mapped


@pytest.mark.model
def test_smollm2_codes_are_those_of_the_file(smollm2_path: Path) -> None:
    """Through fusing, the order of rows and packing: (code - 8) x step + (least + 8 x step)."""
    import gguf

    tensor = next(
        t for t in gguf.GGUFReader(smollm2_path).tensors if t.name == "blk.3.ffn_down.weight"
    )
    ours: Codes4 = four_bit(tensor.data, tensor.tensor_type.name)
    theirs = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    step = ours.scales.float().abs().repeat_interleave(32, 1)
    zero = ours.zeros.float().abs().repeat_interleave(32, 1)
    off = (ours.values() - theirs).abs()
    assert (off <= (8 * step + zero) * ROUNDED * 1.02 + 1e-9).all()
    assert (off <= step / 2).all(), "no code would be another one"


@pytest.mark.model
@pytest.mark.slow
def test_quality_on_the_golden_prompts(
    smollm2: LoadedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """int4 keeps the file's own codes, so it is nearer to fp32 than int8, which rounds again.

    fp8 is the only one whose activations are rounded to eight bits as well.
    """
    from tests.quality import HEADER, golden_logits

    reference = golden_logits(Decoder(smollm2.spec, dict(smollm2.weights), "plain"))
    dtypes = ("bf16", "fp8", "int8", "int4")
    found = {dtype: quality(dtype, reference, "smollm2-135m") for dtype in dtypes}
    with capsys.disabled():
        print("\n" + HEADER, *(row.line() for row in found.values()), sep="\n")
    assert found["int8"].weight_bytes < 0.51 * found["bf16"].weight_bytes
    assert found["int4"].weight_bytes < 0.36 * found["bf16"].weight_bytes
    assert found["bf16"].agreement > 0.95
    assert found["int4"].agreement > 0.93 and found["int4"].mean_error < 0.25
    assert found["int8"].agreement > 0.88 and found["int8"].mean_error < 0.5
    assert found["int4"].kl < found["int8"].kl < 0.02 < found["fp8"].kl < 0.06
    assert found["fp8"].weight_bytes < 0.62 * found["bf16"].weight_bytes, "the head is in bf16"
    assert found["fp8"].agreement > 0.85
