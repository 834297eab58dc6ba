"""mlfq: skip-join multi-level feedback queue (FastServe), without knowing any length.

A level k has a quantum of quantum x 2^k tokens. A request joins at the first level whose quantum
covers its prompt, falls one level when it has used it up, and rises to the top when it has not been
served for idle_s. Tokens computed again after a preemption are not charged: they are the engine's
doing, and charging them could eat a quantum without one new token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from stepscope.engine.policies.preempt import age, worse_than_best
from stepscope.engine.policies.view import Knob, Ran, Seen, View

KNOBS = {
    "quantum": Knob(64, "tokens of the top level; each level below has twice as many", least=1),
    "idle_s": Knob(3.0, "seconds without service after which a request rises to the top"),
}


class Place(NamedTuple):
    level: int
    used: int  # tokens of this level's quantum
    served_ns: int  # when it last got tokens, or arrived


def keep_places(memory: dict[int, Place] | None, view: View) -> dict[int, Place]:
    """Where every live request stands after the last step."""
    before, quantum = memory or {}, int(view.number("quantum"))
    idle_ns = view.number("idle_s") * 1e9
    ran = {piece.request.id: piece for piece in view.last}
    places = {}
    for request in [*view.waiting, *view.running]:
        place = before.get(request.id) or Place(_join(request, quantum), 0, view.now_ns)
        piece = ran.get(request.id)
        if piece is not None:
            place = _charge(place, piece, quantum, view.now_ns)
        elif view.now_ns - place.served_ns >= idle_ns:
            place = Place(0, 0, view.now_ns)
        places[request.id] = place
    return places


def _join(request: Seen, quantum: int) -> int:
    """The smallest k with quantum x 2^k >= prompt."""
    return (-(-request.prompt_tokens // quantum) - 1).bit_length()


def _charge(place: Place, piece: Ran, quantum: int, now_ns: int) -> Place:
    level, used = place.level, place.used + piece.count - piece.recomputed
    while used >= quantum << level:
        used -= quantum << level
        level += 1
    return Place(level, used, now_ns)


def by_level(view: View) -> list[Seen]:
    places: dict[int, Place] = view.memory
    return sorted(view.waiting, key=lambda r: (places[r.id].level, *age(r)))


def lower_level(view: View) -> list[Seen]:
    places: dict[int, Place] = view.memory
    return worse_than_best(view, lambda r: places[r.id].level)


def lowest_level(view: View, running: Sequence[Seen]) -> Seen:
    places: dict[int, Place] = view.memory
    return max(running, key=lambda r: (places[r.id].level, *age(r)))
