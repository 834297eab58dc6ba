"""The host: counters read from a /proc the test wrote, noise judged by arithmetic, GC seen."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepscope.device.host import (
    ForeignLoad,
    GcEvents,
    LoadSample,
    clock_resolution_ns,
    cpu_model,
    describe_host,
    foreign_share,
    machine_key,
    noise_event,
    versions,
)
from stepscope.records import Event

SECOND = 1_000_000_000
STAT = """cpu  900 0 900 0 0 0 0 900 0 0
cpu0 10 1 5 500 3 2 4 7 0 0
cpu1 20 0 0 500 0 0 0 1 0 0
cpu10 90 0 90 0 0 0 0 90 0 0
intr 1 2 3
"""


def a_sample(at_ns: int, own: int, busy: int | None, steal: int | None = 0) -> LoadSample:
    return LoadSample(at_ns, own, 5, busy, steal, 3)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "stat").write_text(STAT)
    (tmp_path / "loadavg").write_text("0.10 0.20 0.30 4/321 999\n")
    return tmp_path


def test_only_our_cpus_are_counted(proc: Path) -> None:
    load = ForeignLoad(lambda: 7, proc, cpus={0, 1})
    sample = load.sample()
    load.close()
    tick = SECOND // os.sysconf("SC_CLK_TCK")
    assert (sample.at_ns, sample.runnable) == (7, 4)
    assert sample.busy_cpu_ns == (10 + 1 + 5 + 2 + 4 + 20) * tick
    assert sample.steal_ns == 8 * tick
    assert load.cores == 2


def test_counters_are_read_anew_each_time(proc: Path) -> None:
    load = ForeignLoad(lambda: 0, proc, cpus={1})
    before = load.sample().busy_cpu_ns
    (proc / "stat").write_text(STAT.replace("cpu1 20", "cpu1 25"))
    after = load.sample().busy_cpu_ns
    assert before is not None
    assert after == before + 5 * SECOND // os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("stat", ["", "nonsense\n", "cpu0 1 2\n", "cpu0 1 1 1 1 1 1 1 1 0 0\n"])
def test_what_the_system_does_not_say_is_none(tmp_path: Path, stat: str) -> None:
    if stat:
        (tmp_path / "stat").write_text(stat)
    sample = ForeignLoad(lambda: 0, tmp_path, cpus={0, 1}).sample()
    assert (sample.busy_cpu_ns, sample.steal_ns, sample.runnable) == (None, None, None)


def test_foreign_share_is_what_others_and_the_hypervisor_took() -> None:
    before = a_sample(0, own=10, busy=100)
    after = a_sample(SECOND, own=10 + SECOND, busy=100 + SECOND + SECOND // 2, steal=SECOND // 10)
    assert foreign_share(before, after, cores=2) == pytest.approx(0.3)


def test_own_work_is_not_foreign_and_rounding_never_goes_below_nothing() -> None:
    before, after = a_sample(0, 0, 0), a_sample(SECOND, 2 * SECOND, 2 * SECOND - 10_000_000)
    assert foreign_share(before, after, cores=2) == 0.0


@pytest.mark.parametrize(("busy", "elapsed"), [(None, SECOND), (SECOND, 99_999_999), (SECOND, 0)])
def test_unknown_counters_and_short_blocks_are_not_judged(busy: int | None, elapsed: int) -> None:
    before, after = a_sample(0, 0, busy), a_sample(elapsed, 0, busy)
    assert foreign_share(before, after, cores=2) is None
    assert noise_event(before, after, cores=2, threshold=-1) is None


def test_noise_is_an_event_from_run_start_with_its_evidence() -> None:
    before = a_sample(5 * SECOND, 0, 0)
    after = LoadSample(6 * SECOND, 0, 17, SECOND // 2, SECOND // 4, 6)
    assert noise_event(before, after, cores=1, start_ns=4 * SECOND) == Event(
        SECOND,
        2 * SECOND,
        "noise",
        None,
        "others used 75 % of 1 cores, 12 involuntary switches, 250 ms stolen, run queue 6",
    )


def test_a_quiet_block_is_no_event() -> None:
    before, after = a_sample(0, 0, 0), a_sample(SECOND, 0, SECOND // 20)
    assert noise_event(before, after, cores=1) is None
    assert noise_event(before, after, cores=1, threshold=0.049) is not None


def test_the_real_counters_only_grow() -> None:
    load = ForeignLoad()
    first, second = load.sample(), load.sample()
    assert second.at_ns >= first.at_ns
    assert (second.busy_cpu_ns or 0) >= (first.busy_cpu_ns or 0)


# ---------------------------------------------------------------- description


def test_the_cpu_has_a_name_even_where_the_kernel_gives_none(tmp_path: Path) -> None:
    (tmp_path / "named").write_text("processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n")
    (tmp_path / "arm").write_text("processor\t: 0\nBogoMIPS\t: 50\n")
    assert cpu_model(tmp_path / "named") == "Some CPU @ 2 GHz"
    assert cpu_model(tmp_path / "arm")
    assert cpu_model(tmp_path / "absent") == cpu_model(tmp_path / "arm")


def test_the_description_names_what_a_reader_needs() -> None:
    host = describe_host()
    assert host["cores"] >= 1
    assert host["cpu"]
    assert {"python", "torch"} <= versions().keys()
    assert machine_key() == machine_key()


def test_clock_resolution_is_the_smallest_step_seen() -> None:
    readings = iter([0, 0, 100, 100, 140, 240])
    assert clock_resolution_ns(lambda: next(readings), readings=5) == 40


# ---------------------------------------------------------------- garbage collection


@pytest.fixture
def no_automatic_gc() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_automatic_gc")
def test_collections_are_seen_while_entered_and_only_then() -> None:
    ticks = iter(range(100, 1000, 10))
    observer = GcEvents(start_ns=50, clock=lambda: next(ticks))
    with observer:
        gc.collect(2)
        gc.collect(0)
    gc.collect()
    first, second = observer.take()
    assert (first.begin_ns, first.end_ns, first.kind) == (50, 60, "gc")
    assert first.detail.startswith("generation 2, ")
    assert first.detail.endswith(" collected")
    assert (second.begin_ns, second.detail[:12]) == (70, "generation 0")
    assert observer.take() == []


@pytest.mark.usefixtures("no_automatic_gc")
def test_the_garbage_is_counted() -> None:
    gc.collect()
    with GcEvents() as observer:
        loop: list[object] = []
        loop.append(loop)
        del loop
        gc.collect()
    assert int(observer.take()[0].detail.split()[2]) >= 1
