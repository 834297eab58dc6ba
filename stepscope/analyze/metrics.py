"""Every metric has one definition, printed beside its number."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """How a number is made. other_names: what OpenTelemetry GenAI, vLLM and SGLang call it."""

    definition: str
    unit: str
    better: str  # lower, higher or ""
    other_names: str = ""


METRICS: dict[str, Metric] = {
    "ttft": Metric(
        "first token emitted - arrival, per request; the time in the queue is included",
        "ms",
        "lower",
        "OTel gen_ai.server.time_to_first_token; vllm:time_to_first_token_seconds; "
        "sglang:time_to_first_token_seconds",
    ),
    "queue": Metric(
        "begin of the first step that computed a token of it - arrival, per request",
        "ms",
        "lower",
        "vllm:request_queue_time_seconds",
    ),
    "prefill": Metric(
        "first token emitted - begin of the first step that computed a token of it, per request",
        "ms",
        "lower",
        "vllm:request_prefill_time_seconds",
    ),
    "itl": Metric(
        "every gap between consecutive tokens of one request; the distribution is over tokens",
        "ms",
        "lower",
        "vllm:inter_token_latency_seconds; sglang:inter_token_latency_seconds; time between "
        "tokens (TBT)",
    ),
    "tpot": Metric(
        "(last token - first token) / (n - 1), per request; n = 1 has none and is counted",
        "ms",
        "lower",
        "OTel gen_ai.server.time_per_output_token; vllm:request_time_per_output_token_seconds",
    ),
    "e2e": Metric(
        "finished - arrival, per request that ended with eos, stop or length",
        "ms",
        "lower",
        "OTel gen_ai.server.request.duration; vllm:e2e_request_latency_seconds; "
        "sglang:e2e_request_latency_seconds",
    ),
    "normalized": Metric("e2e / output tokens, per request", "ms", "lower"),
    "goodput": Metric(
        "requests per second of run time that meet every SLO of the scenario: ttft_ms against the "
        "request's TTFT, itl_ms against its longest gap (one long stall is what a reader notices, "
        "and a percentile would hide it); a failed request is "
        "judged and misses, an aborted or unfinished one is not judged",
        "requests/s",
        "higher",
        "vLLM bench: request_goodput",
    ),
    "output_tokens_per_s": Metric(
        "tokens emitted / wall time of the run, idle included",
        "tok/s",
        "higher",
        "vLLM bench: output_throughput; sglang:gen_throughput (that one is of the last interval)",
    ),
    "total_tokens_per_s": Metric(
        "(tokens emitted + prompt tokens computed) / wall time of the run",
        "tok/s",
        "higher",
        "vLLM bench: total_token_throughput",
    ),
    "requests_per_s": Metric(
        "requests that ended with eos, stop or length / wall time of the run",
        "requests/s",
        "higher",
        "vLLM bench: request_throughput",
    ),
    "mean_step": Metric("wall time of working steps / their number", "ms", "lower"),
    "p50_step": Metric(
        "median wall time of decode-only steps; mixed steps are never pooled with them",
        "ms",
        "lower",
    ),
    "mbu": Metric(
        "(weight bytes + KV bytes) / step time / read bandwidth measured at that working set, "
        "over decode-only steps; the embedding table counts only where it is the output head",
        "%",
        "higher",
        "model bandwidth utilization",
    ),
    "mfu": Metric(
        "FLOPs / step time / GEMM rate measured for the dtype, over working steps",
        "%",
        "higher",
        "model FLOPs utilization",
    ),
    "stall": Metric(
        "a step in which prefills ran beside decodes, or a decode-only step above 1.5 x the "
        "median. Excess: T - P50 of decode-only steps with as many running and blocked decodes; "
        "all of a step that blocked every decode. Harmful: the token gap it lies in grew by more "
        "than 0.5 x P50 and 1 ms",
        "ms",
        "lower",
    ),
    "stall_total": Metric("sum of the excess of harmful stalls", "ms", "lower"),
    "stalls": Metric("harmful stalls", "count", "lower"),
    "preemptions": Metric(
        "times a running request lost its pages", "count", "lower", "vllm:num_preemptions"
    ),
    "recomputed_tokens": Metric(
        "tokens computed a second time after a preemption", "tokens", "lower"
    ),
    "prefix_hit_share": Metric(
        "tokens that the prefix cache gave / (these + prefill tokens computed)",
        "%",
        "higher",
        "vllm:prefix_cache_hits / queries, SGLang cache hit rate",
    ),
}
