"""Scheduling policies: pure functions over a view of the queue.

A policy is four choices: the order of the waiting queue, admission, tokens per request in this
step, and the victim when pages run out. It may delay a token but never change it. The text
NAME,key=value,... names one: admission, victim, the limits, and the policy's own knobs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from inspect import unwrap
from pathlib import Path
from typing import Any

from stepscope.engine.policies import (
    deadline_chunk as deadlines,
)
from stepscope.engine.policies import (
    edf,
    hrrn,
    mlfq,
    prefix,
    priority,
    shortest,
    vtc,
)
from stepscope.engine.policies.admission import ADMISSIONS, RESERVE_MAX, WATERMARK
from stepscope.engine.policies.chunked import chunked
from stepscope.engine.policies.decode_first import KNOBS as DECODE_FIRST_KNOBS
from stepscope.engine.policies.decode_first import decode_first
from stepscope.engine.policies.orca import orca
from stepscope.engine.policies.own import load_own
from stepscope.engine.policies.preempt import VICTIMS, lowest_priority, youngest
from stepscope.engine.policies.prefill_first import prefill_first
from stepscope.engine.policies.static import static
from stepscope.engine.policies.view import COMMON, Grant, Knob, Policy, Seen, View
from stepscope.errors import UsageError
from stepscope.scenario import Scenario
from stepscope.sections import parse_policy
from stepscope.text import listing

# Limits of the engine that a policy may set for itself.
LIMITS = {
    "chunk": "most prefill tokens of one request in a step; default: the engine's",
    "token_budget": "most tokens of a step; default: the engine's",
    "max_seqs": "most requests that run at once; default: the engine's",
}


def _whole_steps() -> list[Policy]:
    """Those that differ in the tokens of a step."""
    return [
        Policy("static", _said(static), static, RESERVE_MAX, youngest),
        Policy("orca", _said(orca), orca, RESERVE_MAX, youngest),
        Policy("prefill-first", _said(prefill_first), prefill_first, WATERMARK, youngest),
        Policy(
            "decode-first",
            _said(decode_first),
            decode_first,
            WATERMARK,
            youngest,
            knobs=DECODE_FIRST_KNOBS,
        ),
        Policy("chunked", _said(chunked), chunked, WATERMARK, youngest),
    ]


def ordered(name: str, about: str, **choices: Any) -> Policy:
    """Spends the tokens of a step as `chunked` does, unless given otherwise."""
    same = {"assign": chunked, "admission": WATERMARK, "victim": youngest}
    return Policy(name, about, **{**same, **choices})


def _orders() -> list[Policy]:
    """Those that differ in who gets in, judged by the requests alone."""
    return [
        ordered(
            "lpm",
            "Longest cached prefix first; a prompt that shares its first tokens with an earlier "
            "waiting one waits until that has computed them.",
            order=prefix.longest_prefix,
            knobs=prefix.LPM_KNOBS,
        ),
        ordered(
            "dfs-weight",
            "Depth first through the tree of waiting prompts, the branch with most requests first.",
            order=prefix.depth_first,
        ),
        ordered(
            "priority",
            "The smaller priority number first, of equals the earlier arrival.",
            order=priority.by_priority,
            victim=lowest_priority,
            evict=priority.worse_class,
            knobs=priority.KNOBS,
        ),
        ordered(
            "sjf",
            "Shortest job first, by prompt or (an oracle!) by output. Long ones may starve.",
            order=shortest.shortest_job,
            knobs=shortest.SJF_KNOBS,
        ),
        ordered(
            "srpt",
            "Shortest remaining time (an oracle!): a running request goes back for a waiting one "
            "with fewer tokens to go. Long ones may starve.",
            order=shortest.shortest_remaining,
            victim=shortest.longest_remaining,
            evict=shortest.longer_than_best,
            knobs=shortest.SRPT_KNOBS,
        ),
        ordered(
            "edf",
            "Earliest deadline first: arrival + TTFT + i x ITL for the i-th token.",
            order=edf.earliest_deadline,
            knobs=edf.KNOBS,
        ),
    ]


def _rememberers() -> list[Policy]:
    """Those that remember what happened in the run."""
    return [
        ordered(
            "hrrn",
            "Highest 1 + wait / service, the wait in tokens served meanwhile: who waits comes up.",
            order=hrrn.highest_ratio,
            remember=hrrn.count_tokens,
            knobs=shortest.SJF_KNOBS,
        ),
        ordered(
            "mlfq",
            "Feedback queues: new and short ones first, preempting those that have used their "
            "quantum; who is not served for a while rises to the top.",
            order=mlfq.by_level,
            victim=mlfq.lowest_level,
            evict=mlfq.lower_level,
            remember=mlfq.keep_places,
            knobs=mlfq.KNOBS,
        ),
        ordered(
            "vtc",
            "Fair shares: the client that was served least (weighted tokens) is admitted next.",
            order=vtc.least_served,
            remember=vtc.keep_counters,
            knobs=vtc.KNOBS,
        ),
        ordered(
            "deadline-chunk",
            "As much prefill as the tightest decode deadline leaves time for, the most urgent "
            "prompt first; step times are predicted.",
            assign=deadlines.deadline_chunk,
            order=deadlines.most_urgent,
            remember=deadlines.fit_steps,
            knobs=deadlines.KNOBS,
        ),
    ]


def _said(function: Any) -> str:
    return " ".join((function.__doc__ or "").split())


POLICIES = {policy.name: policy for policy in [*_whole_steps(), *_orders(), *_rememberers()]}


def policy_named(name: str) -> Policy:
    """Raises UsageError for a name that is not in POLICIES."""
    try:
        return POLICIES[name]
    except KeyError:
        close = get_close_matches(name, POLICIES, 2)
        hint = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise UsageError(
            f"there is no policy '{name}'{hint}; choose one of "
            f"{listing(sorted(POLICIES), most=30)}, or PATH.py:NAME of your own"
        ) from None


def policy_of(text: str, slo: Mapping[str, float] | None = None, folder: Path = Path()) -> Policy:
    """The policy that NAME,key=value,... or PATH.py:NAME,... describes.

    slo: ttft_ms and itl_ms of the scenario, for policies with deadlines. folder: where a policy
    file is looked for besides the current one. Raises UsageError.
    """
    name, settings = parse_policy(text)
    policy = load_own(name, folder, POLICIES["chunked"]) if ":" in name else policy_named(name)
    given: dict[str, int | float | str] = {
        key: value for key, value in (slo or {}).items() if key in policy.knobs
    }
    for key, value in settings.items():
        if key == "admission":
            policy = replace(policy, admission=ADMISSIONS[_choice(text, key, value, ADMISSIONS)])
        elif key == "victim":
            policy = replace(policy, victim=VICTIMS[_choice(text, key, value, VICTIMS)])
        elif key in LIMITS:
            _check_number(text, key, value, Knob(1, "", least=1))
        else:
            given[key] = _checked(text, key, value, policy)
    return replace(policy, given=given)


def policy_for(scenario: Scenario, text: str) -> Policy:
    """The policy under this scenario: its deadlines from [slo], files beside it. UsageError."""
    slo = {"ttft_ms": scenario.slo.ttft_ms, "itl_ms": scenario.slo.itl_ms}
    given = {key: value for key, value in slo.items() if value is not None}
    return policy_of(text, given, Path(scenario.source).parent)


def limits_in(text: str) -> dict[str, int]:
    """The engine limits that a policy's text sets; `policy_of` has checked them."""
    return {k: int(v) for k, v in parse_policy(text)[1].items() if k in LIMITS}


