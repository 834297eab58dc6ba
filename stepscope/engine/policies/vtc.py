"""vtc: virtual token counter (Sheng et al., OSDI'24): fair shares of tokens between clients.

Each client has a counter of what it got: w_in per prompt token when a request of it is admitted,
w_out per token it said. The client with the least is admitted next. A client that comes back to
the queue is lifted to the least counter there, so that nobody saves up service while away.
Between two clients that both have requests waiting all the time, the service differs by at most
2 x max(w_in x longest prompt, w_out x most tokens the cache holds) (theorem 4.4 there).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from stepscope.engine.policies.view import Knob, Seen, View

KNOBS = {
    "w_in": Knob(1.0, "charge per prompt token"),
    "w_out": Knob(2.0, "charge per output token"),
}


class Counters(NamedTuple):
    served: dict[str, float]  # by client
    live: frozenset[int]  # requests queued or running
    charged: frozenset[int]  # of them, those whose prompt has been charged
    left: str  # the client whose request left the queue last


def keep_counters(memory: Counters | None, view: View) -> Counters:
    """Charge what the last step did, lift the clients that came back."""
    before = memory or Counters({}, frozenset(), frozenset(), "")
    served, charged, left = dict(before.served), set(before.charged), before.left
    for ran in view.last:
        client = ran.request.client
        if ran.request.id not in charged:  # a recomputed prompt is not charged again
            charged.add(ran.request.id)
            served[client] += view.number("w_in") * ran.request.prompt_tokens
            left = client
        if ran.samples:
            served[client] += view.number("w_out")
    queued = {r.client for r in view.waiting if r.id in before.live}
    for request in view.waiting:
        if request.id not in before.live and request.client not in queued:
            floor = min((served[c] for c in queued), default=served.get(left, 0.0))
            served[request.client] = max(served.get(request.client, 0.0), floor)
            queued.add(request.client)
    live = frozenset(r.id for r in [*view.waiting, *view.running])
    return Counters(served, live, live & charged, left)


def least_served(view: View) -> Iterator[Seen]:
    """The earliest request of the client with the least, counting what this step lets in."""
    counters: Counters = view.memory
    queues: dict[str, deque[Seen]] = {}
    for request in view.waiting:
        queues.setdefault(request.client, deque()).append(request)
    # Of equal counters, the client whose request stands first in the queue.
    heap = [(counters.served[c], place, c) for place, c in enumerate(queues)]
    heapq.heapify(heap)
    while heap:
        served, place, client = heapq.heappop(heap)
        request = queues[client].popleft()
        yield request
        if queues[client]:
            new = request.id not in counters.charged
            charge = view.number("w_in") * request.prompt_tokens * new
            heapq.heappush(heap, (served + charge, place, client))
