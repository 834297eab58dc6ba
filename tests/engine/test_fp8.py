"""fp8 weights. The product is torch's own, which also has a slow form for CPUs: nothing here has
seen a GPU, but each number has gone through the same calls."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.analyze.cost import CostModel
from stepscope.errors import StepscopeError, UsageError
from stepscope.models import load
from stepscope.models.linear import Linear, choose_products
from stepscope.models.load import LoadedModel, load_model
from stepscope.models.packed import Fp8Weight, Int8Weight, check_device, quantized
from stepscope.models.quantize import (
    FP8_LARGEST,
    quantize_fp8,
    rows_to_fp8,
    stored_bytes,
    weight_format,
)
from stepscope.models.tensors import plan_bytes, tensor_plan
from stepscope.runner.job import build_decoder
from stepscope.runner.torch_runner import TorchRunner
from stepscope.runner.twin import twin_spec
from stepscope.spec import ModelSpec, product_dtype
from tests import tiny_llama as tiny
from tests.engine.harness import ask, run
from tests.engine.test_quantize import normal, overrides_of
from tests.synthetic_device import make_ceilings

SHAPES = [(960, 576), (64, 1536), (16, 16), (48, 64)]
# e4m3 has four significant bits: half a unit of the last place is 2^-4 of the value, and below
# 2^-6 of the scale numbers lie 2^-9 apart.
RELATIVE, ABSOLUTE = 2**-4, 2**-10
NEAR = 2**-7  # the product's result is bf16


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this CPU were a GPU that multiplies fp8."""
    monkeypatch.setattr(load, "check_device", lambda dtype, device: None)


# ------------------------------------------------------------------ codes


@given(
    rows=st.integers(1, 5),
    cols=st.integers(1, 70),
    seed=st.integers(0, 999),
    spread=st.sampled_from([1e-6, 0.02, 1.0, 300.0]),
)
@settings(deadline=None)
def test_codes_are_the_nearest(rows: int, cols: int, seed: int, spread: float) -> None:
    weight = normal(rows, cols, seed=seed, spread=spread)
    stored = quantize_fp8(weight)
    allowed = weight.abs() * RELATIVE + stored.scales[:, None] * ABSOLUTE
    assert ((stored.values() - weight).abs() <= allowed * 1.0001).all()
    assert (stored.codes.float().abs().amax(1) == FP8_LARGEST).all(), "the whole range is used"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_number_is_kept(dtype: torch.dtype) -> None:
    """Whatever rounding makes of the quotient: never beyond the range, where NaN begins."""
    for seed in range(50):
        row = normal(1, 64, seed=seed, spread=10.0 ** (seed % 9 - 4)).to(dtype)
        codes, scales = rows_to_fp8(row)
        at = row.float().abs().argmax()
        assert codes.float().isfinite().all()
        assert codes.float()[0, at].abs() == FP8_LARGEST
        kept = codes.float()[0, at] * scales[0, 0]
        assert kept.item() == pytest.approx(row.float()[0, at].item(), rel=1e-6)


def test_a_row_of_zeros_stays_one() -> None:
    weight = torch.cat((torch.zeros(1, 16), normal(15, 16)))
    stored = quantize_fp8(weight)
    assert torch.equal(stored.values()[0], weight[0])
    y = Fp8Weight(stored).multiply(torch.zeros(2, 16).bfloat16(), 0)
    assert torch.equal(y, torch.zeros(2, 16).bfloat16())


def test_large_matrices_are_quantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(50, 32)
    whole = quantize_fp8(weight)
    monkeypatch.setattr("stepscope.models.quantize.CHUNK_ELEMENTS", 7 * 32)
    pieces = quantize_fp8(weight)
    assert torch.equal(pieces.values(), whole.values())
    assert pieces.scales.is_contiguous() and pieces.scales.shape == (50,)


def test_which_matrix_is_held_how() -> None:
    for name, shape, form in (
        ("layers.0.qkv", (960, 576), "fp8"),
        ("layers.0.experts.3.down", (64, 32), "fp8"),
        ("layers.0.down", (40, 64), "bf16"),
        ("layers.0.down", (64, 40), "bf16"),
        ("layers.0.router", (16, 576), "bf16"),
        ("layers.0.attn_norm", (576,), "bf16"),
        ("embed", (49152, 576), "bf16"),
        ("head", (49152, 576), "bf16"),
    ):
        assert weight_format(name, shape, "fp8") == form, (name, shape)
    assert stored_bytes((48, 64), "fp8") == 48 * 64 + 4 * 48


