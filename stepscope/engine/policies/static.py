"""static: admit a batch, run it until the last of it has finished, then admit the next."""

from __future__ import annotations

from stepscope.engine.policies.view import Grant, View


def static(view: View) -> list[Grant]:
    """Whole prompts in the admitting step, then one token each. Slots of finished ones idle."""
    if view.running:
        return [Grant(r, r.todo) for r in view.running]
    return [Grant(r, r.todo) for r in view.admissible()]
