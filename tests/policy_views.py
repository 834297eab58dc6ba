"""What the tests of policies share: a view made by hand, and orders read from a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from stepscope.engine.plan import Slice
from stepscope.engine.policies import View, policy_of
from stepscope.engine.request import Request
from stepscope.engine.scheduler import Limits
from tests.engine.harness import Outcome, alone, ask, run

ONE = Limits(max_seqs=1)


def view_of(policy: str, **changes: object) -> View:
    """A view under this policy; everything fits unless changes say otherwise."""
    values: dict[str, object] = {
        "waiting": [],
        "running": [],
        "free_pages": 100,
        "total_pages": 100,
        "page_size": 4,
        "growth": 0,
        "token_budget": 8,
        "chunk": 8,
        "max_seqs": 8,
        "policy": policy_of(policy),
    }
    return View(**{**values, **changes})  # type: ignore[arg-type]


def grants(policy: str, **changes: object) -> list[tuple[int, int]]:
    view = view_of(policy, **changes)
    view = replace(view, memory=view.policy.remember(None, view))
    return [(g.request.id, g.tokens) for g in view.policy.assign(view)]


def order_of(policy: str, waiting: Sequence[Request]) -> list[int]:
    view = view_of(policy, waiting=waiting)
    return [r.id for r in view.policy.order(view)]


def sent(request: Request, client: str = "", priority: int = 0) -> Request:
    """The request, from this client and of this class."""
    request.record.client, request.record.priority = client, priority
    return request


def spoken(id: int, count: int, arrival_ns: int = 0) -> Request:
    """A request that has said so many tokens and was put back."""
    request = ask(id, 4, 30, arrival_ns=arrival_ns)
    request.tokens += alone(request.tokens, count)
    return request


def folded(policy: str, *views: dict[str, Any]) -> Any:
    """What the policy remembers after these views."""
    memory = None
    for changes in views:
        view = view_of(policy, memory=memory, **changes)
        memory = view.policy.remember(memory, view)
    return memory


def ran(request: Request, count: int = 1, samples: bool = True, recomputed: int = 0) -> Slice:
    return Slice(request, 0, count, "prefill", samples, recomputed)


def admitted(done: Outcome) -> list[int]:
    """Requests in the order of their first slice."""
    return list(dict.fromkeys(i for pieces in done.scheduler.slices for i, *_ in pieces))


def orders(
    make: Callable[[], list[Request]], policy: str, limits: Limits = ONE
) -> tuple[list[int], list[int]]:
    """(first come first served, this policy): orders of admission. The text must not differ."""
    plain, other = (run(make(), policy_of(name), limits=limits) for name in ("chunked", policy))
    assert plain.outputs == other.outputs
    return admitted(plain), admitted(other)
