"""lpm and dfs-weight: requests that share a prefix run one after the other (SGLang)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from stepscope.engine.policies.preempt import age
from stepscope.engine.policies.view import Knob, Seen, View

LPM_KNOBS = {
    "share": Knob(32, "tokens shared with an earlier prompt from which on a request waits", least=1)
}


def longest_prefix(view: View) -> list[Seen]:
    """Longest cached prefix first, without those that wait for another's prefix."""
    return sorted(ready(view), key=lambda r: (-r.cached_prefix, *age(r)))


def ready(view: View) -> Iterator[Seen]:
    """Waiting requests, except those whose prefix an earlier one is about to compute.

    Equal in `share` tokens = equal in that many first ones, so that one look-up finds the earlier
    one. It is waited for until it has computed all that both have in common.
    """
    share = int(view.number("share"))
    leaders = {tuple(r.tokens[:share]): r for r in view.running if r.computed < r.prompt_tokens}
    for request in view.waiting:
        head = tuple(request.tokens[:share])
        leader = leaders.setdefault(head, request)
        if (
            leader is request
            or len(head) < share
            or request.cached_prefix >= share
            or common(leader.tokens, request.tokens, share) <= leader.computed
        ):
            yield request


def common(one: Sequence[int], other: Sequence[int], known: int = 0) -> int:
    """Length of the common prefix, at least `known`. Compares slices, which is fast."""
    low, high = known, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def split(requests: Sequence[Seen], at: int) -> list[list[Seen]]:
    """Neighbours that have the same token there."""
    return [list(group) for _, group in groupby(requests, key=lambda r: r.tokens[at])]


def depth_first(view: View) -> list[Seen]:
    """Walk the tree of waiting prompts; the child with most requests below it first.

    Of equal children the one with the earliest arrival. A request that ends at a node comes before
    its children. The stack is explicit: prompts that extend each other make a deep tree.
    """
    found: list[Seen] = []
    stack = [(0, sorted(view.waiting, key=lambda r: list(r.tokens)))]
    while stack:
        depth, group = stack.pop()
        if len(group) < 2:
            found += group
            continue
        # In lexicographic order, what first and last share is shared by all.
        depth = common(group[0].tokens, group[-1].tokens, depth)
        found += sorted((r for r in group if len(r.tokens) == depth), key=age)
        longer = [r for r in group if len(r.tokens) > depth]
        children = split(longer, depth)
        children.sort(key=lambda g: (-len(g), min(map(age, g))), reverse=True)
        stack += [(depth, child) for child in children]
    return found
