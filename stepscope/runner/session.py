"""What gathers while a run is on, and is written about once a second and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from stepscope.device.host import ForeignLoad, GcEvents, LoadSample, noise_event, usable_cpus
from stepscope.device.telemetry import Telemetry
from stepscope.engine.loop import Output
from stepscope.engine.recorder import Recorder
from stepscope.records import Sample, StepRecord
from stepscope.runner.job import Watcher
from stepscope.runner.replay import Replay
from stepscope.store import RunWriter

FLUSH_NS = 1_000_000_000
KEPT_SAMPLES = 8


@dataclass
class Session:
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
    telemetry: Telemetry | None = None
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
        if self.telemetry is not None:
            self.telemetry.latest.stamp(row)
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
