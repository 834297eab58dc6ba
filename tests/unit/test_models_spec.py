"""Bytes and FLOPs of windows, experts, biases and head sizes, against counting one by one."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from stepscope.analyze.cost import CostModel
from stepscope.records import StepRecord
from stepscope.spec import (
    ModelSpec,
    RopeScaling,
    attention_flops,
    linear_flops,
    step_kv_bytes,
    windowed_decode_tokens,
    windowed_pairs,
    windowed_prefill_tokens,
)

DENSE = ModelSpec(
    name="dense",
    arch="llama",
    layers=6,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=24,  # not hidden / heads
    intermediate=96,
    vocab=100,
    max_context=512,
    dtype="bf16",
    kv_dtype="bf16",
)
LOCAL = replace(DENSE, window=16, layer_pattern="ssf")
ROUTED = replace(DENSE, experts=5, experts_per_token=2)


def step(
    decodes: list[int], chunks: list[tuple[int, int]] | None = None, **more: Any
) -> StepRecord:
    """A step of decodes with these contexts and chunks (cached, new)."""
    row = StepRecord(0, "mixed", 0, 1, **more)
    row.num_decode_requests, row.sum_decode_kv_tokens = len(decodes), sum(decodes)
    chunks = chunks or []
    row.num_prefill_requests = len(chunks)
    row.sum_prefill_kv_tokens = sum(cached for cached, _ in chunks)
    row.sum_prefill_tokens = sum(new for _, new in chunks)
    row.num_output_tokens = len(decodes) + len(chunks)
    return row


def keys_seen(position: int, window: int) -> range:
    return range(max(0, position - window + 1), position + 1)


def test_own_head_dim_counts_in_products_and_cache() -> None:
    q, kv = 4 * 24, 2 * 24
    layer = 64 * (q + 2 * kv) + q * 64 + 3 * 96 * 64
    assert DENSE.linear_params == 6 * layer
    assert DENSE.kv_bytes_per_token == 2 * 6 * kv * 2
    assert DENSE.weight_bytes == 2 * (6 * (layer + 2 * 64) + 64 + 100 * 64)


def test_biases_and_more_norms_count_as_weights() -> None:
    grown = replace(DENSE, qkv_bias=True, qk_norm=True, post_norms=True)
    more = (4 + 2 * 2) * 24 + 2 * 24 + 2 * 64
    assert grown.weight_bytes - DENSE.weight_bytes == 2 * 6 * more
    assert grown.linear_params == DENSE.linear_params


def test_the_pattern_repeats_over_the_layers() -> None:
    assert [LOCAL.is_local(i) for i in range(6)] == [True, True, False] * 2
    assert (LOCAL.local_layers, LOCAL.resized(layers=4).local_layers) == (4, 3)
    assert replace(LOCAL, window=None).local_layers == 0


@pytest.mark.parametrize("context", [1, 15, 16, 17, 200])
def test_decodes_read_no_more_than_the_window(context: int) -> None:
    seen = len(keys_seen(context - 1, 16))
    assert windowed_decode_tokens(LOCAL, 3, 3 * context) == 3 * seen
    cost = CostModel(LOCAL, None, "bf16").of(step([context] * 3))
    layer_row = 2 * 2 * 24 * 2
    assert cost.kv_bytes == 3 * layer_row * (2 * context + 4 * seen)
    attention = cost.flops - linear_flops(LOCAL, 3, 3)
    assert attention == 3 * 4 * 4 * 24 * (2 * context + 4 * seen)


@pytest.mark.parametrize("cached", [0, 3, 15, 16, 60])
@pytest.mark.parametrize("new", [1, 12, 16, 17, 40])
def test_prefills_read_a_band(cached: int, new: int) -> None:
    bands = [keys_seen(p, 16) for p in range(cached, cached + new)]
    assert windowed_pairs(LOCAL, 2, 2 * new, 2 * cached) == 2 * sum(map(len, bands))
    read = len(set().union(*bands))
    assert windowed_prefill_tokens(LOCAL, 2, 2 * new, 2 * cached) == 2 * read
    cost = CostModel(LOCAL, None, "bf16").of(step([], [(cached, new)] * 2))
    assert cost.kv_bytes == 2 * 2 * 2 * 24 * 2 * (2 * (cached + new) + 4 * read)


def test_unequal_decodes_are_bounded_from_above() -> None:
    contexts = [2, 40]
    true = sum(min(c, 16) for c in contexts)
    assert true <= windowed_decode_tokens(LOCAL, 2, sum(contexts)) <= 2 * 16


def test_without_a_window_all_is_as_before() -> None:
    assert step_kv_bytes(DENSE, 70, 70) == step_kv_bytes(DENSE, 70) == 70 * 2 * 6 * 48 * 2
    assert attention_flops(DENSE, 70, 70) == attention_flops(DENSE, 70)


def test_a_token_goes_through_its_experts_alone() -> None:
    attention = 64 * (8 * 24) + 4 * 24 * 64
    assert ROUTED.linear_params == 6 * (attention + 5 * 64 + 2 * 3 * 96 * 64)
    one = 3 * 96 * 64 * 2
    rest = ROUTED.weight_bytes_of(1, expert_reads=0)
    assert ROUTED.weight_bytes == rest + 6 * 2 * one
    assert ROUTED.weight_bytes_of(7, expert_reads=23) == rest + 23 * one
    assert ROUTED.weight_bytes_of(10**6) == rest + 6 * 5 * one


def test_expected_experts_by_going_through_all_choices() -> None:
    choices = [set(c) for c in combinations(range(5), 2)]
    expected = sum(len(a | b) for a in choices for b in choices) / len(choices) ** 2
    rest, one = ROUTED.weight_bytes_of(1, expert_reads=0), 3 * 96 * 64 * 2
    assert ROUTED.weight_bytes_of(2) == rest + round(6 * expected * one)


def test_recorded_experts_outweigh_the_expectation() -> None:
    model = CostModel(ROUTED, None, "bf16")
    told, guessed = model.of(step([9, 9], expert_reads=13)), model.of(step([9, 9]))
    assert told.weight_bytes == ROUTED.weight_bytes_of(2, 13)
    assert guessed.weight_bytes == ROUTED.weight_bytes_of(2) > told.weight_bytes


def test_specs_survive_being_written() -> None:
    rope = RopeScaling("divisors", divisors=(1.0, 8.0))
    spec = replace(LOCAL, rope=rope, eos_ids=(1, 2))
    assert ModelSpec.from_dict(spec.to_dict()) == spec
    older = {k: v for k, v in DENSE.to_dict().items() if k in SINCE_THE_BEGINNING}
    assert ModelSpec.from_dict(older) == DENSE


SINCE_THE_BEGINNING = {
    *("name", "arch", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab"),
    *("max_context", "rope_theta", "norm_eps", "tied", "dtype", "kv_dtype", "eos_ids", "bos_id"),
    *("add_bos", "linear_bytes", "norm_bytes", "head_bytes", "embedding_bytes"),
}
