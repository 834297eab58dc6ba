"""The three questions every run answers, in one sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from stepscope.analyze.budget import TERMS, Budget
from stepscope.analyze.frame import Frame, prefill_tokens
from stepscope.analyze.model import Answer, Stall
from stepscope.analyze.rules import RULES
from stepscope.analyze.verdict import missing_inputs
from stepscope.text import listing, ms, percent, plural, size

QUESTIONS = (
    "Are these steps bandwidth-bound or launch-bound?",
    "Is the batch read-bound on weights or on cache?",
    "Is the scheduler admitting prefills at moments that wreck the step time?",
)


@dataclass(frozen=True, slots=True)
class Material:
    """What the answers are made of. budget is of decode-only steps: others are never pooled."""

    frame: Frame
    budget: Budget
    stalls: list[Stall]


def three_answers(given: Material) -> tuple[Answer, Answer, Answer]:
    return _bound(given), _weights_or_cache(given), _prefills(given)


def _bound(given: Material) -> Answer:
    question, budget = QUESTIONS[0], given.budget
    if not budget.total:
        return Answer(
            question,
            "cannot tell",
            "Cannot tell: there is no decode-only step after warm-up, and mixed steps are not "
            "pooled with them.",
        )
    terms = budget.ranking()
    name, share = terms[0]
    where = (
        f"of the time of {plural(budget.steps, 'decode-only step')} ({ms(budget.mean_ns)} ms each)"
    )
    if name == "undetermined":
        why = listing(missing_inputs(given.frame)) or "phases or work columns were not recorded"
        return Answer(
            question,
            "cannot tell",
            f"Cannot tell: {percent(share)} {where} cannot be split, because {why}{_known(terms)}.",
        )
    rest = _two_sides(name, terms)
    if name in ("bandwidth_bound", "launch_bound"):
        title = RULES[name].title
        sentence = f"{title[0].upper()}{title[1:]}: {TERMS[name]} explains {percent(share)} {where}"
        return Answer(question, title, f"{sentence}; {rest}.")
    sentence = f"Neither first: {percent(share)} {where} is {TERMS[name]}; {rest}."
    return Answer(question, f"neither: {RULES[name].title}", sentence)


def _known(terms: list[tuple[str, float]]) -> str:
    """The floor is known even where no twin was measured."""
    floor = dict(terms).get("bandwidth_bound")
    return f"; {TERMS['bandwidth_bound']} takes {percent(floor)}" if floor else ""


def _two_sides(name: str, terms: list[tuple[str, float]]) -> str:
    """The shares the question asks for, and the next largest term if it is another one."""
    shares = dict(terms)
    asked = [n for n in ("bandwidth_bound", "launch_bound") if n != name]
    others = [n for n, _ in terms if n not in (name, *asked)][:1]
    parts = [f"{TERMS[n]} {percent(shares.get(n, 0.0))}" for n in asked + others]
    return listing(parts)


def _weights_or_cache(given: Material) -> Answer:
    question, frame = QUESTIONS[1], given.frame
    costs = [frame.costs[i] for i in frame.decode_only if frame.costs[i].weight_bytes]
    if not costs:
        return Answer(
            question,
            "cannot tell",
            "Cannot tell: no decode-only step after warm-up recorded what it computed.",
        )
    weights = sum(c.weight_bytes for c in costs) / len(costs)
    kv = sum(c.kv_bytes for c in costs) / len(costs)
    total = weights + kv
    crossing = round(weights / frame.spec.kv_bytes_per_token) if kv <= weights else 0
    short, part = ("KV cache", kv) if kv > weights else ("weights", weights)
    head = "KV cache" if kv > weights else "Weights"
    after = f" KV would outweigh them above {crossing:,} cached tokens." if crossing else ""
    return Answer(
        question,
        short,
        f"{head}: {size(part)} of {size(total)} read per step ({percent(part / total)}).{after}",
    )


def _prefills(given: Material) -> Answer:
    question, frame = QUESTIONS[2], given.frame
    beside = [s for s in given.stalls if s.cause in ("prefill", "recompute")]
    harmful = [s for s in beside if s.harmful]
    if not harmful:
        return _no_harm(question, given, beside)
    groups = _by_culprit(harmful)
    total = sum(s.excess_ns for s in harmful)
    part = total / frame.working_ns if frame.working_ns else 0.0
    share = percent(part)
    cost = f", {share} of the time."
    if len(groups) > 1:
        cost = f"; {len(groups):,} such prefills in {plural(len(harmful), 'step')} cost "
        cost += f"{ms(total)} ms, {share} of the time."
    short = f"{plural(len(groups), 'prefill')}, {ms(total)} ms"
    far = frame.limits.itl_gap_factor - 1
    wrecks = part >= frame.limits.tail_share or any(
        s.excess_ns > far * s.baseline_ns for s in harmful
    )
    head = "Yes" if wrecks else "A little"
    return Answer(question, short, f"{head}: {_held_up(groups[0])}{cost}")


def _by_culprit(harmful: list[Stall]) -> list[list[Stall]]:
    """The chunks of one prompt together; the costliest group first, its steps in order."""
    groups: dict[tuple[str, tuple[int, ...]], list[Stall]] = {}
    for stall in sorted(harmful, key=lambda s: s.step):
        groups.setdefault((stall.cause, stall.culprits), []).append(stall)
    return sorted(groups.values(), key=lambda g: -sum(s.excess_ns for s in g))


def _held_up(group: list[Stall]) -> str:
    """'request 5's 1,400-token prefill held up 7 requests for 812 ms (step 61)'."""
    victims = {v for s in group for v in s.victims}
    held = plural(len(victims), "request") if victims else "running requests"
    steps = ("step " if len(group) == 1 else "steps ") + listing([str(s.step) for s in group])
    return f"{_whose(group)} held up {held} for {ms(sum(s.excess_ns for s in group))} ms ({steps})"


def _whose(group: list[Stall]) -> str:
    kind = "prefill" if group[0].cause == "prefill" else "recomputation"
    tokens = f"{sum(s.prefill_tokens for s in group):,}-token {kind}"
    culprits = group[0].culprits
    if not culprits:
        return f"a {tokens}"
    if len(culprits) == 1:
        return f"request {culprits[0]}'s {tokens}"
    return f"the {tokens} of requests {listing([str(c) for c in culprits])}"


def _no_harm(question: str, given: Material, beside: list[Stall]) -> Answer:
    frame = given.frame
    if beside:
        worst = max(s.excess_ns for s in beside)
        ran = f"{plural(len(beside), 'step')} prefilled while others decoded"
        sentence = f"No: {ran}; the worst cost {ms(worst)} ms over the decode-only median."
        return Answer(question, f"no, at most {ms(worst)} ms", sentence)
    if not frame.decode_only:
        return Answer(
            question,
            "cannot tell",
            "Cannot tell: there is no decode-only step after warm-up to compare with.",
        )
    alone = sum(prefill_tokens(frame.rows[i]) > 0 for i in frame.working)
    ran = f" ({plural(alone, 'step')} prefilled while nothing decoded)" if alone else ""
    return Answer(question, "no", f"No: no prefill ran while others decoded{ran}.")
