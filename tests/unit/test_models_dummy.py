"""Random weights in a public model's shape."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import dummy, tensors
from stepscope.models.load import load_model

SMALL = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 16} | {
    "intermediate": 96,
    "vocab": 128,
    "max_context": 256,
}


def test_overrides_change_the_shape_and_the_weights_follow() -> None:
    model = load_model("dummy:Llama-3.1-8B", "fp32", overrides=SMALL)
    assert {key: getattr(model.spec, key) for key in SMALL} == SMALL
    assert model.spec.name == "dummy:Llama-3.1-8B" and not model.spec.tied
    assert model.weights["layers.0.qkv"].shape == (4 * 16 + 2 * 2 * 16, 64)
    assert model.weights["head"].shape == (128, 64)
    assert model.tokenizer is None
    assert model.spec.weight_bytes == model.spec.resized().weight_bytes


def test_names_are_found_in_any_case() -> None:
    upper = load_model("dummy:SMOLLM2-135M", overrides={"layers": 1, "vocab": 256}).spec
    assert (upper.hidden, upper.heads, upper.kv_heads, upper.tied) == (576, 9, 3, True)
    assert dummy.dummy_spec("dummy:Llama", {}).layers == dummy.GENERIC_SPEC.layers
    assert "Mistral-7B-v0.3" in dummy.dummy_names()
    assert "Mixtral-8x7B-v0.1" not in dummy.dummy_names()


def test_every_named_dummy_has_a_whole_shape() -> None:
    for name in dummy.dummy_names():
        spec = dummy.dummy_spec(f"dummy:{name}", {})
        assert spec.linear_params > 0 and spec.eos_ids == ()


def test_weights_depend_on_the_seed_alone() -> None:
    first, again, other = (
        load_model("dummy:llama", "fp32", overrides=SMALL, seed=seed).weights for seed in (1, 1, 2)
    )
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        if name.endswith("_norm"):
            assert torch.equal(tensor, torch.ones_like(tensor))
        else:
            assert not torch.equal(tensor, other[name])
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1)


def test_a_repeated_block_makes_no_two_rows_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dummy, "BLOCK", 1009)
    weights = load_model("dummy:llama", "fp32", overrides=SMALL).weights
    embed = weights["embed"]
    assert embed.numel() > 4 * 1009
    assert len(torch.unique(embed, dim=0)) == len(embed)


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("dummy:lama-3.1-8b", {}, "nearest are .*Llama-3.1-8B"),
        ("dummy:qwen3-8b", {}, "family qwen3"),
        ("dummy:", {}, "no dummy model ''"),
        ("dummy:llama", {"depth": 3}, "no dimension 'depth'"),
        ("dummy:llama", {"layers": 0}, "layers of dummy:llama is 0"),
        ("dummy:llama", {"kv_heads": 3}, "4 heads on 3 kv_heads"),
        ("dummy:llama", {"head_dim": 15}, "head_dim of 15"),
    ],
)
def test_usage_errors(name: str, overrides: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_model(name, overrides=overrides)


def test_too_large_is_said_before_allocating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "available_memory", lambda: 16_000_000_000)
    monkeypatch.setattr(torch, "empty", lambda *a, **k: pytest.fail("allocated"))
    with pytest.raises(StepscopeError, match=r"405B in bf16 take 812 GB and 16\.0 GB"):
        load_model("dummy:Llama-3.1-405B")


def test_available_memory_heeds_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo, limit = tmp_path / "meminfo", tmp_path / "memory.max"
    monkeypatch.setattr(tensors, "MEMINFO", meminfo)
    monkeypatch.setattr(tensors, "CGROUP_LIMIT", limit)
    assert tensors.available_memory() is None
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:  5 kB\n")
    assert tensors.available_memory() == 5 * 1024
    limit.write_text("max\n")
    assert tensors.available_memory() == 5 * 1024
    limit.write_text("4096\n")
    assert tensors.available_memory() == 4096
