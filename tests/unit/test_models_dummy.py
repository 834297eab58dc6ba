"""Random weights in a public model's shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from stepscope.errors import StepscopeError, UsageError
from stepscope.models import dummy, tensors
from stepscope.models.decoder import Decoder
from stepscope.models.load import load_model
from stepscope.runner.torch_runner import TorchRunner

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
    assert "Mixtral-8x7B-v0.1" in dummy.dummy_names()
    assert "DeepSeek-V3" not in dummy.dummy_names()


def test_every_public_model_is_listed_and_the_unsupported_say_why() -> None:
    lines = dict(dummy.described())
    assert len(lines) == 1 + 42
    for name, line in lines.items():
        supported = name.removeprefix("dummy:") in dummy.dummy_names()
        assert supported != line.startswith("not supported: ")
        assert supported == (" in bf16" in line)


@pytest.mark.parametrize("name", dummy.dummy_names()[1:])
def test_shapes_have_as_many_parameters_as_published(name: str) -> None:
    """Worked out from the configurations by others (sources in data/model_configs.json)."""
    facts = dummy._configs()[name]
    spec = dummy.dummy_spec(f"dummy:{name}", {})
    plan = tensors.tensor_plan(spec)
    elements = tensors.plan_bytes(plan, "bf16") // 2
    assert elements == facts["params_total_computed"]
    bf16 = replace(spec, dtype="bf16", kv_dtype="bf16")
    assert bf16.kv_bytes_per_token == facts["kv_bytes_per_token_16bit"] or spec.window
    own_embedding = 0 if spec.tied else spec.vocab * spec.hidden
    everything = bf16.weight_bytes_of(1, spec.layers * spec.experts)
    assert everything // 2 + own_embedding == elements
    if spec.experts:
        assert bf16.weight_bytes // 2 == facts["params_active_matmul_computed"]


@pytest.mark.parametrize("name", ["Qwen2.5-0.5B", "Gemma-3-27B", "Qwen3-30B-A3B"])
def test_a_reshaped_dummy_of_every_kind_computes(name: str) -> None:
    from tests.engine.harness import ask, run

    small = {key: SMALL[key] for key in SMALL if key != "layers"} | {"layers": 7}
    small |= {"experts": 4} if "A3B" in name else {}
    small |= {"experts_per_token": 2} if "A3B" in name else {}
    model = load_model(f"dummy:{name}", "fp32", overrides=small)
    assert model.spec.weight_bytes == model.spec.resized().weight_bytes
    runner = TorchRunner(Decoder(model.spec, model.weights), 60, 16)
    done = run([ask(i, [5 + i] * (30 + i), 4) for i in range(3)], pages=60, runner=runner)
    assert all(len(text) == 4 for text in done.outputs.values())
    reads = [row.expert_reads for row in done.work]
    if "A3B" not in name:
        assert set(reads) == {None}
    else:
        assert all(7 * 2 <= (r or 0) <= 7 * 4 for r in reads)


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
        ("dummy:deepseek-v3", {}, "family deepseek_v3.*latent attention"),
        ("dummy:llama", {"experts": 4}, "each token 0 of 4 experts"),
        ("dummy:llama", {"experts_per_token": 2}, "each token 2 of 0 experts"),
        ("dummy:qwen3-30b-a3b", {"experts_per_token": 129}, "129 of 128 experts"),
        ("dummy:qwen3-30b-a3b", {"layers": 1000}, "128 experts"),
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
