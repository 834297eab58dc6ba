"""Dimensions of which a decoder can be made, whoever says them: a file, a flag or a scenario."""

from __future__ import annotations

from stepscope.errors import StepscopeError, UsageError
from stepscope.spec import ModelSpec, RopeScaling

DIMENSIONS = (
    *("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_context"),
)
MOST_LAYERS = 10_000
MOST_EXPERTS = 100_000  # of all layers together


def check_shape(spec: ModelSpec) -> None:
    """UsageError for dimensions of which no decoder can be made."""
    for key in DIMENSIONS:
        value = getattr(spec, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(
                f"{key} of {spec.name} is {value} where a whole number above 0 belongs; correct it."
            )
    if spec.layers > MOST_LAYERS:  # a plan of them all would fill the memory before any check of it
        raise UsageError(
            f"layers of {spec.name} is {spec.layers:,}, and at most {MOST_LAYERS:,} are supported;"
            " correct it."
        )
    if spec.experts < 0 or not bool(spec.experts) <= spec.experts_per_token <= spec.experts:
        raise UsageError(
            f"{spec.name} gives each token {spec.experts_per_token} of {spec.experts} experts;"
            " choose 1 or more, and no more than there are."
        )
    if spec.layers * max(spec.experts, 1) > MOST_EXPERTS:
        raise UsageError(
            f"{spec.name} has {spec.layers:,} layers of {spec.experts:,} experts, and at most"
            f" {MOST_EXPERTS:,} experts in all are supported; correct it."
        )
    if spec.heads % spec.kv_heads:
        raise UsageError(
            f"{spec.name} has {spec.heads} heads on {spec.kv_heads} kv_heads; make heads a multiple"
            " of kv_heads."
        )
    _check_rope(spec)
    if spec.head_dim % 2:
        raise UsageError(
            f"{spec.name} has a head_dim of {spec.head_dim}, and RoPE turns pairs; make it even."
        )


def _check_rope(spec: ModelSpec) -> None:
    """Written so that NaN fails, too."""
    rope = spec.rope or RopeScaling("none")
    bases = [t for t in (spec.rope_theta, spec.local_rope_theta) if t is not None]
    betas, divisors = (rope.beta_fast, rope.beta_slow), rope.divisors
    if not (all(t > 1 for t in bases) and rope.factor >= 1 and min(*betas, *divisors) > 0):
        raise StepscopeError(
            f"{spec.name} has a RoPE base of {bases[-1]:g} and scales it by {rope.factor:g}, which"
            " makes no frequencies; download or convert it again."
        )
