"""chunked: decodes first and never clipped; prefills get what is left of the budget, in chunks."""

from __future__ import annotations

from stepscope.engine.policies.view import Grant, View


def chunked(view: View) -> list[Grant]:
    """Stall-free batching as in Sarathi-Serve: decodes, running prefills, then new ones."""
    grants = [Grant(r, 1) for r in view.running if r.decoding]
    budget = view.token_budget - len(grants)
    for request in [r for r in view.running if not r.decoding]:
        tokens = min(request.todo, view.chunk, budget)
        if tokens > 0:
            grants.append(Grant(request, tokens))
            budget -= tokens
    for request in view.admissible():
        tokens = min(request.todo, view.chunk, budget)
        if tokens < 1:
            break
        grants.append(Grant(request, tokens))
        budget -= tokens
    return grants
