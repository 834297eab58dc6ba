"""orca: iteration-level scheduling as in Orca (OSDI'22)."""

from __future__ import annotations

from stepscope.engine.policies.view import Grant, View


def orca(view: View) -> list[Grant]:
    """Every running request one token and every prompt that gets in whole, in one mixed step.

    Slots and reserved pages bound the batch; the token budget does not, as in the paper.
    """
    return [Grant(r, r.todo) for r in [*view.running, *view.admissible()]]
