"""How long a request will be, as a policy may believe: from its prompt, an oracle, a prediction.

The oracle is max_tokens, which the client sends: it is the true length only where EOS is ignored.
"""

from __future__ import annotations

import math
from functools import lru_cache
from random import Random

from stepscope.engine.policies.view import Knob, Seen, View

ORACLES = "oracle = max_tokens, true only with ignore_eos; predicted = oracle x lognormal noise"
SIGMA = Knob(0.5, "spread of the predictions' lognormal noise (by=predicted)", most=10)
SEED = Knob(0, "seed of that noise, drawn once per request")


@lru_cache(maxsize=65_536)
def noise(seed: int, request: int) -> float:
    """One draw from N(0, 1) per seed and request id."""
    return Random(f"{seed}/{request}").gauss(0, 1)


def predicted_output(view: View, request: Seen) -> float:
    """Tokens it is believed to say: the oracle, with noise unless `by` is oracle."""
    if view.policy.value("by") == "oracle":
        return request.max_tokens
    factor = math.exp(view.number("sigma") * noise(int(view.number("seed")), request.id))
    return request.max_tokens * factor


def believed_length(view: View, request: Seen) -> float:
    """The size that sjf sorts by and hrrn divides by."""
    if view.policy.value("by") == "prompt":
        return request.prompt_tokens
    return predicted_output(view, request)
