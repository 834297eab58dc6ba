"""One scenario under one policy, from arrivals to a run directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from stepscope.device.cpu import HostClock
from stepscope.device.cuda import cuda_timeline
from stepscope.device.host import ForeignLoad, GcEvents
from stepscope.device.telemetry import Telemetry, nvml_reader
from stepscope.device.timeline import Timeline, clock_timeline
from stepscope.engine.kv import PagePool
from stepscope.engine.loop import Engine
from stepscope.engine.plan import Runner
from stepscope.engine.policies import policy_for
from stepscope.engine.prefix import prefix_cache
from stepscope.engine.recorder import Recorder
from stepscope.engine.scheduler import Limits, Scheduler
from stepscope.models.tensors import check_free, memory_told
from stepscope.records import RunMeta
from stepscope.roofline import Ceilings
from stepscope.runner.describe import Setting, run_meta
from stepscope.runner.job import Job, Watcher, limits_of
from stepscope.runner.launching import attach_graphs, graph_attacher, measure_launches
from stepscope.runner.probe import decode_plan, prefill_plan, steps
from stepscope.runner.replay import Replay, TokenText
from stepscope.runner.session import Session
from stepscope.runner.swap import swap_pages, unswapped_notes
from stepscope.runner.threaded import ThreadedRunner
from stepscope.runner.torch_runner import TorchRunner
from stepscope.runner.twin import CONTEXTS, Twin, drift, measure_twin, twin_batches
from stepscope.store import RunWriter

LESS_MEMORY = "lower engine.token_budget, engine.max_seqs or engine.kv_tokens"
# A drift of the dispatch floor beyond this is told: the host changed speed during the run.
DRIFT_TOLD = 0.2


@dataclass(frozen=True, slots=True)
class _Ready:
    """Everything that is set up before the clock starts."""

    runner: TorchRunner
    scheduler: Scheduler
    replay: Replay
    meta: RunMeta
    ceilings: Ceilings | None


def execute(job: Job, watcher: Watcher) -> Path:
    """Run it and return the run directory. Raises UsageError before anything is written."""
    with memory_told(LESS_MEMORY):
        ready = _prepare(job, watcher)
    meta = ready.meta
    directory = job.directory or job.root / meta.run_id
    with RunWriter.create(directory, meta, job.force) as writer, memory_told(LESS_MEMORY):
        _serve(job, watcher, ready, writer)
        _note_drift(job, watcher, ready)
        writer.meta(meta)
    return directory


def _prepare(job: Job, watcher: Watcher) -> _Ready:
    scenario, spec, engine = job.scenario, job.decoder.spec, job.scenario.engine
    limits = limits_of(scenario, job.policy, spec.max_context)
    torch.set_num_threads(job.threads)
    pool = _pool(job)
    places = _places(job, pool)
    runner = TorchRunner(
        job.decoder, pool.total, pool.page_size, engine.attention, limits.max_context
    )
    attach_graphs(runner, engine, limits.max_seqs, watcher.on_phase)
    watcher.on_phase("measuring the dispatch floor")
    ceilings = _with_twin(job, limits.max_seqs)
    meta = run_meta(job, runner, Setting(limits, pool.total, places, ceilings))
    _warm_up(runner, pool, limits)
    if runner.device.type == "cuda" and job.beside.launches:
        runner.launches = measure_launches(runner, pool, limits)
        meta.basis["launches"] = "counted beside the run" if runner.launches else "absent"
    replay = Replay(scenario.requests, job.tokenizer, spec.vocab)
    return _Ready(runner, _scheduler(job, pool, limits, places), replay, meta, ceilings)


def _serve(job: Job, watcher: Watcher, ready: _Ready, writer: RunWriter) -> None:
    """From the clock's start to the last row, however it ends."""
    engine_settings, meta = job.scenario.engine, ready.meta
    clock = HostClock()
    timeline = _timeline(ready, clock, engine_settings.overlap)
    recorder = Recorder(clock.now, engine_settings.warmup_steps)
    with ExitStack() as open_things:
        computing = open_things.enter_context(_computing(ready.runner, engine_settings.overlap))
        telemetry = _telemetry(ready)
        if telemetry is not None:
            open_things.enter_context(telemetry)
        load = ForeignLoad(clock.now)
        session = Session(
            writer,
            recorder,
            ready.replay,
            watcher,
            len(job.scenario.requests),
            open_things.enter_context(GcEvents(clock=clock.now)),
            load,
            load.sample(),
            telemetry=telemetry,
        )
        engine = Engine(
            ready.replay,
            ready.scheduler,
            computing,
            recorder,
            clock,
            TokenText(job.tokenizer),
            session.emit,
            session.on_step,
            engine_settings.overlap,
        )
        watcher.engine = engine
        engine.stopping = watcher.interrupted
        try:
            meta.complete = engine.run()
        except KeyboardInterrupt:
            watcher.interrupted = True
        finally:
            watcher.engine = None
            _finish(engine, session, meta, clock)
    if timeline is not None and ready.runner.device.type == "cuda":
        meta.clock["device_drift_ns"] = timeline.drift_ns(clock.now)


