"""Rows shared, copied, swapped and stored in fewer bytes: the real cache under the real decoder."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from stepscope.engine.plan import Move
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from stepscope.errors import UsageError
from stepscope.models.decoder import Decoder
from stepscope.models.kv_cache import CastKvCache, Int8KvCache, KvCache, kv_cache
from stepscope.runner.torch_runner import TorchRunner
from stepscope.sections import EngineSection
from stepscope.spec import ModelSpec
from tests.engine.harness import Observed, Outcome, ask, run, same_text, small_decoder

CPU = torch.device("cpu")
PAGE_SIZES = (1, 16, 256)
# Logits of the small decoder reach 5.5. K and V have 8 bits of mantissa in bf16, and
# codes of 1/127 of the largest element of a head in int8.
TOLERANCE = {"bf16": 0.05, "int8": 0.2}


@cache
def decoder(kv_dtype: str = "fp32") -> Decoder:
    made = small_decoder()
    made.spec = replace(made.spec, kv_dtype=kv_dtype)
    return made


def spec() -> ModelSpec:
    return decoder().spec


def requests() -> list[Request]:
    """Two long beginnings, each used by some, and one prompt that comes three times."""
    draw = np.random.default_rng(5)

    def ids(count: int) -> list[int]:
        return [int(t) for t in draw.integers(0, 251, count)]

    first, second, whole = ids(70), ids(37), ids(48)
    prompts = [
        [*first, *ids(9)],
        [*second, *ids(30)],
        whole,
        [*first, *ids(21)],
        [*first[:50], *ids(12)],
        whole,
        [*second, *ids(3)],
        whole,
    ]
    return [ask(i, p, 40 + 5 * (i % 3), arrival_ns=i * 120) for i, p in enumerate(prompts)]


def outcome(
    page_size: int,
    tokens: int,
    policy: str = "chunked",
    kv_dtype: str = "fp32",
    keep_logits: bool = False,
    forget: bool = True,
    **options: object,
) -> tuple[Outcome, Observed]:
    pages = tokens // page_size
    runner = Observed(TorchRunner(decoder(kv_dtype), pages, page_size), keep_logits)
    done = run(
        requests(),
        policy,
        pages=pages,
        page_size=page_size,
        limits=Limits(max_seqs=4, token_budget=64, chunk=40),
        runner=runner,
        forget=forget,
        **options,  # type: ignore[arg-type]
    )
    return done, runner


@cache
def reference() -> tuple[dict[int, list[int]], dict[int, list[float]]]:
    done, seen = outcome(16, 4096)
    return done.outputs, seen.gaps


# ------------------------------------------------------------------ the same text


@pytest.mark.parametrize("swap", [False, True], ids=["recompute", "swap"])
@pytest.mark.parametrize("form", ["off", "hash", "radix"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_prefix_cache_and_swapping_change_no_token(page_size: int, form: str, swap: bool) -> None:
    """Freed pages are NaN, so that a stale or a wrongly shared row would show."""
    expected, gaps = reference()
    ties: list[str] = []
    scarce = {1: 200, 16: 208, 256: 768}[page_size]
    runs = [(4096, "chunked"), (scarce, "chunked"), (scarce, "prefill-first")]
    for tokens, policy in runs:
        done, _ = outcome(page_size, tokens, policy, prefix=form, swap=swap)
        ties += same_text(expected, gaps, done.outputs, allowed=1.0)
        if tokens == scarce and page_size < 256:
            assert done.preemptions
            recomputed = sum(row.recompute_tokens or 0 for row in done.work)
            assert not recomputed if swap else recomputed or form != "off"
        hits = sum(row.prefix_hit_tokens or 0 for row in done.work)
        # A page of 256 is never full here: only the tree finds what is in it.
        assert (hits > 0) == (form == "radix" or (form == "hash" and page_size < 256))
    compared = len(runs) * sum(map(len, expected.values()))
    assert len(ties) <= compared / 1000, ties


def test_a_hit_saves_exactly_its_tokens() -> None:
    plain, _ = outcome(16, 4096, policy="static")
    cached, _ = outcome(16, 4096, policy="static", prefix="radix")
    hits = sum(row.prefix_hit_tokens or 0 for row in cached.work)
    computed = [sum(r.sum_prefill_tokens or 0 for r in d.work) for d in (plain, cached)]
    assert hits > 100 and computed[0] - computed[1] == hits
    assert hits == sum(r.cached_tokens or 0 for r in cached.records.values())


# ------------------------------------------------------------------ fewer bytes


def teacher_forced(kv_dtype: str) -> torch.Tensor:
    """Logits of each request's first token after its prompt: one more after every chunk of 20."""
    runner = Observed(TorchRunner(decoder(kv_dtype), 64, 16), keep_logits=True)
    asked = [ask(r.id, r.tokens, 1) for r in requests()]
    run(asked, pages=64, runner=runner, limits=Limits(token_budget=64, chunk=20), forget=False)
    return torch.stack([rows[0] for _, rows in sorted(runner.logits.items())])