def _checked(text: str, key: str, value: int | float | str, policy: Policy) -> int | float | str:
    knobs = {**COMMON, **policy.knobs}
    if key not in knobs:
        known = listing(["admission", "victim", *LIMITS, *knobs], most=30)
        raise UsageError(f"policy '{text}': '{key}' is not a setting of it; give {known}")
    knob = knobs[key]
    if knob.choices:
        return _choice(text, key, value, dict.fromkeys(knob.choices))
    _check_number(text, key, value, knob)
    return value


def _choice(text: str, key: str, value: int | float | str, known: Mapping[str, Any]) -> str:
    if value not in known:
        names = listing(list(known), most=10)
        raise UsageError(f"policy '{text}': '{key}={value}' is not possible; {key} is {names}")
    return str(value)


def _check_number(text: str, key: str, value: int | float | str, knob: Knob) -> None:
    whole = isinstance(knob.default, int)
    fits = not isinstance(value, str) and knob.least <= value <= knob.most
    if not fits or (whole and not isinstance(value, int)):
        kind = "a whole number" if whole else "a number"
        raise UsageError(
            f"policy '{text}': '{key}={value}' is not possible; "
            f"{key} is {kind} from {knob.least:,g} to {knob.most:,.10g}"
        )


def settings_of(policy: Policy) -> dict[str, int | float | str]:
    """Every choice and knob with its value, for the run's record."""
    victims = {rule: name for name, rule in VICTIMS.items()}
    choices = {
        "admission": policy.admission.name,
        "victim": victims.get(unwrap(policy.victim), policy.victim.__name__),
    }
    return {**choices, **{key: policy.value(key) for key in {**COMMON, **policy.knobs}}}


def described() -> list[tuple[str, str]]:
    """(name or setting, what it does), for `stepscope list policies`."""
    rows: list[tuple[str, str]] = []
    for policy in POLICIES.values():
        rows.append((policy.name, policy.about))
        if policy.admission is not WATERMARK:
            rows.append((f"  ,admission={policy.admission.name}", policy.admission.about))
        rows += [_knob_row(key, knob) for key, knob in policy.knobs.items()]
    rows.append(
        ("PATH.py:NAME", "Your own: a function View -> list[Grant], or a Policy, in a file.")
    )
    rows.append(("any of them", "Settings that every policy takes:"))
    rules = [_knob_row("admission", Knob("watermark", "", choices=tuple(ADMISSIONS)))]
    rules += [(f"    {rule.name}", rule.about) for rule in ADMISSIONS.values()]
    rules += [_knob_row(key, knob) for key, knob in COMMON.items()]
    victims = Knob("youngest", "who goes back when pages run out", choices=tuple(VICTIMS))
    return [
        *rows,
        *rules,
        _knob_row("victim", victims),
        *((f"  ,{k}=N", about) for k, about in LIMITS.items()),
    ]


def _knob_row(key: str, knob: Knob) -> tuple[str, str]:
    others = [choice for choice in knob.choices if choice != knob.default]
    about = [f"or {listing(others)}"] * bool(others) + [knob.about] * bool(knob.about)
    return f"  ,{key}={knob.default}", "; ".join(about)


__all__ = [
    "POLICIES",
    "Grant",
    "Knob",
    "Policy",
    "Seen",
    "View",
    "chunked",
    "described",
    "limits_in",
    "policy_for",
    "policy_named",
    "policy_of",
    "settings_of",
]
