"""Who is put back: the victim when pages run out, and whom a preemptive policy lets go."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from stepscope.engine.policies.view import Seen, Victim, View


def youngest(view: View, running: Sequence[Seen]) -> Seen:
    """The latest arrival. The oldest request is never chosen while another runs: progress."""
    return max(running, key=age)


def lowest_priority(view: View, running: Sequence[Seen]) -> Seen:
    """The largest priority number, of equals the latest arrival."""
    return max(running, key=lambda r: (r.priority, *age(r)))


def fewest_output(view: View, running: Sequence[Seen]) -> Seen:
    """The one that has said least so far, of equals the latest arrival."""
    return max(running, key=lambda r: (-r.output_tokens, *age(r)))


VICTIMS: dict[str, Victim] = {
    "youngest": youngest,
    "lowest-priority": lowest_priority,
    "fewest-output": fewest_output,
}


def age(request: Seen) -> tuple[int, int]:
    return request.arrival_ns, request.id


def worse_than_best(view: View, rank: Callable[[Seen], float]) -> list[Seen]:
    """The worst of the running, if each ranks behind the best waiting one and that then gets in.

    One waiting request a step: its prompt takes the budget anyway. Only strictly worse ones go. A
    rank must not change while a request waits nor get worse while it runs, or do so only for
    tokens gained: else two requests could put each other back in turns for ever.
    """
    best = next(iter(view.policy.order(view)), None)
    if best is None or gets_in(view, best):
        return []
    worse = [r for r in view.running if rank(r) > rank(best)]
    worse.sort(key=lambda r: (rank(r), *age(r)), reverse=True)
    for count in range(1, len(worse) + 1):
        if gets_in(view.without(worse[:count]), best):
            return worse[:count]
    return []


def gets_in(view: View, request: Seen) -> bool:
    """There is a slot, there are pages, and what runs leaves it a token of the budget."""
    taken = sum(min(r.todo, view.chunk) for r in view.running)
    return taken < view.token_budget and next(view.admissible(), None) is request
