"""edf: earliest deadline first; deadlines follow from the SLOs."""

from __future__ import annotations

from stepscope.engine.policies.preempt import age
from stepscope.engine.policies.view import Knob, Seen, View

MS = 1e6
KNOBS = {
    "ttft_ms": Knob(1000.0, "time to the first token; from [slo] unless given"),
    "itl_ms": Knob(100.0, "time from token to token; from [slo] unless given"),
}


def deadline_ns(view: View, request: Seen) -> float:
    """When its next token is due: arrival + TTFT + i x ITL for output token i."""
    allowed = view.number("ttft_ms") + request.output_tokens * view.number("itl_ms")
    return request.arrival_ns + allowed * MS


def earliest_deadline(view: View) -> list[Seen]:
    return sorted(view.waiting, key=lambda r: (deadline_ns(view, r), *age(r)))
