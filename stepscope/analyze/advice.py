"""Advice that depends on the run, where the one of the rule would miss it."""

from __future__ import annotations

from stepscope.analyze.frame import Frame

KV_ADVICE = (
    "Read less cache per token: a smaller KV dtype (vLLM and SGLang: --kv-cache-dtype), shorter "
    "contexts, or fewer requests per step; a larger batch does not amortise KV."
)

CHUNK_FALSIFY = (
    "Run the same workload with half the chunk: the longest gaps must shrink while the time to "
    "first token grows."
)


def is_chunked(frame: Frame) -> bool:
    return frame.run.meta.policy.partition(",")[0] == "chunked"


def chunk_advice(frame: Frame) -> str:
    """A run that is chunked already needs a smaller chunk, not the advice to chunk."""
    if not is_chunked(frame):
        return ""
    largest = max((p.tokens_per_step for p in frame.run.parts if p.kind != "decode"), default=0)
    if largest < 2:
        return "Admit fewer prompts per step: lower the token budget."
    return (
        f"Take smaller pieces: prompts ran in chunks of up to {largest:,} tokens (stepscope: "
        f"--policy chunked,chunk={largest // 2}; vLLM: a smaller --max-num-batched-tokens; SGLang: "
        "a smaller --chunked-prefill-size); the first token comes later for it."
    )
