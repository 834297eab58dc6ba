"""prefill-first: a waiting prompt that fits takes the whole step; running decodes stall."""

from __future__ import annotations

from stepscope.engine.policies.view import Grant, View


def prefill_first(view: View) -> list[Grant]:
    """Whole prompts up to the token budget; a longer prompt goes alone, never in pieces."""
    prefills: list[Grant] = []
    budget = view.token_budget
    for request in view.admissible():
        if prefills and request.todo > budget:
            break
        prefills.append(Grant(request, request.todo))
        budget -= request.todo
    if all(g.request.decoding for g in prefills):  # none, or swapped in: they decode with the rest
        prefills += [Grant(r, r.todo) for r in view.running]
    return prefills
