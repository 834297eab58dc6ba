"""stepscope list, explain, doctor: what there is, what it means, what works here."""

from __future__ import annotations

import difflib
import re
from typing import Annotated

import typer

from stepscope.cli.output import RUNS, entry, note, print_json
from stepscope.errors import UsageError

KINDS = ("scenarios", "policies", "devices", "models", "metrics", "runs")


def register(app: typer.Typer) -> None:
    app.command("list")(list_things)
    app.command("explain")(explain)
    app.command("doctor")(doctor)


def list_things(
    kind: Annotated[str, typer.Argument(help=" | ".join(KINDS))],
) -> None:
    """List scenarios, policies, devices, models, metrics or runs."""
    listers = {
        "scenarios": _scenarios,
        "policies": _policies,
        "devices": _devices,
        "models": _models,
        "metrics": _metrics,
        "runs": _runs,
    }
    if kind not in listers:
        raise UsageError(f"there are no '{kind}' to list; choose one of {', '.join(KINDS)}")
    for name, text in listers[kind]():
        entry(name, text, 22)


def _scenarios() -> list[tuple[str, str]]:
    from stepscope.scenario import load_scenario, scenario_files

    return [(name, load_scenario(str(path)).description) for name, path in scenario_files().items()]


def _policies() -> list[tuple[str, str]]:
    from stepscope.engine.policies import described

    return described()


def _devices() -> list[tuple[str, str]]:
    from stepscope.device.host import describe_host

    return [("cpu", str(describe_host().get("cpu", "this host")))]


def _models() -> list[tuple[str, str]]:
    from stepscope.models.catalogue import catalogue
    from stepscope.models.dummy import described

    return [(e.name, e.title) for e in catalogue()] + described()


def _metrics() -> list[tuple[str, str]]:
    from stepscope.analyze.metrics import METRICS

    return [
        (
            f"{name} [{m.unit}]",
            m.definition + (f" ({m.other_names})" if m.other_names else ""),
        )
        for name, m in METRICS.items()
    ]


def _runs() -> list[tuple[str, str]]:
    from stepscope.store import list_runs

    found = list_runs(RUNS, lambda reason: note(f"left out: {reason}"))
    return [
        (
            path.name,
            f"{meta.scenario}, {meta.label}, {meta.stamp}"
            + ("" if meta.complete else ", incomplete"),
        )
        for path, meta in found
    ]


def explain(
    word: Annotated[
        str, typer.Argument(help="A verdict, flag, phase, metric or term: bandwidth_bound, gather.")
    ],
) -> None:
    """Explain a verdict (its rule, what would prove it wrong) or another word of a report."""
    from stepscope.analyze.rules import FLAGS, RULES, rule_text
    from stepscope.analyze.words import PHASES_IN_WORDS, WORDS

    name = word.replace("-", "_").lower()
    metrics = {shown.partition(" ")[0]: what for shown, what in _metrics()}
    if name in RULES:
        rule = RULES[name]
        parts: tuple[tuple[str, str], ...] = (
            ("verdict", rule.title),
            ("rule", rule_text(name)),
            ("evidence", rule.evidence),
            ("told apart from", rule.told_apart),
            ("wrong if", rule.falsify),
            ("advice", rule.advice),
        )
    elif name in FLAGS:
        flag = FLAGS[name]
        parts = (("flag", name), ("rule", flag.rule), ("says", flag.wording))
    elif name in WORDS:
        parts = (("phase" if name in PHASES_IN_WORDS else "term", name), ("is", WORDS[name]))
    elif (metric := re.sub(r"^(p\d+|mean|max)_|_(ms|per_s)$", "", name)) in metrics:
        parts = (("metric", metric), ("is", metrics[metric]))
    else:
        near = difflib.get_close_matches(name, [*RULES, *FLAGS, *WORDS, *metrics], 3) or list(RULES)
        raise UsageError(f"there is no word '{word}' here; the nearest are {', '.join(near)}")
    for label, text in parts:
        entry(f"{label}:", text, 16)


def doctor(json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Show versions, devices, clock resolution, and what is n/a here and why."""
    from stepscope.device.doctor import findings

    found = findings()
    if json:
        print_json(found)
        return
    for name, value in found.items():
        entry(name, str(value), 22)
