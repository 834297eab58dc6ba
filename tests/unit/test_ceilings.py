"""Ceilings: amount over time on a clock the test owns; a cache entry is used whole or not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from stepscope.device import ceilings, kept_ceilings
from stepscope.device.ceilings import (
    MIB,
    ROW_BYTES,
    Plan,
    best_rate,
    gemm_rates,
    gemv_rates,
    gemv_shapes,
    interleaved_ns,
    measure,
    read_rates,
    working_sets,
)
from stepscope.device.host import LoadSample
from stepscope.device.kept_ceilings import cache_file, load, load_or_measure, save
from stepscope.errors import StepscopeError
from stepscope.roofline import Ceilings
from stepscope.spec import ModelSpec

TINY = ModelSpec("tiny", "llama", 2, 32, 4, 2, 8, 64, 100, 128)


class Clock:
    """Stands still unless a call moves it, or moves by `tick` at each reading."""

    def __init__(self, tick: int = 0) -> None:
        self.now = 0
        self.tick = tick

    def __call__(self) -> int:
        self.now += self.tick
        return self.now

    def taking(self, *ns: int) -> Callable[[], None]:
        """A call that takes these times in turn, the last one for ever."""
        left = list(ns)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


def tiny_plan(clock: Clock) -> Plan:
    return Plan(
        smallest_bytes=ROW_BYTES,
        largest_bytes=4 * ROW_BYTES,
        repeats=3,
        seconds_per_repeat=0,
        most_copy_bytes=ROW_BYTES,
        most_gemv_bytes=ROW_BYTES,
        gemm_sizes=(8, 16),
        clock=clock,
    )


# ---------------------------------------------------------------- rates


def test_a_rate_is_the_amount_over_the_median_of_the_best_kernel() -> None:
    found = {"slow": [400.0, 400.0, 400.0], "fast": [100.0, 90.0, 5000.0]}
    rate = best_rate(1000, found)
    assert rate.best == "fast"
    assert rate.per_s == pytest.approx(1000 / 100e-9)
    assert rate.spread == pytest.approx((4020 - 92) / 100)


def test_one_lucky_repeat_does_not_make_a_kernel_the_best() -> None:
    found = {"steady": [100.0, 100.0, 100.0], "lucky": [1.0, 200.0, 200.0]}
    assert best_rate(1, found).best == "steady"


def test_short_calls_are_repeated_until_they_can_be_timed() -> None:
    clock = Clock()
    plan = replace(tiny_plan(clock), seconds_per_repeat=1e-6)
    found = interleaved_ns({"short": clock.taking(10), "long": clock.taking(3000)}, plan)
    assert found == {"short": [10.0] * 3, "long": [3000.0] * 3}
    # 2 + 3 x (1 + 100) short calls and 2 + 3 x (1 + 1) long ones
    assert clock.now == 305 * 10 + 8 * 3000


def test_repeats_are_taken_in_turn() -> None:
    order: list[str] = []
    calls: dict[str, Callable[[], object]] = {n: partial(order.append, n) for n in "ab"}
    interleaved_ns(calls, replace(tiny_plan(Clock()), repeats=2))
    assert "".join(order) == "aabb" + "aabb" * 2


def test_read_rates_count_the_working_set_once_per_call() -> None:
    rates = read_rates([ROW_BYTES, 4 * ROW_BYTES], tiny_plan(Clock(tick=1000)))
    assert {size: rate.per_s for size, rate in rates.items()} == {
        ROW_BYTES: ROW_BYTES / 1e-6,
        4 * ROW_BYTES: 4 * ROW_BYTES / 1e-6,
    }


def test_gemv_rates_count_the_weights_of_each_shape() -> None:
    rates = gemv_rates(TINY, tiny_plan(Clock(tick=1000)))
    expected = {name: rows * cols * 4 / 1e-6 for name, rows, cols in gemv_shapes(TINY)}
    assert {name: rate.per_s for name, rate in rates.items()} == pytest.approx(expected)


def test_gemv_weights_are_as_many_as_the_model_has_and_no_more_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[tuple[int, ...], set[int]] = {}

    def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        seen.setdefault(tuple(weight.shape), set()).add(weight.data_ptr())
        return x

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    gemv_rates(TINY, replace(tiny_plan(Clock(tick=1)), repeats=20, most_gemv_bytes=MIB))
    assert len(seen[(64, 32)]) == TINY.weight_bytes // (64 * 32 * 4)  # qkv
    seen.clear()
    gemv_rates(TINY, replace(tiny_plan(Clock(tick=1)), repeats=20, most_gemv_bytes=1))
    assert len(seen[(100, 32)]) == 1  # the largest alone, the head, still fits
    seen.clear()


def test_working_sets_span_cache_to_model_and_respect_memory() -> None:
    plan = Plan()
    sizes = working_sets(plan, 540 * MIB, None)
    assert (sizes[0], sizes[-1]) == (MIB, 540 * MIB)
    assert 512 * MIB in sizes
    assert all(size % ROW_BYTES == 0 for size in sizes)
    assert working_sets(plan, 540 * MIB, 64 * MIB)[-1] == 16 * MIB
    assert working_sets(plan, 10**12, None)[-1] == 2048 * MIB
    assert working_sets(plan, 1000, None)[0] == MIB
    assert working_sets(plan, 1000, 1) == [MIB]


def test_the_rate_of_the_model_s_own_dtype_is_measured_as_well() -> None:
    assert list(gemm_rates(tiny_plan(Clock(tick=1000)), "fp16")) == ["fp32", "bf16", "fp16"]
    assert list(gemm_rates(tiny_plan(Clock(tick=1000)), "int8")) == ["fp32", "bf16"]


def test_a_slow_product_is_not_measured_at_a_larger_size() -> None:
    """8 x 8 in 0.1 s: 16 x 16 would take 0.8 s a call."""
    rates = gemm_rates(tiny_plan(Clock(tick=100_000_000)), "fp16")
    assert {rate.best for rate in rates.values()} == {"8 x 8"}


# ---------------------------------------------------------------- the whole


def test_measure_gives_every_ceiling_and_restores_the_threads() -> None:
    before = torch.get_num_threads()
    said: list[tuple[str, float]] = []
    found = measure(TINY, 1, lambda what, share: said.append((what, share)), tiny_plan(Clock(1000)))
    assert torch.get_num_threads() == before
    weights = TINY.weight_bytes // ROW_BYTES
    assert [size // ROW_BYTES for size, _ in found.read_curve] == [1, 2, 4, weights]
    assert found.copy_bytes_per_s == pytest.approx(2 * ROW_BYTES / 1e-6)
    assert found.gemm_flops == pytest.approx({"fp32": 2 * 16**3 / 1e-6, "bf16": 2 * 16**3 / 1e-6})
    assert [point.name for point in found.gemv] == ["qkv", "o", "gate_up", "down", "head"]
    assert found.twin == ()
    assert found.extra["read"][str(ROW_BYTES)]["spread"] == 0
    assert [share for _, share in said] == sorted(share for _, share in said)
    assert said[-1][1] == 1.0
    # between two measured sizes the rate lies between theirs
    low, high = found.read_curve[0][1], found.read_curve[1][1]
    assert low < found.read_rate(1.5 * ROW_BYTES) < high


def test_out_of_memory_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't allocate memory: you tried to allocate 99 bytes\nstack")

    monkeypatch.setattr(torch, "full", refuse)
    before = torch.get_num_threads()
    with pytest.raises(StepscopeError, match=r"allocate 99 bytes\); free some memory"):
        measure(TINY, 1, plan=tiny_plan(Clock(1000)))
    assert torch.get_num_threads() == before


# ---------------------------------------------------------------- the cache


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Ceilings]:
    """Counts the measurements, which give a fixed result."""
    monkeypatch.setenv("STEPSCOPE_CACHE", str(tmp_path / "cache"))
    made: list[Ceilings] = []

    def fake(spec: ModelSpec, threads: int, *_: object) -> Ceilings:
        rate = 1e9 * (len(made) + 1)
        made.append(Ceilings("cpu", threads, "now", ((MIB, rate),), None, {"fp32": 1e12}))
        return made[-1]

    monkeypatch.setattr(kept_ceilings, "measure", fake)
    return made


def test_ceilings_are_measured_once(measured: list[Ceilings]) -> None:
    first = load_or_measure(TINY, 2)
    assert load_or_measure(TINY, 2) == first
    assert len(measured) == 1


def test_refresh_measures_again_and_keeps_the_new(measured: list[Ceilings]) -> None:
    load_or_measure(TINY, 2)
    second = load_or_measure(TINY, 2, refresh=True)
    assert load_or_measure(TINY, 2) == second == measured[1]


@pytest.mark.parametrize(
    ("spec", "threads"),
    [(TINY, 1), (replace(TINY, dtype="bf16"), 2), (replace(TINY, layers=3), 2)],
)
def test_another_thread_count_dtype_or_shape_is_another_entry(
    measured: list[Ceilings], spec: ModelSpec, threads: int
) -> None:
    load_or_measure(TINY, 2)
    load_or_measure(spec, threads)
    assert len(measured) == 2


def test_another_machine_is_another_entry(
    measured: list[Ceilings], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_measure(TINY, 2)
    monkeypatch.setattr(kept_ceilings, "machine_key", lambda: "elsewhere")
    load_or_measure(TINY, 2)
    assert len(measured) == 2


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        "\x00",
        '{"read_curve": []}',
        json.dumps(Ceilings("cpu", 2, "now", (), None, {}).to_dict()),
        json.dumps(Ceilings("cpu", 2, "now", ((2, 1.0), (1, 1.0)), None, {}).to_dict()),
        json.dumps(Ceilings("cpu", 2, "now", ((1, float("nan")),), None, {}).to_dict()),
        json.dumps(Ceilings("cpu", 2, "now", ((1, -5.0),), None, {}).to_dict()),
    ],
)
def test_a_damaged_entry_is_measured_again(measured: list[Ceilings], content: str) -> None:
    file = cache_file(TINY, 2)
    file.parent.mkdir(parents=True)
    file.write_text(content)
    assert load(file) is None
    assert load_or_measure(TINY, 2) == measured[0]
    assert load(file) == measured[0]


def test_a_cache_that_cannot_be_written_is_a_note(measured: list[Ceilings], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    found = load_or_measure(TINY, 2)
    assert "not cached" in found.notes[0]
    assert found.read_curve == measured[0].read_curve


@pytest.mark.parametrize(("share", "times"), [(None, 1), (0.0, 1), (0.1, 1), (0.34, 2)])
def test_what_a_busy_machine_reached_is_not_kept(
    measured: list[Ceilings], monkeypatch: pytest.MonkeyPatch, share: float | None, times: int
) -> None:
    quiet = kept_ceilings.measure

    def busy(spec: ModelSpec, threads: int, *rest: Any) -> Ceilings:
        return replace(quiet(spec, threads, *rest), extra={"foreign_share": share})

    monkeypatch.setattr(kept_ceilings, "measure", busy)
    first, second = load_or_measure(TINY, 2), load_or_measure(TINY, 2)
    assert len(measured) == times
    assert (len(first.notes), len(second.notes)) == ((0, 0) if times == 1 else (1, 1))
    if times == 2:
        assert "used 34 % of the cores" in first.notes[0] and "\n" not in first.notes[0]


def test_a_refresh_on_a_busy_machine_leaves_what_was_kept(
    measured: list[Ceilings], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, quiet = load_or_measure(TINY, 2), kept_ceilings.measure
    monkeypatch.setattr(
        kept_ceilings,
        "measure",
        lambda *rest: replace(quiet(*rest), extra={"foreign_share": 0.9}),
    )
    assert load_or_measure(TINY, 2, refresh=True).read_curve != kept.read_curve
    assert load_or_measure(TINY, 2) == kept


def test_the_load_of_others_is_measured_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def share(before: LoadSample, after: LoadSample, cores: int) -> float:
        seen.append((before.at_ns, after.at_ns))
        return 0.25

    monkeypatch.setattr(ceilings, "foreign_share", share)
    clock = Clock(1000)
    found = measure(TINY, 1, plan=tiny_plan(clock))
    assert found.extra["foreign_share"] == 0.25
    assert 0 < seen[0][0] < seen[0][1] <= clock.now, "from begin to end, by the plan's clock"


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    real = measure(TINY, 1, plan=tiny_plan(Clock(1000)))
    save(tmp_path / "new" / "c.json", real)
    assert load(tmp_path / "new" / "c.json") == real
