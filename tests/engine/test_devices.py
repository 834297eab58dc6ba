"""Weights on another device. `meta`, which has no data, stands for a GPU."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.errors import StepscopeError
from stepscope.models import dummy, tensors
from stepscope.models.load import load_model
from tests import tiny_llama as tiny

META = torch.device("meta")


@pytest.fixture(params=["directory", "gguf"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    weights = tiny.hf_weights()
    if request.param == "directory":
        return str(tiny.write_hf(tmp_path / "tiny", weights))
    return str(tiny.write_gguf(tmp_path / "tiny.gguf", tiny.gguf_weights(weights)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_every_tensor_goes_to_the_device(
    path: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.models.load.check_device", lambda dtype, device: None)
    monkeypatch.setattr(tensors, "_finite", lambda source, part, stored: stored)  # needs data
    here, there = load_model(path, dtype), load_model(path, dtype, device="meta")
    assert here.spec == there.spec
    assert {n: (w.shape, w.dtype, "meta") for n, w in here.weights.items()} == {
        n: (w.shape, w.dtype, w.device.type) for n, w in there.weights.items()
    }


def test_the_host_holds_one_tensor_at_a_time(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[torch.Tensor]] = []
    stacked = tensors._stacked

    def spy(*arguments: Any) -> torch.Tensor:
        assert all(ref() is None for ref in made), "the one before has gone to the device"
        tensor = stacked(*arguments)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(tensors, "_stacked", spy)
    model = load_model(path, "bf16", device="meta")
    assert len(made) == len(model.weights) > 10


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp8"])
def test_random_weights_are_drawn_on_the_device(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepscope.models.load.check_device", lambda dtype, device: None)
    drawn: list[torch.device] = []

    def draw(seed: int, device: torch.device) -> torch.Tensor:
        drawn.append(device)
        return torch.empty(dummy.BLOCK, device=device)  # no generator draws for `meta`

    monkeypatch.setattr(dummy, "_normal", draw)
    model = load_model("dummy:llama", dtype, device="meta")
    assert drawn == [META]
    assert {w.device for w in model.weights.values()} == {META}


def test_the_numbers_of_the_cpu_are_those_they_have_always_been() -> None:
    weights = load_model("dummy:llama", "bf16", seed=5).weights
    generator = torch.Generator().manual_seed(5)
    block = torch.empty(2**22 - 3).normal_(0, 0.02, generator=generator).bfloat16()
    first, second = weights["embed"].flatten(), weights["layers.0.qkv"].flatten()
    assert torch.equal(first, block[: len(first)])
    assert torch.equal(second, block[len(first) : len(first) + len(second)])


def test_the_memory_that_counts_is_the_device_s(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10_000, 20_000))
    with pytest.raises(StepscopeError, match=r"take 10\.0 kB and 10\.0 kB of the memory of cuda:1"):
        tensors.check_free("They", 10_001, "choose less", cuda)
    tensors.check_free("They", 10_000, "choose less", cuda)
    tensors.check_free("They", 10**15, "choose less", META)
