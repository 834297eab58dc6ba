"""Foreign load: it is named, it is charged to itself, and it does not become somebody's prefill."""

from __future__ import annotations

import pytest

from stepscope.analyze import analyze
from stepscope.records import Event
from tests.synthetic import MS, Prefill, make_run


def test_time_that_others_took_is_charged_to_them_and_not_to_the_kernels() -> None:
    quiet = analyze(make_run(decode_steps=80))
    noisy = analyze(make_run(decode_steps=80, noise=[(i, 200 * MS) for i in range(40, 70)]))
    assert noisy.verdict.name == "cpu_starved"
    shares = {line.key: line.share for line in noisy.budget}
    assert shares["noise"] > 0.5
    assert sum(line.ns for line in noisy.budget) == sum(
        s.wall_ns for s in noisy.steps if s.kind != "idle" and not s.warmup
    )
    # Decode-only statistics come from the quiet steps, so they are those of the quiet run.
    assert noisy.throughput.p50_step_ns == pytest.approx(quiet.throughput.p50_step_ns, rel=0.02)
    assert any("left them out" in n or "leave them out" in n for n in noisy.notes)


def test_a_little_noise_does_not_become_the_verdict() -> None:
    quiet = analyze(make_run(decode_steps=80))
    noisy = analyze(make_run(decode_steps=80, noise=[(40, 30 * MS)]))
    assert noisy.verdict.name == quiet.verdict.name


def test_noise_that_covers_everything_leaves_the_steps_in_and_says_so() -> None:
    run = make_run(decode_steps=80)
    before = analyze(run).throughput.decode_steps
    run.events.append(Event(0, run.steps[-1].end_ns, "noise", None, "others used 60 % of 2 cores"))
    found = analyze(run)
    assert found.throughput.decode_steps == before > 70
    assert "cpu_contention" in dict(found.flags)


def test_a_small_prefill_in_a_noisy_block_is_not_blamed_for_the_noise() -> None:
    run = make_run(
        decode_steps=80,
        prefills=[Prefill(at=i, tokens=32) for i in (20, 30, 40, 60)],
    )
    hit = next(s for s in run.steps if s.sum_prefill_tokens == 32 and s.step > 55)
    stretch = 500 * MS
    hit.end_ns += stretch
    hit.forward_ns = (hit.forward_ns or 0) + stretch
    for row in run.steps:
        if row.step > hit.step:
            row.begin_ns += stretch
            row.end_ns += stretch
            row.emitted_ns = None if row.emitted_ns is None else row.emitted_ns + stretch
    blamed = next(s for s in analyze(run).stalls if s.step == hit.step)
    assert blamed.cause == "prefill" and blamed.culprits
    run.events.append(Event(hit.begin_ns, hit.end_ns, "noise", None, "others used 60 % of 2 cores"))
    cleared = next(s for s in analyze(run).stalls if s.step == hit.step)
    assert cleared.cause == "noise"
    assert not cleared.culprits
