"""stepscope run: a scenario, or one prompt, under one policy or several."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stepscope.cli import gates
from stepscope.cli.output import RUNS, StatusLine, note, print_json, shell_word, stdout, wrote
from stepscope.errors import INTERRUPTED, UsageError

if TYPE_CHECKING:
    from stepscope.engine.loop import Output
    from stepscope.runner.job import Job, Watcher
    from stepscope.scenario import Scenario

PROMPT_SCENARIO = """
name = "prompt"
description = "One sentence, token by token, and then its inside."
[workload]
prompts = ["?"]
requests = 1
arrivals = "burst"
"""


def register(app: typer.Typer) -> None:
    app.command("run")(run)


ScenarioName = Annotated[
    str | None, typer.Argument(help="A scenario file, or the name of one that comes along.")
]
Model = Annotated[
    str | None,
    typer.Option(
        envvar="STEPSCOPE_MODEL", help="Name, file.gguf, directory, hub id ORG/NAME or dummy:NAME."
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option(help="NAME[,key=value]..., see list policies, or PATH.py:NAME; repeatable."),
]


def run(
    scenario: ScenarioName = None,
    prompt: Annotated[str | None, typer.Option(help="Run one prompt and show its inside.")] = None,
    model: Model = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            envvar="STEPSCOPE_DTYPE", help="auto, fp32, bf16, fp16, int8, int4, or fp8 on a GPU."
        ),
    ] = None,
    policy: Policies = None,
    device: Annotated[
        str, typer.Option(envvar="STEPSCOPE_DEVICE", help="auto, cpu or cuda.")
    ] = "auto",
    attention: Annotated[
        str | None,
        typer.Option(help="auto, gather, or paged (reads pages in place; what auto is on CUDA)."),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(envvar="STEPSCOPE_THREADS", min=1, help="CPU threads.")
    ] = None,
    graphs: Annotated[
        str | None, typer.Option(help="How decode steps are launched: eager, compile or cuda.")
    ] = None,
    overlap: Annotated[
        bool | None, typer.Option(help="Schedule a step while the last one is computed.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of arrivals and sampling.")] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most output tokens of a request.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="KEY=VALUE, e.g. engine.max_seqs=8.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Run directory (default: runs/ID).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print every setting and where it came from.")
    ] = False,
    no_ceilings: Annotated[
        bool, typer.Option("--no-ceilings", help="Skip measuring the device: no bound, no verdict.")
    ] = False,
    fail_on: Annotated[
        list[str] | None, typer.Option(help="Exit 3 if it holds, e.g. 'p99_itl_ms>200'.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Run a workload through the engine and say what its steps were bound by."""
    rules = [gates.parse_limit(text) for text in fail_on or []]
    chosen = _scenario(scenario, prompt)
    chosen = _override(
        chosen,
        settings or [],
        {
            "model.name": model,
            "model.dtype": dtype,
            "engine.policy": policy,
            "engine.attention": attention,
            "engine.threads": threads,
            "engine.graphs": graphs,
            "engine.overlap": overlap,
            "workload.seed": seed,
            "sampling.seed": seed,
            "sampling.max_tokens": max_tokens,
        },
    )
    _check_device(device)
    _check_policies(chosen)
    if dry_run:
        _print_origins(chosen, json)
        return
    status = StatusLine()
    paths, interrupted = _run_all(chosen, status, device, output, force, no_ceilings, prompt, json)
    _results(paths, prompt is not None, json, rules)
    if interrupted:
        sys.exit(INTERRUPTED)


def _scenario(name: str | None, prompt: str | None) -> Scenario:
    from stepscope.scenario import apply_overrides, load_scenario, parse_scenario

    if prompt is not None and name is not None:
        raise UsageError("give a scenario or --prompt, not both")
    if prompt is not None:
        if not prompt:
            raise UsageError("--prompt is empty; give it at least one character")
        base = parse_scenario(PROMPT_SCENARIO, "--prompt")
        return apply_overrides(base, {"workload.prompts": [prompt]}, "flag")
    if name is None:
        raise UsageError("give a scenario, e.g. scenarios/quickstart.toml, or --prompt TEXT")
    return load_scenario(name)


def _override(scenario: Scenario, settings: list[str], flags: dict[str, Any]) -> Scenario:
    from stepscope.scenario import apply_overrides

    pairs = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--set {text} has no '='; write KEY=VALUE")
        pairs[key.strip()] = value.strip()
    scenario = apply_overrides(scenario, pairs)
    given = {key: value for key, value in flags.items() if value is not None and value != []}
    return apply_overrides(scenario, given, "flag")


def _check_device(device: str) -> None:
    """Only the word: whether there is a GPU is for the machine that runs it."""
    if device not in ("auto", "cpu", "cuda"):
        raise UsageError(f"there is no device '{device}'; choose auto, cpu or cuda")


def _check_policies(scenario: Scenario) -> None:
    from stepscope.engine.policies import policy_for

    for text in scenario.engine.policies:
        policy_for(scenario, text)


def _print_origins(scenario: Scenario, json: bool) -> None:
    origins = scenario.origins()
    if json:
        print_json({k: {"value": o.value, "from": o.origin} for k, o in origins.items()})
        return
    for key, origin in origins.items():
        value = "n/a" if origin.value is None else origin.value
        print(f"{key:<28} {value!s:<40} {origin.origin}")
    print(f"{'requests':<28} {len(scenario.requests):<40} resolved")