# ------------------------------------------------------------------ products


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(shape: tuple[int, int]) -> None:
    """Exactly the two factors as rounded, up to the rounding of the result."""
    weight = Fp8Weight(quantize_fp8(normal(*shape, spread=0.02)))
    values = (weight.codes.float() * weight.scales[:, None]).double()
    for rows in (1, 2, 5, 33):
        x = normal(rows, shape[1], seed=rows).bfloat16()
        codes, scales = rows_to_fp8(x)
        expected = (codes.float() * scales).double() @ values.T
        y = weight.multiply(x, 0)
        assert y.dtype == torch.bfloat16 and y.shape == expected.shape
        assert (y.double() - expected).abs().max() <= NEAR * expected.abs().max()
        rough = x.double() @ values.T
        assert (y.double() - rough).abs().max() <= 0.1 * rough.abs().max()


def test_what_torch_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layouts that its kernels for GPUs insist on, also for rows that are not contiguous."""
    seen: list[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]] = []

    def spy(a: torch.Tensor, b: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append((a, b, more))
        return torch.zeros(a.shape[0], b.shape[1], dtype=more["out_dtype"])

    monkeypatch.setattr(torch, "_scaled_mm", spy)
    weight = quantized(normal(48, 64), "fp8")
    weight.multiply(normal(64, 5).bfloat16().t(), 0)
    a, b, more = seen[0]
    assert (a.dtype, b.dtype) == (torch.float8_e4m3fn,) * 2
    assert a.shape == (5, 64) and a.stride() == (64, 1), "row by row"
    assert b.shape == (64, 48) and b.stride() == (1, 64), "column by column"
    for scale, shape in ((more["scale_a"], (5, 1)), (more["scale_b"], (1, 48))):
        assert scale.shape == shape and scale.dtype == torch.float32 and scale.is_contiguous()
    assert more["out_dtype"] == torch.bfloat16


def test_torch_would_take_them_on_a_gpu() -> None:
    """Its own check of shapes and layouts for GPUs, which it makes for tensors without data."""
    weight = quantized(normal(48, 64), "fp8").to("meta")
    y = weight.multiply(torch.empty(5, 64, dtype=torch.bfloat16, device="meta"), 0)
    assert y.shape == (5, 48) and y.device.type == "meta" == weight.device.type
    with pytest.raises(RuntimeError, match="divisible by 16"):
        x = torch.empty(5, 40, dtype=torch.bfloat16, device="meta")
        quantized(normal(48, 40), "fp8").to("meta").multiply(x, 0)


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    x = normal(4, 64).bfloat16()
    x[1, 7], x[2, 3] = torch.inf, torch.nan
    weight = quantized(normal(48, 64), "fp8")
    y = weight.multiply(x, 0)
    assert not y[1].isfinite().any() and not y[2].isfinite().any()
    alone = weight.multiply(x[[0, 3]], 0)
    assert torch.equal(y[[0, 3]], alone)


def test_linear_and_the_choice_of_products() -> None:
    weight = quantized(normal(48, 64), "fp8")
    x = normal(3, 64).bfloat16()
    assert torch.equal(Linear(weight, "plain")(x), weight.multiply(x, 0))
    assert choose_products([normal(32, 64).bfloat16(), weight]) == "plain"
    with pytest.raises(UsageError, match="these are fp8; choose auto or plain"):
        Linear(weight, "onednn")


# ------------------------------------------------------------------ where it is refused


class Gpu:
    """torch.cuda's answer to what this GPU can do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
        answer = (major, minor)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: answer)


def test_which_device_takes_which_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for dtype in ("fp32", "bf16", "fp16", "int8", "int4-g64"):
        check_device(dtype, cpu)
    for dtype in ("fp32", "bf16", "fp16"):
        check_device(dtype, cuda)
    with pytest.raises(UsageError, match="for CUDA GPUs and not for cpu; choose int8 or int4"):
        load_model("dummy:llama", "fp8")
    for dtype in ("int8", "int4", "int4-g128"):
        with pytest.raises(UsageError, match=f"^{dtype} weights are for the CPU only; choose bf16"):
            load_model("dummy:llama", dtype, device="cuda")
    Gpu(monkeypatch, 8, 6)
    with pytest.raises(UsageError, match=r"8\.9 or higher and this one has 8\.6; choose bf16"):
        check_device("fp8", cuda)
    Gpu(monkeypatch, 8, 9)
    check_device("fp8", cuda)
    Gpu(monkeypatch, 10, 0)
    check_device("fp8", cuda)


def test_integer_weights_stay_on_the_cpu() -> None:
    weight = quantized(normal(32, 64), "int8")
    assert isinstance(weight, Int8Weight) and weight.to("cpu") is weight
    with pytest.raises(UsageError, match="int8 weights are for the CPU only"):
        weight.to("cuda")


# ------------------------------------------------------------------ whole models


