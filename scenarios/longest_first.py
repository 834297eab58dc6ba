"""An example of a policy of one's own: `--policy scenarios/longest_first.py:longest_first`.

It differs from `chunked` in one plug-point, the order of the queue. What a policy may see and what
it may choose is in stepscope/engine/policies/view.py.
"""

from __future__ import annotations

from stepscope.engine.policies import POLICIES, Policy, Seen, View

chunked = POLICIES["chunked"]


def longest_prompt(view: View) -> list[Seen]:
    return sorted(view.waiting, key=lambda request: -request.prompt_tokens)


longest_first = Policy(
    name="longest-first",
    about="The longest prompt first.",
    assign=chunked.assign,
    admission=chunked.admission,
    victim=chunked.victim,
    order=longest_prompt,
)
