"""priority: the smaller number first; of equals the earlier arrival."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.engine.policies.preempt import age, worse_than_best
from stepscope.engine.policies.view import Knob, Seen, View

KNOBS = {"preempt": Knob("no", "put back running requests of a worse class", choices=("no", "yes"))}


def by_priority(view: View) -> list[Seen]:
    return sorted(view.waiting, key=lambda r: (r.priority, *age(r)))


def worse_class(view: View) -> Sequence[Seen]:
    """Nobody is put back for an equal that merely arrived earlier."""
    if view.policy.value("preempt") == "no":
        return ()
    return worse_than_best(view, lambda r: r.priority)
