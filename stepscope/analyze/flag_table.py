"""Each flag's rule, its thresholds and its wording."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Flag:
    rule: str
    threshold: str  # the fields of Thresholds it uses, "" for none
    wording: str


FLAGS: dict[str, Flag] = {
    "mixed": Flag(
        "the two largest terms of the step are this close, as a share of it",
        "mixed_within",
        "A {share} and B {share} are too close to call one the cause",
    ),
    "low_mbu": Flag(
        "bytes / time of decode-only steps, below this share of the read ceiling",
        "low_mbu",
        "decode-only steps reach {share} of the measured read bandwidth",
    ),
    "at_roofline": Flag(
        "floor / model time of decode-only steps, from here on",
        "at_roofline",
        "the floor explains {share} of the forward pass: nothing to fix in the kernels",
    ),
    "kv_dominant": Flag(
        "decode-only steps read more KV cache than weights", "", "KV is {share} of the bytes read"
    ),
    "host_gap": Flag(
        "host phases take at least this share of decode-only steps without being the verdict",
        "host_gap",
        "host phases take {share} of a decode-only step",
    ),
    "top_host_phase": Flag(
        "host phases take at least this share of decode-only steps; raised as top_host_phase:X",
        "top_host_phase",
        "X is the largest host phase with {ms} per step",
    ),
    "batch_insensitive": Flag(
        "median decode-only step of the largest batch / of the smallest, over at least "
        "batch_ratio x the batch",
        "batch_flat, batch_ratio, min_batch_steps",
        "batch B1 takes {ms}, batch B2 {ms}",
    ),
    "kv_full": Flag(
        "pages in use / pages in all, at any step; full is not thrash, recomputed tokens are",
        "kv_full",
        "the cache was full in N steps",
    ),
    "kv_admission_limited": Flag(
        "steps in which requests wait, none is admitted or preempted, and this share of the "
        "pages is in use",
        "admission_kv, admission_share",
        "requests waited for pages in N steps",
    ),
    "recompute_after_preemption": Flag(
        "tokens were computed a second time", "", "N preemptions made the engine recompute M tokens"
    ),
    "decode_not_scheduled": Flag(
        "steps that prefilled while running decodes were left out", "", "decodes sat out N steps"
    ),
    "chunk_budget_too_large": Flag(
        "median mixed step / decode-only median of the same bucket",
        "chunk_factor, min_mixed_steps",
        "a mixed step takes K x a decode-only one",
    ),
    "head_of_line": Flag(
        "a request waited hol_wait_factor medians or more, hol_prefill_share of it during "
        "prefills of prompts hol_prompt_ratio times its own",
        "hol_wait_factor, hol_prefill_share, hol_prompt_ratio",
        "request R waited {ms} behind longer prompts",
    ),
    "gc_gen2": Flag(
        "a full garbage collection ran in a working step; needs the collector's generation",
        "",
        "N full collections took {ms}",
    ),
    "jit_in_serving": Flag(
        "something was compiled in a working step", "", "N compilations took {ms}"
    ),
    "launch_paced": Flag(
        "device timeline: launching takes this share of a decode-only step on the host, and the "
        "device is done this soon after the last launch, as a share of it (medians)",
        "launch_host, launch_tail",
        "the host was launching for {share} of a step and the device ended with it",
    ),
    "graph_miss": Flag(
        "share of decode-only steps whose batch fitted no graph",
        "graph_miss_share",
        "N steps missed the graph",
    ),
    "cpu_contention": Flag(
        "working time inside noise events, or 1 - thread CPU time / wall (median)",
        "contention_time, contention_cpu",
        "other processes took the cores: absolute times are not this machine's best",
    ),
}