def _run_all(
    scenario: Scenario,
    status: StatusLine,
    device: str,
    output: Path | None,
    force: bool,
    no_ceilings: bool,
    prompt: str | None,
    quiet: bool,
) -> tuple[list[Path], bool]:
    """One run per policy, on the same weights and arrivals. Stops after an interrupted one."""
    from stepscope.runner.execute import execute
    from stepscope.runner.job import Watcher
    from stepscope.store import slug

    policies = scenario.engine.policies
    job = _loaded(scenario, status, _checked(scenario, device), no_ceilings)
    paths: list[Path] = []
    watcher = Watcher(on_progress=status.step, on_phase=status.say)
    if prompt is not None and not quiet:
        watcher.on_output, watcher.on_progress = _stream, lambda row, done, total: None
    with _interruptible(watcher):
        for policy in policies:
            directory = output / slug(policy) if output and len(policies) > 1 else output
            own = replace(job, policy=policy, directory=directory, force=force)
            paths.append(_run_one(own, watcher, status, execute))
            if watcher.interrupted:
                break
    if len(paths) > 1:
        note(f"next: stepscope compare {' '.join(map(shell_word, paths))}")
    return paths, watcher.interrupted


def _checked(scenario: Scenario, device: str) -> str:
    """The device. A mistake in the second policy shows before the first has run."""
    from stepscope.device.cuda import choose_device
    from stepscope.runner.job import limits_of
    from stepscope.runner.launching import check_launching
    from stepscope.store import slug

    policies = scenario.engine.policies
    for policy in policies:
        limits_of(scenario, policy, 1)
    device = choose_device(device)
    check_launching(scenario.engine, device)
    if len({slug(policy) for policy in policies}) < len(policies):
        raise UsageError(f"policies {', '.join(policies)} would share a directory; drop one")
    return device


def _loaded(scenario: Scenario, status: StatusLine, device: str, no_ceilings: bool) -> Job:
    """The model, and what the device reaches with it; what was noted meanwhile is told."""
    from stepscope.cli.ceilings import thread_count
    from stepscope.device.kept_ceilings import load_or_measure
    from stepscope.models.load import load_model
    from stepscope.runner.job import Job, build_decoder

    threads = thread_count(scenario.engine.threads)
    section = scenario.model
    model = load_model(
        section.name,
        section.dtype,
        overrides=section.dimensions or None,
        progress=status.show,
        told=status.say,
        device=device,
    )
    status.clear()
    ceilings, notes = None, model.notes
    if not no_ceilings:
        ceilings = load_or_measure(model.spec, threads, progress=status.measuring, device=device)
        notes += ceilings.notes
    for sentence in notes:
        status.say(sentence)
    decoder = build_decoder(model, scenario.engine.products, scenario.engine.kv_dtype)
    command = ["stepscope", *sys.argv[1:]]
    return Job(
        scenario, "", decoder, model.tokenizer, threads, ceilings, command, RUNS, notes=notes
    )


def _run_one(job: Job, watcher: Watcher, status: StatusLine, execute: Any) -> Path:
    from stepscope.store import remember_run

    status.say(f"{job.scenario.name} under {job.policy}: {len(job.scenario.requests)} requests")
    try:
        path: Path = execute(job, watcher)
    finally:
        status.clear()
    remember_run(path, RUNS)
    wrote(path, f"stepscope report {shell_word(path)} -o report.html")
    return path


@contextmanager
def _interruptible(watcher: Watcher) -> Iterator[None]:
    """The first Ctrl-C ends the run after the current step; a second one ends it at once."""

    def on_signal(number: int, frame: object) -> None:
        if watcher.interrupted:
            raise KeyboardInterrupt
        watcher.stop()
        note("\ninterrupted: finishing this step and saving the run (again to stop at once)")

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, action in previous.items():
            signal.signal(number, action)


def _stream(output: Output) -> None:
    """A sentence appears, token by token."""
    from stepscope.text import printable

    sys.stdout.write(printable(output.piece) + ("\n\n" if output.finished else ""))
    sys.stdout.flush()


def _results(paths: list[Path], prompted: bool, json: bool, rules: list[gates.Limit]) -> None:
    from stepscope.cli.compare import load
    from stepscope.report import console as view
    from stepscope.report.side_by_side import comparison as compared

    loaded, comparison = load([str(p) for p in paths], RUNS)
    if json:
        print_json(
            {
                "runs": [
                    {"run": str(path), "label": label, **analysis.to_dict()}
                    for path, (label, _, analysis) in zip(paths, loaded, strict=True)
                ],
                "comparison": None if comparison is None else comparison.rows,
            }
        )
    else:
        out = stdout()
        for path, (_, run, analysis) in zip(paths, loaded, strict=True):
            if prompted and run.meta.samples:
                out.print(view.token_table(run, analysis))
                out.print()
            elif not prompted:
                view.samples(out, run.meta)
            view.show(out, run, analysis, f"stepscope report {shell_word(path)} -o report.html")
            out.print()
        if comparison is not None:
            compared(out, comparison, None, False)
    for _, _, analysis in loaded:
        gates.judge_limits(rules, analysis)
