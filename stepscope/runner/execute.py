"""One scenario under one policy, from arrivals to a run directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from stepscope.device.cpu import HostClock
from stepscope.device.host import (
    ForeignLoad,
    GcEvents,
    LoadSample,
    clock_resolution_ns,
    describe_host,
    noise_event,
    usable_cpus,
    versions,
)
from stepscope.device.timeline import clock_timeline
from stepscope.engine.kv import PagePool
from stepscope.engine.loop import Engine, Output
from stepscope.engine.plan import Runner
from stepscope.engine.policies import limits_in, policy_for, settings_of
from stepscope.engine.prefix import prefix_cache
from stepscope.engine.recorder import Recorder, cost_per_step_ns
from stepscope.engine.scheduler import Limits, Scheduler
from stepscope.models.decoder import Decoder
from stepscope.models.linear import choose_products
from stepscope.models.load import LoadedModel
from stepscope.models.packed import is_quantized
from stepscope.models.tensors import check_free
from stepscope.models.tokenizer import TextTokenizer
from stepscope.records import RunMeta, Sample, StepRecord
from stepscope.runner.probe import decode_plan, prefill_plan, steps
from stepscope.runner.replay import Replay, TokenText
from stepscope.runner.swap import swap_pages, unswapped_notes
from stepscope.runner.threaded import ThreadedRunner
from stepscope.runner.torch_runner import TorchRunner
from stepscope.runner.twin import drift, measure_twin, twin_batches
from stepscope.scenario import Scenario
from stepscope.spec import Ceilings
from stepscope.store import RunWriter, new_run_id

FLUSH_NS = 1_000_000_000
KEPT_SAMPLES = 8
# A drift of the dispatch floor beyond this is told: the host changed speed during the run.
DRIFT_TOLD = 0.2
BASIS = {
    "host clock": "measured",
    "device": "absent",
    "launches": "absent",
    "telemetry": "absent",
    "scheduled work": "measured",
    "queue": "measured",
    "memory": "measured",
}
# On a CPU the thread that computes is the device of an overlapped run.
OVERLAP_BASIS = {"device": "measured in the thread that computes"}


@dataclass(frozen=True, slots=True)
class Job:
    scenario: Scenario
    policy: str  # NAME or NAME,key=value,...
    decoder: Decoder
    tokenizer: TextTokenizer | None
    threads: int
    ceilings: Ceilings | None
    command: list[str]
    root: Path  # of runs, when no directory is given
    directory: Path | None = None
    force: bool = False
    notes: tuple[str, ...] = ()  # on the model, made while it was loaded


@dataclass
class Watcher:
    """What sees the run from outside: the client of its text, and whoever shows progress."""

    on_output: Callable[[Output], None] = lambda output: None
    on_progress: Callable[[StepRecord, int, int], None] = lambda row, done, total: None
    on_phase: Callable[[str], None] = lambda text: None
    engine: Engine | None = None  # set while running, so that an interrupt can stop it
    interrupted: bool = False

    def stop(self) -> None:
        self.interrupted = True
        if self.engine is not None:
            self.engine.stopping = True


def build_decoder(model: LoadedModel, products: str, kv_dtype: str = "auto") -> Decoder:
    """Takes the model's weights. products: auto measures which kind is faster here.

    kv_dtype: what the KV cache stores; auto = what the model computes in.
    """
    spec = model.spec if kv_dtype == "auto" else replace(model.spec, kv_dtype=kv_dtype)
    if products == "auto":
        matrices = {name: w for name, w in model.weights.items() if w.dim() == 2}
        tied = model.spec.tied and is_quantized(matrices["embed"])
        products = choose_products([w for n, w in matrices.items() if n != "embed" or tied])
    return Decoder(spec, model.weights, products)


def limits_of(scenario: Scenario, policy: str, max_context: int) -> Limits:
    """The scenario's limits with the policy's own settings on top. Raises UsageError."""
    section = scenario.engine
    policy_for(scenario, policy)
    limits = Limits(
        max_seqs=section.max_seqs,
        token_budget=section.token_budget,
        chunk=section.chunk or section.token_budget,
        max_context=max_context,
    )
    changed: dict[str, Any] = dict(limits_in(policy))
    return replace(limits, **changed)


@dataclass
class _Session:
    """The moving parts of one run, and what has to be written when it ends, however it ends."""

    writer: RunWriter
    recorder: Recorder
    replay: Replay
    watcher: Watcher
    total: int
    gc: GcEvents
    load: ForeignLoad
    last_load: LoadSample
    samples: dict[int, Sample] = field(default_factory=dict)
    finished: int = 0
    flushed_ns: int = 0
    cores: int = field(default_factory=lambda: len(usable_cpus()))

    def emit(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            self._keep(output)
            self.watcher.on_output(output)

    def _keep(self, output: Output) -> None:
        request = output.request.id
        sample = self.samples.get(request)
        if sample is None:
            if len(self.samples) >= KEPT_SAMPLES:
                return
            sample = self.samples[request] = Sample(
                request, self.replay.prompts.get(request, ""), ""
            )
        sample.text += output.piece
        sample.token_ids.append(output.token)
        sample.pieces.append(output.piece)
        if output.logprobs is not None:
            sample.logprobs.append(output.logprobs.logprob)
            sample.top_ids.append(output.logprobs.top_ids)
            sample.top_logprobs.append(output.logprobs.top)

    def on_step(self, row: StepRecord) -> None:
        self.finished += row.num_finished or 0
        self.watcher.on_progress(row, self.finished, self.total)
        if row.end_ns - self.flushed_ns >= FLUSH_NS:
            self.flush(row.end_ns)

    def flush(self, now: int, final: bool = False) -> None:
        """Write what has gathered, and judge the block of steps since the last time."""
        load = self.load.sample()
        noise = noise_event(self.last_load, load, self.cores)
        self.last_load, self.flushed_ns = load, now
        # Open parts are written as far as they go: a killed run must not lose its tokens.
        self.recorder.end_all()
        rows, parts, events = self.recorder.drain(final)
        events += self.gc.take() + ([noise] if noise else [])
        self.writer.append(rows, parts, events)
        self.writer.requests(self.replay.records)


def execute(job: Job, watcher: Watcher) -> Path:
    """Run it and return the run directory. Raises UsageError before anything is written."""
    scenario, spec = job.scenario, job.decoder.spec
    limits = limits_of(scenario, job.policy, spec.max_context)
    torch.set_num_threads(job.threads)
    pool = _pool(job)
    swapping = scenario.engine.preemption == "swap"
    page_bytes = spec.kv_bytes_per_token * pool.page_size
    places = swap_pages(scenario.engine, pool, page_bytes) if swapping else None
    runner = TorchRunner(
        job.decoder, pool.total, pool.page_size, scenario.engine.attention, limits.max_context
    )
    watcher.on_phase("measuring the dispatch floor")
    ceilings = _with_twin(job, limits.max_seqs, pool.page_size)
    meta = _meta(job, limits, ceilings, pool.total, runner.attention.name)
    meta.engine["swap_pages"] = places
    directory = job.directory or job.root / meta.run_id
    _warm_up(runner, pool, limits)
    replay = Replay(scenario.requests, job.tokenizer, spec.vocab)
    with RunWriter.create(directory, meta, job.force) as writer:
        clock = HostClock()
        computing = _computing(runner, scenario.engine.overlap, clock)
        load = ForeignLoad(clock.now)
        with GcEvents(clock=clock.now) as gc_events:
            recorder = Recorder(clock.now, scenario.engine.warmup_steps)
            session = _Session(
                writer,
                recorder,
                replay,
                watcher,
                len(scenario.requests),
                gc_events,
                load,
                load.sample(),
            )
            engine = Engine(
                replay,
                _scheduler(job, pool, limits, places),
                computing,
                recorder,
                clock,
                TokenText(job.tokenizer),
                session.emit,
                session.on_step,
                scenario.engine.overlap,
            )
            watcher.engine = engine
            engine.stopping = watcher.interrupted
            try:
                meta.complete = engine.run()
            except KeyboardInterrupt:
                watcher.interrupted = True
            finally:
                watcher.engine = None
                if isinstance(computing, ThreadedRunner):
                    computing.close()
                _finish(engine, session, meta, clock)
        _note_drift(job, meta, ceilings, session)
        writer.meta(meta)
    return directory


def _computing(runner: TorchRunner, overlap: bool, clock: HostClock) -> Runner:
    if not overlap:
        return runner
    runner.timeline = clock_timeline(clock.now)
    return ThreadedRunner(runner)


def _pool(job: Job) -> PagePool:
    """Raises StepscopeError, before anything is allocated, if the cache exceeds the memory."""
    engine, per_token = job.scenario.engine, job.decoder.spec.kv_bytes_per_token
    pool = PagePool(engine.total_pages(per_token), engine.page_size)
    check_free(
        f"{pool.total:,} KV pages of {pool.page_size} tokens",
        per_token * pool.total * pool.page_size,
        "lower engine.kv_tokens",
    )
    return pool


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


def _finish(engine: Engine, session: _Session, meta: RunMeta, clock: HostClock) -> None:
    """Whatever ended the run, what was observed is written."""
    engine.abort()
    unseen = session.replay.drop_rest()
    if unseen:
        meta.notes.append(f"{unseen} of {session.total} requests had not arrived when it stopped")
    meta.notes += unswapped_notes(engine.scheduler)
    meta.samples = list(session.samples.values())
    session.flush(clock.now(), final=True)
    session.writer.meta(meta)


def _with_twin(job: Job, max_seqs: int, page_size: int) -> Ceilings | None:
    """The dispatch floor belongs to the moment, so every run measures its own."""
    if job.ceilings is None:
        return None
    spec, products = job.decoder.spec, job.decoder.products
    most = min(max_seqs, len(job.scenario.requests))
    attention = job.scenario.engine.attention
    points = measure_twin(
        spec, twin_batches(most), products, page_size=page_size, attention=attention
    )
    return replace(job.ceilings, twin=tuple(points))


def _note_drift(job: Job, meta: RunMeta, ceilings: Ceilings | None, session: _Session) -> None:
    if ceilings is None or session.watcher.interrupted:
        return
    attention = job.scenario.engine.attention
    ratio = drift(job.decoder.spec, ceilings, job.decoder.products, attention=attention)
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


def _meta(
    job: Job, limits: Limits, ceilings: Ceilings | None, pages: int, attention: str
) -> RunMeta:
    scenario, spec = job.scenario, job.decoder.spec
    slo = {"ttft_ms": scenario.slo.ttft_ms, "itl_ms": scenario.slo.itl_ms}
    lapped = spec.layers if attention == "gather" else 0
    return RunMeta(
        run_id=new_run_id(scenario.name, job.policy),
        label=job.policy,
        stamp="MEASURED",
        created_utc=datetime.now(UTC).isoformat(timespec="seconds"),
        scenario=scenario.name,
        policy=job.policy,
        model=spec.to_dict(),
        device={"kind": "cpu", "threads": job.threads, **describe_host()},
        engine={
            "page_size": scenario.engine.page_size,
            "kv_pages": pages,
            "kv_dtype": spec.kv_dtype,
            "prefix_cache": scenario.engine.prefix_cache,
            "preemption": scenario.engine.preemption,
            "max_seqs": limits.max_seqs,
            "token_budget": limits.token_budget,
            "chunk": limits.chunk,
            "policy": settings_of(policy_for(scenario, job.policy)),
            "dtype": spec.dtype,
            "graphs": "eager",
            "overlap": scenario.engine.overlap,
            "products": job.decoder.products,
            "attention": attention,
        },
        command=job.command,
        seed=scenario.workload.seed,
        workload={**scenario.to_dict(), "sha256": scenario.sha256()},
        slo={k: v for k, v in slo.items() if v is not None},
        ceilings=ceilings.to_dict() if ceilings else None,
        clock={
            "source": "time.monotonic_ns",
            "resolution_ns": clock_resolution_ns(),
            "timelines": 2 if scenario.engine.overlap else 1,
        },
        recorder={
            "ns_per_step": round(cost_per_step_ns(lapped)),
            "laps_per_step": 10 + 2 * lapped,
        },
        basis={**BASIS, **(OVERLAP_BASIS if scenario.engine.overlap else {})},
        versions=versions(),
        notes=list(job.notes),
    )
