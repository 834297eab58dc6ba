"""Scheduling policies: pure functions over a view of the queue.

A policy is four choices: the order of the waiting queue, admission, tokens per request in this
step, and the victim when pages run out. It may delay a token but never change it.
"""

from __future__ import annotations

from stepscope.engine.policies.chunked import chunked
from stepscope.engine.policies.prefill_first import prefill_first
from stepscope.engine.policies.static import static
from stepscope.engine.policies.view import (
    Grant,
    Policy,
    Seen,
    View,
    fcfs,
    nothing,
    reserve_max,
    watermark,
    whole_prompt,
    youngest,
)
from stepscope.errors import UsageError
from stepscope.text import listing

POLICIES = {
    policy.name: policy
    for policy in (
        Policy("static", static, fcfs, reserve_max, nothing, youngest),
        Policy("prefill-first", prefill_first, fcfs, whole_prompt, watermark, youngest),
        Policy("chunked", chunked, fcfs, whole_prompt, watermark, youngest),
    )
}


def policy_named(name: str) -> Policy:
    """Raises UsageError for a name that is not in POLICIES."""
    try:
        return POLICIES[name]
    except KeyError:
        raise UsageError(
            f"there is no policy '{name}'; choose one of {listing(sorted(POLICIES), most=20)}"
        ) from None


__all__ = ["POLICIES", "Grant", "Policy", "Seen", "View", "policy_named"]