@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_logits_with_a_smaller_cache_are_close(kv_dtype: str) -> None:
    exact, stored = teacher_forced("fp32"), teacher_forced(kv_dtype)
    worst = (stored - exact).abs().max().item()
    print(f"{kv_dtype}: largest logit difference {worst:.4f} of {exact.abs().max().item():.1f}")
    assert 0 < worst < TOLERANCE[kv_dtype]


@pytest.mark.parametrize("form", ["hash", "radix"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_smaller_cache_shares_copies_and_swaps_as_well(kv_dtype: str, form: str) -> None:
    """Codes and scales move together: with scarce pages the logits are finite and the text as
    it is without all that, up to what a chunk sees of itself."""
    done, seen = outcome(16, 208, kv_dtype=kv_dtype, prefix=form, swap=True, keep_logits=True)
    assert done.preemptions and sum(row.swapped_pages or 0 for row in done.work)
    for rows in seen.logits.values():
        assert torch.isfinite(torch.stack(rows)).all()
    plain, plain_seen = outcome(16, 4096, kv_dtype=kv_dtype)
    same_text(plain.outputs, plain_seen.gaps, done.outputs, allowed=1.0)


def made(kv_dtype: str, dtype: torch.dtype = torch.float32) -> KvCache:
    return kv_cache(replace(spec(), kv_dtype=kv_dtype), 8, 4, dtype, CPU)


def rows_of(count: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(count, 2 * spec().kv_heads * spec().head_dim, generator=draw)


@pytest.mark.parametrize(
    "kv_dtype,dtype,kind",
    [
        ("fp32", torch.float32, KvCache),
        ("fp32", torch.bfloat16, CastKvCache),
        ("bf16", torch.float32, CastKvCache),
        ("bf16", torch.bfloat16, KvCache),
        ("int8", torch.float32, Int8KvCache),
        ("int8", torch.bfloat16, Int8KvCache),
    ],
)
def test_rows_come_back(kv_dtype: str, dtype: torch.dtype, kind: type[KvCache]) -> None:
    """As they are, rounded to bf16, or within half a step of the largest of their head."""
    store = made(kv_dtype, dtype)
    assert type(store) is kind
    rows = rows_of(5).to(dtype)
    slots = torch.tensor([9, 2, 30, 31, 0])
    store.write(1, slots, rows)
    assert torch.equal(rows, rows_of(5).to(dtype)), "what is written stays as it was"
    read = store.gather(1, slots.flip(0)).flip(0)
    assert read.dtype == dtype
    if kv_dtype == "int8":
        heads = rows.float().unflatten(1, (-1, spec().head_dim))
        step = heads.abs().amax(-1, keepdim=True) / 127
        error = (read.float().unflatten(1, (-1, spec().head_dim)) - heads).abs()
        rounding = 0.0 if dtype == torch.float32 else 2.0**-8
        assert (error <= step * 0.501 + heads.abs() * rounding).all()
    elif kv_dtype == "bf16":
        assert torch.equal(read, rows.bfloat16().to(dtype))
    else:
        assert torch.equal(read, rows)
    assert not store.gather(0, slots).any(), "another layer is not touched"


def test_a_row_of_zeros_comes_back_as_zeros() -> None:
    store = made("int8")
    store.write(0, torch.tensor([3]), torch.zeros(1, store.row))
    assert not store.gather(0, torch.tensor([3])).any()


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_bytes_are_counted_as_stored(kv_dtype: str) -> None:
    store = made(kv_dtype)
    held = sum(rows.nbytes for rows in store._stores())
    per_token = replace(spec(), kv_dtype=kv_dtype).kv_bytes_per_token
    assert held == per_token * 8 * 4 == store.row_bytes * len(store.layers) * 8 * 4
    done, _ = outcome(16, 4096, kv_dtype=kv_dtype)
    context = sum((r.sum_decode_kv_tokens or 0) for r in done.work if r.kind == "decode")
    gathered = sum((r.kv_gather_bytes or 0) for r in done.work if r.kind == "decode")
    assert gathered == context * per_token


# ------------------------------------------------------------------ moves


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_moves_are_made_in_order(kv_dtype: str) -> None:
    """Page 1 goes out and its place is taken; page 2 is copied there; then 1 comes back to 5."""
    store = made(kv_dtype)
    for layer in range(len(store.layers)):
        store.write(layer, torch.arange(32), rows_of(32, seed=layer))
    before = [store.gather(layer, torch.arange(32)).clone() for layer in range(len(store.layers))]
    store.move(
        [
            Move("out", 1, 7),
            Move("out", 3, 2),
            Move("copy", 2, 1, 3),
            Move("copy", 1, 6, 2),
            Move("in", 7, 5),
            Move("in", 2, 2),
        ]
    )
    for layer, old in enumerate(before):
        new = store.gather(layer, torch.arange(32)).clone()
        assert torch.equal(new[4:7], old[8:11]) and torch.equal(new[7], old[7])
        assert torch.equal(new[24:26], old[8:10]) and torch.equal(new[26:28], old[26:28])
        assert torch.equal(new[20:24], old[4:8]), "page 5 is what page 1 was"
        assert torch.equal(new[8:12], old[12:16])
        for page in (0, 3, 4, 7):
            assert torch.equal(new[4 * page : 4 * page + 4], old[4 * page : 4 * page + 4])


def test_host_memory_grows_and_keeps_what_is_there() -> None:
    store = made("int8")
    store.write(0, torch.arange(32), rows_of(32))
    old = store.gather(0, torch.arange(32)).clone()
    for page in range(8):
        store.move([Move("out", page, page)])
    store.poison(range(8))
    assert torch.isnan(store.gather(0, torch.arange(32))).all()
    store.move([Move("in", page, page) for page in reversed(range(8))])
    assert torch.equal(store.gather(0, torch.arange(32)), old)


# ------------------------------------------------------------------ capacity


def test_capacity_in_bytes_pages_or_tokens() -> None:
    """SmolLM2-135M in bf16 holds 2 x 30 x 3 x 64 x 2 = 23,040 bytes per token."""
    per_token = replace(
        spec(), layers=30, kv_heads=3, head_dim=64, kv_dtype="bf16"
    ).kv_bytes_per_token
    assert per_token == 23_040
    section = EngineSection(page_size=16)
    assert section.total_pages(per_token) == 1024
    assert replace(section, kv_tokens=100).total_pages(per_token) == 7
    assert replace(section, kv_pages=9).total_pages(per_token) == 9
    page = 16 * per_token
    assert replace(section, kv_bytes=10 * page).total_pages(per_token) == 10
    assert replace(section, kv_bytes=10 * page - 1).total_pages(per_token) == 9
    small = replace(spec(), layers=30, kv_heads=3, head_dim=64, kv_dtype="int8")
    assert small.kv_bytes_per_token == 2 * 30 * 3 * (64 + 4)
    assert replace(section, kv_bytes=10 * page).total_pages(small.kv_bytes_per_token) == 18
    with pytest.raises(UsageError, match=r"kv_bytes is 1,000, and one page of 16 tokens takes"):
        replace(section, kv_bytes=1000).total_pages(per_token)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "int8"])
def test_pages_are_gathered_as_their_rows_are(kv_dtype: str) -> None:
    store = made(kv_dtype, torch.float32)
    store.write(0, torch.arange(32), rows_of(32))
    rows = torch.cat([torch.arange(page * 4, page * 4 + 4) for page in (5, 0, 5, 7)])
    expected = store.gather(0, rows).clone()
    assert torch.equal(store.gather(0, torch.tensor([5, 0, 5, 7]), 4), expected)
