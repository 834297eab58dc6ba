"""deadline-chunk: prefill as much as the tightest decode can bear (after QoServe, ASPLOS'26).

The time of a step is taken as base + per_token x tokens. Both numbers are settings, or fitted by
least squares to the steps of this run; until that is possible the chunk is the engine's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from stepscope.engine.policies.edf import KNOBS as SLOS
from stepscope.engine.policies.edf import MS, deadline_ns
from stepscope.engine.policies.preempt import age
from stepscope.engine.policies.view import Grant, Knob, Seen, View

KNOBS = {
    **SLOS,
    "base_ms": Knob(0.0, "time of a step apart from its tokens (with per_token_ms above 0)"),
    "per_token_ms": Knob(0.0, "time of one token in a step; 0 fits both to this run"),
    "margin": Knob(1.2, "a predicted step time is taken this many times", least=1),
    "alpha_ms": Knob(0.5, "delay in the prefill order per token of prompt still to compute"),
    "least": Knob(
        16, "prefill tokens a step always takes, or late decodes starve prompts", least=1
    ),
}


class Fit(NamedTuple):
    """Sums over finished steps: x = tokens, y = ns."""

    now_ns: int
    n: int = 0
    x: float = 0
    y: float = 0
    xx: float = 0
    xy: float = 0

    def line(self) -> tuple[float, float] | None:
        """(base, per token) in ns; None while it cannot be told or makes no sense."""
        spread = self.n * self.xx - self.x * self.x
        if self.n < 2 or spread <= 0:
            return None
        slope = (self.n * self.xy - self.x * self.y) / spread
        base = (self.y - slope * self.x) / self.n
        return (max(base, 0.0), slope) if slope > 0 else None


def fit_steps(memory: Fit | None, view: View) -> Fit:
    """A step lasts from its view to the next one."""
    if memory is None or not view.last:
        return (memory or Fit(0))._replace(now_ns=view.now_ns)
    x, y = sum(ran.count for ran in view.last), view.now_ns - memory.now_ns
    return Fit(
        view.now_ns,
        memory.n + 1,
        memory.x + x,
        memory.y + y,
        memory.xx + x * x,
        memory.xy + x * y,
    )


def deadline_chunk(view: View) -> list[Grant]:
    """Decodes by slack, all of them; then prefills in what the smallest slack leaves."""
    decodes = [r for r in view.running if r.decoding]
    decodes.sort(key=lambda r: (deadline_ns(view, r), *age(r)))
    grants = [Grant(r, 1) for r in decodes]
    budget = min(view.token_budget - len(decodes), affordable(view, decodes))
    prefills = [r for r in view.running if not r.decoding]
    for request in [*by_urgency(view, prefills), *view.admissible()]:
        tokens = min(request.todo, view.chunk, budget)
        if tokens < 1:
            break
        grants.append(Grant(request, tokens))
        budget -= tokens
    return grants


def affordable(view: View, decodes: Sequence[Seen]) -> int:
    """The largest c with margin x time(decodes + c) within the smallest slack of a decode."""
    if not decodes:
        return view.token_budget
    line = _line(view)
    if line is None:
        return view.chunk
    base, per_token = line
    slack = deadline_ns(view, decodes[0]) - view.now_ns
    tokens = (slack / view.number("margin") - base) / per_token - len(decodes)
    return math.floor(min(max(tokens, view.number("least")), view.token_budget))


def _line(view: View) -> tuple[float, float] | None:
    per_token = view.number("per_token_ms")
    if per_token > 0:
        return view.number("base_ms") * MS, per_token * MS
    fit: Fit = view.memory
    return fit.line()


def by_urgency(view: View, requests: Sequence[Seen]) -> list[Seen]:
    """Ascending arrival + deadline + alpha x prompt still to compute."""
    alpha = view.number("alpha_ms") * MS
    return sorted(requests, key=lambda r: (deadline_ns(view, r) + alpha * r.todo, *age(r)))


def most_urgent(view: View) -> list[Seen]:
    return by_urgency(view, view.waiting)
