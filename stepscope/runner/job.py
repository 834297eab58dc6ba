"""What is run and who watches it: a scenario under one policy, with a model that is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stepscope.engine.loop import Engine, Output
from stepscope.engine.policies import limits_in, policy_for
from stepscope.engine.scheduler import Limits
from stepscope.models.decoder import Decoder
from stepscope.models.linear import choose_products
from stepscope.models.load import LoadedModel
from stepscope.models.packed import is_quantized
from stepscope.models.tokenizer import TextTokenizer
from stepscope.records import StepRecord
from stepscope.roofline import Ceilings
from stepscope.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Beside:
    """What is measured beside a run, if not everything: it takes seconds."""

    twin_batches: tuple[int, ...] | None = None  # None: powers of two and the largest
    twin_contexts: tuple[int, ...] | None = None  # None: those of the twin's own
    launches: bool = True  # on a GPU; the profiler stays attached to the process


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
    beside: Beside = Beside()


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
