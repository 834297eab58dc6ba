"""Admission rules: how many pages a request takes, and how many must stay free beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepscope.engine.policies.view import Admission, Seen, View


def whole_prompt(view: View, request: Seen) -> int:
    """All its tokens, however many are computed in this step; half a prompt helps nobody."""
    return view.pages_for(request.length)


def full_length(view: View, request: Seen) -> int:
    """Its pages at max_tokens, so that nothing admitted is ever preempted."""
    return min(view.pages_for(request.most_tokens), view.total_pages)


def no_spare(view: View, admitted: Sequence[Seen]) -> int:
    return 0


def share_of_pool(view: View, admitted: Sequence[Seen]) -> int:
    """1 % of the pool, so that decodes can grow; nothing when nobody runs."""
    # The small term keeps 0.29 x 100 pages from becoming 28.
    share = int(view.total_pages * view.number("watermark") + 1e-9)
    return share if view.running else 0


def expected_growth(view: View, admitted: Sequence[Seen]) -> int:
    """`ratio` of the pages that all outputs would take at max_tokens (SGLang: new token ratio)."""
    most = sum(
        view.pages_for(r.most_tokens) - view.pages_for(r.length) for r in [*view.running, *admitted]
    )
    return max(math.ceil(most * view.number("ratio")) - view.growth, 0)


def peak_growth(view: View, admitted: Sequence[Seen]) -> int:
    """Pages beyond today's at the fullest moment to come."""
    now = sum(len(r.pages) for r in view.running) + view.growth
    now += sum(whole_prompt(view, r) for r in admitted)
    return max(peak_pages(view, [*view.running, *admitted]) - now, 0)


def peak_pages(view: View, requests: Sequence[Seen]) -> int:
    """Most pages these ever hold together, if all end at max_tokens and each decodes every step.

    A prompt of several chunks starts to grow later. Between two ends the sum only rises, so it is
    highest at an end (LightLLM's past-future scheduler, there in tokens and without chunks).
    """
    lives = []
    for r in requests:
        length = r.length
        begin = -(-r.todo // view.chunk) - 1
        lives.append((length, begin, begin + max(r.most_tokens - length, 0)))
    return max(
        sum(
            view.pages_for(length + max(moment - begin, 0))
            for length, begin, end in lives
            if end >= moment
        )
        for _, _, moment in lives
    )


RESERVE_MAX = Admission(
    "reserve-max", "every request takes its pages at max_tokens", full_length, no_spare
)
WATERMARK = Admission("watermark", "a share of the pool stays free", whole_prompt, share_of_pool)
OPTIMISTIC = Admission(
    "optimistic", "room for a ratio of all outputs stays free", whole_prompt, expected_growth
)
PEAK = Admission(
    "peak",
    "the fullest moment to come fits, outputs taken at max_tokens",
    whole_prompt,
    peak_growth,
)
ADMISSIONS = {rule.name: rule for rule in (RESERVE_MAX, WATERMARK, OPTIMISTIC, PEAK)}
