"""decode-first: every decode runs; prompts get in whole while the budget lasts."""

from __future__ import annotations

from stepscope.engine.policies.chunked import chunked
from stepscope.engine.policies.view import Grant, Knob, View

KNOBS = {
    "prompts": Knob("whole", "whole, or in chunks of what is left", choices=("whole", "chunks"))
}


def decode_first(view: View) -> list[Grant]:
    """Decodes, then whole prompts in what is left of the budget.

    A prompt that is longer than the whole budget goes in chunks, or it would never run.
    """
    if view.policy.value("prompts") == "chunks":
        return chunked(view)
    grants = [Grant(r, 1) for r in view.running if r.decoding]
    budget = view.token_budget - len(grants)
    for request in [r for r in view.running if not r.decoding]:
        tokens = min(request.todo, budget)
        if tokens > 0:
            grants.append(Grant(request, tokens))
            budget -= tokens
    for request in view.admissible():
        oversize = request.todo > view.token_budget
        if budget < 1 or (request.todo > budget and not oversize):
            break
        tokens = min(request.todo, budget)
        grants.append(Grant(request, tokens))
        budget -= tokens
    return grants