def test_bytes_are_those_of_the_tensors_held(on_cpu: None) -> None:
    model = load_model("dummy:llama", "fp8")
    spec, weights = model.spec, dict(model.weights)
    held = {n: w.codes.nbytes + w.scales.nbytes for n, w in fp8_of(weights).items()}
    assert len(held) == 4 * spec.layers and model.notes == ()
    assert spec.linear_bytes == sum(held.values())
    embedding = 2 * spec.vocab * spec.hidden
    assert spec.head_bytes == spec.embedding_bytes == embedding == weights["embed"].nbytes
    assert spec.weight_bytes == sum(w.nbytes for w in weights.values())
    assert plan_bytes(tensor_plan(spec), "fp8") == spec.weight_bytes
    assert (spec.dtype, spec.kv_dtype) == ("fp8", "bf16")
    assert spec.resized().weight_bytes == pytest.approx(spec.weight_bytes, rel=0.02)


def fp8_of(weights: dict[str, Any]) -> dict[str, Fp8Weight]:
    return {n: w for n, w in weights.items() if isinstance(w, Fp8Weight)}


def test_a_directory_in_fp8(on_cpu: None, tmp_path: Path) -> None:
    """tiny has 16 inputs here and 24 there: what does not fit is held in bf16 and told."""
    path = tiny.write_hf(tmp_path / "tiny", tiny.hf_weights())
    model = load_model(str(path), "fp8")
    floats = load_model(str(path), "fp32").weights
    found = fp8_of(dict(model.weights))
    assert set(found) == {f"layers.{i}.{n}" for i in range(2) for n in ("qkv", "o", "gate_up")}
    for name, weight in found.items():
        assert torch.equal(weight.codes.float(), quantize_fp8(floats[name]).codes.float())
    assert model.notes == (
        "2 tensors held in bf16, as fp8 needs rows and inputs in 16s (layers.0.down and"
        " layers.1.down).",
    )


def test_numbers_that_are_none_are_refused(on_cpu: None, tmp_path: Path) -> None:
    weights = tiny.hf_weights()
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.inf
    path = tiny.write_hf(tmp_path / "tiny", weights)
    with pytest.raises(StepscopeError, match=r"layers\.1\.mlp\.up_proj.*no finite numbers"):
        load_model(str(path), "fp8")


def test_the_twin_runs_the_same_products(on_cpu: None) -> None:
    spec = load_model("dummy:llama", "fp8").spec
    small = load_model("dummy:llama", "fp8", overrides=overrides_of(twin_spec(spec)))
    assert small.notes == () and len(fp8_of(dict(small.weights))) == 4 * spec.layers


@pytest.mark.parametrize("name", ["dummy:llama", "dummy:Mixtral-8x7B-v0.1"])
def test_the_engine_runs_on_fp8(on_cpu: None, name: str) -> None:
    """The greedy tokens of a bf16 decoder on the same values, nearly always."""
    shape = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 256}
    model = load_model(name, "fp8", overrides={**shape, "intermediate": 96})
    weights: dict[str, Any] = dict(model.weights)
    floats = {
        n: (w.codes.float() * w.scales[:, None]).bfloat16() if isinstance(w, Fp8Weight) else w
        for n, w in weights.items()
    }
    ours = outputs(LoadedModel(model.spec, weights, None))
    theirs = outputs(LoadedModel(replace(model.spec, dtype="bf16"), floats, None))
    same = [a == b for i in ours for a, b in zip(ours[i], theirs[i], strict=True)]
    assert sum(same) >= 0.5 * len(same)


def outputs(model: LoadedModel) -> dict[int, list[int]]:
    runner = TorchRunner(build_decoder(model, "auto"), 64, 16)
    done = run([ask(i, 9 + i, 6) for i in range(5)], runner=runner, pages=64)
    assert done.complete
    return done.outputs


# ------------------------------------------------------------------ what is counted


def test_the_ceiling_of_fp8_products_is_their_own() -> None:
    assert [product_dtype(d) for d in ("fp8", "int8", "fp16")] == ["fp8", "bf16", "fp16"]
    spec = load_model("dummy:llama", "bf16").spec
    measured = make_ceilings()
    both = replace(measured, gemm_flops={"bf16": 2e9, "fp8": 4e9})
    assert CostModel(spec, both, "fp8").gemm_flops == 4e9
    assert CostModel(spec, measured, "fp8").gemm_flops is None, "not measured is not bf16's"


def test_bytes_without_tensors() -> None:
    """A matrix a byte per parameter, the head and the norms in bf16."""
    spec = ModelSpec("x", "llama", 2, 32, 4, 2, 8, 64, 100, 64, dtype="fp8", kv_dtype="bf16")
    assert spec.weight_bytes == spec.linear_params + 2 * (spec.head_params + 5 * 32)
