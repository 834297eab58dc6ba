"""hrrn: highest response ratio next: short requests first, but whoever waits comes up."""

from __future__ import annotations

from typing import NamedTuple

from stepscope.engine.policies.lengths import believed_length
from stepscope.engine.policies.preempt import age
from stepscope.engine.policies.view import Seen, View


class Served(NamedTuple):
    """Tokens the engine has computed in all, and how many when each live request arrived."""

    tokens: int
    at_arrival: dict[int, int]


def count_tokens(memory: Served | None, view: View) -> Served:
    before = memory or Served(0, {})
    tokens = before.tokens + sum(ran.count for ran in view.last)
    live = [*view.waiting, *view.running]
    return Served(tokens, {r.id: before.at_arrival.get(r.id, tokens) for r in live})


def highest_ratio(view: View) -> list[Seen]:
    """Descending 1 + wait / service. The wait is in tokens that others got meanwhile."""
    served: Served = view.memory

    def ratio(request: Seen) -> float:
        wait = served.tokens - served.at_arrival[request.id]
        return 1 + wait / believed_length(view, request)

    return sorted(view.waiting, key=lambda r: (-ratio(r), *age(r)))