def _timeline(ready: _Ready, clock: HostClock, overlap: bool) -> Timeline | None:
    """Where the device times come from; None where host and device are one timeline."""
    timeline = None
    if ready.runner.device.type == "cuda":
        timeline, uncertainty = cuda_timeline(clock.now)
        ready.meta.clock["device_offset_uncertainty_ns"] = uncertainty
    elif overlap:
        timeline = clock_timeline(clock.now)
    ready.runner.timeline = timeline
    return timeline


@contextmanager
def _computing(runner: TorchRunner, overlap: bool) -> Iterator[Runner]:
    """A GPU works by itself; on a CPU a thread has to, if steps are to overlap."""
    if not overlap or runner.device.type == "cuda":
        yield runner
        return
    threaded = ThreadedRunner(runner)
    try:
        yield threaded
    finally:
        threaded.close()


def _telemetry(ready: _Ready) -> Telemetry | None:
    if ready.runner.device.type != "cuda":
        return None
    read, told = nvml_reader(ready.meta.device.get("uuid"))
    ready.meta.basis["telemetry"] = "measured with NVML" if read else told
    return Telemetry(read) if read else None


def _pool(job: Job) -> PagePool:
    """Raises StepscopeError, before anything is allocated, if the cache exceeds the memory."""
    engine, per_token = job.scenario.engine, job.decoder.spec.kv_bytes_per_token
    pool = PagePool(engine.total_pages(per_token), engine.page_size)
    check_free(
        f"{pool.total:,} KV pages of {pool.page_size} tokens",
        per_token * pool.total * pool.page_size,
        "lower engine.kv_tokens",
        job.decoder.embed.device,
    )
    return pool


def _places(job: Job, pool: PagePool) -> int | None:
    """Pages that may wait in host memory; None where nothing is swapped, or without a limit."""
    if job.scenario.engine.preemption != "swap":
        return None
    page_bytes = job.decoder.spec.kv_bytes_per_token * pool.page_size
    return swap_pages(job.scenario.engine, pool, page_bytes, job.decoder.embed.device)


def _scheduler(job: Job, pool: PagePool, limits: Limits, places: int | None) -> Scheduler:
    engine = job.scenario.engine
    return Scheduler(
        policy_for(job.scenario, job.policy),
        pool,
        limits,
        job.decoder.spec.eos_ids,
        prefix_cache(engine.prefix_cache, pool),
        swap=engine.preemption == "swap",
        swap_pages=places,
    )


def _finish(engine: Engine, session: Session, meta: RunMeta, clock: HostClock) -> None:
    """Whatever ended the run, what was observed is written."""
    engine.abort()
    unseen = session.replay.drop_rest()
    if unseen:
        meta.notes.append(f"{unseen} of {session.total} requests had not arrived when it stopped")
    meta.notes += unswapped_notes(engine.scheduler)
    meta.samples = list(session.samples.values())
    session.flush(clock.now(), final=True)
    session.writer.meta(meta)


def _twin(job: Job) -> Twin:
    engine = job.scenario.engine
    return Twin(
        job.decoder.spec,
        job.decoder.products,
        engine.page_size,
        engine.attention,
        job.decoder.embed.device,
        # What was compiled has no twin: at minimal widths other kernels would be generated.
        None if engine.graphs == "compile" else graph_attacher(engine.graphs),
    )


def _with_twin(job: Job, max_seqs: int) -> Ceilings | None:
    """The dispatch floor belongs to the moment, so every run measures its own."""
    if job.ceilings is None:
        return None
    most = min(max_seqs, len(job.scenario.requests))
    batches = job.beside.twin_batches or twin_batches(most)
    points = measure_twin(_twin(job), batches, job.beside.twin_contexts or CONTEXTS)
    return replace(job.ceilings, twin=tuple(points))


def _note_drift(job: Job, watcher: Watcher, ready: _Ready) -> None:
    ceilings, meta = ready.ceilings, ready.meta
    if ceilings is None or watcher.interrupted:
        return
    ratio = drift(_twin(job), ceilings)
    meta.ceilings = ceilings.to_dict()
    meta.ceilings["extra"] = {**ceilings.extra, "twin_after_over_before": ratio}
    if abs(ratio - 1) > DRIFT_TOLD:
        meta.notes.append(
            f"the dispatch floor measured after the run is {ratio:.2f} x the one before: "
            "this host changed its speed meanwhile"
        )


def _warm_up(runner: TorchRunner, pool: PagePool, limits: Limits) -> None:
    """Touch what a first step would pay for: threads, kernels, the cache's memory."""
    tokens = min(64, pool.total * pool.page_size, limits.max_context)
    steps(runner, prefill_plan(tokens, pool.page_size), 1)
    steps(runner, decode_plan(1, tokens, pool.page_size), 3)
    most = min(limits.max_seqs, pool.total)
    if runner.device.type == "cuda" and most > 1:  # kernels are chosen and compiled by batch
        steps(runner, decode_plan(most, pool.page_size, pool.page_size), 3)
