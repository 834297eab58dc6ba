"""sjf and srpt: the shortest first, by what is known or believed of its length."""

from __future__ import annotations

from collections.abc import Sequence

from stepscope.engine.policies.lengths import (
    ORACLES,
    SEED,
    SIGMA,
    believed_length,
    predicted_output,
)
from stepscope.engine.policies.preempt import age, worse_than_best
from stepscope.engine.policies.view import Knob, Seen, View

SJF_KNOBS = {
    "by": Knob("prompt", ORACLES, choices=("prompt", "oracle", "predicted")),
    "sigma": SIGMA,
    "seed": SEED,
}
SRPT_KNOBS = {
    "by": Knob("oracle", ORACLES, choices=("oracle", "predicted")),
    "sigma": SIGMA,
    "seed": SEED,
}


def shortest_job(view: View) -> list[Seen]:
    return sorted(view.waiting, key=lambda r: (believed_length(view, r), *age(r)))


def remaining(view: View, request: Seen) -> float:
    """Tokens to compute now and tokens still to come. One that outlives its prediction: 1 more."""
    return request.todo + max(predicted_output(view, request) - request.output_tokens, 1)


def shortest_remaining(view: View) -> list[Seen]:
    return sorted(view.waiting, key=lambda r: (remaining(view, r), *age(r)))


def longer_than_best(view: View) -> list[Seen]:
    return worse_than_best(view, lambda r: remaining(view, r))


def longest_remaining(view: View, running: Sequence[Seen]) -> Seen:
    return max(running, key=lambda r: (remaining(view, r), *age(r)))
