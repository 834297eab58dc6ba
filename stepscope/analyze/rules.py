"""The verdicts: one table that both the analyzer and `stepscope explain` read.

A rule is told in words, with {placeholders} that name a field of Thresholds, so that what is
printed is what is compared.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from stepscope.analyze.flag_table import FLAGS
from stepscope.analyze.metrics import METRICS
from stepscope.analyze.thresholds import Thresholds

__all__ = ["FLAGS", "METRICS", "RULES", "Rule", "Thresholds", "rule_text"]


@dataclass(frozen=True, slots=True)
class Rule:
    """One verdict: when it is given, what shows it, and what to do."""

    title: str  # as a person says it
    rule: str
    thresholds: tuple[str, ...]  # fields of Thresholds that the rule uses
    evidence: str
    told_apart: str
    falsify: str
    advice: str


_LARGEST = "No earlier branch fires and this is the largest share of the working steps' time: "

RULES: dict[str, Rule] = {
    "insufficient_data": Rule(
        "not enough data",
        "Fewer than {min_decode_steps} steps decoded after warm-up.",
        ("min_decode_steps",),
        "the number of decode steps",
        "Every other verdict: this one is checked first.",
        "Record more steps; the verdict goes away or it was never about the data.",
        "Let the run produce more tokens: more requests or a larger output length.",
    ),
    "pause_bound": Rule(
        "pause-bound",
        "Decodes waited in steps longer than {tail_factor} x the decode-only median for at least "
        "{tail_share} of the time, and more than {pause_share} of that excess lies inside garbage "
        "collection, compilation, allocation or capture.",
        ("tail_factor", "tail_share", "pause_share"),
        "excess of long steps, the part of it inside pauses, the longest one",
        "A prefill stall: there the long steps carry prompt tokens.",
        "Disable the collector or warm up every shape before serving: the long steps must go.",
        "Freeze long-lived objects (gc.freeze) and compile every shape during warm-up, before "
        "requests arrive.",
    ),
    "kv_pressure_bound": Rule(
        "KV-pressure-bound",
        "Decodes waited in steps longer than {tail_factor} x the decode-only median for at least "
        "{tail_share} of the time, and those steps "
        "compute tokens a second time ({recompute_share} of their prefill or more) or follow a "
        "preemption with {kv_full} of the pages in use.",
        ("tail_factor", "tail_share", "recompute_share", "kv_full"),
        "recomputed tokens, preemptions, pages in use",
        "A prefill stall: there the tokens are new. A full cache without recomputed tokens is "
        "not pressure.",
        "Double the KV pages: preemptions and the long steps must both go.",
        "Give the cache more pages or admit fewer requests (vLLM: --gpu-memory-utilization, "
        "--max-num-seqs; SGLang: --mem-fraction-static, --max-running-requests).",
    ),
    "prefill_stall_bound": Rule(
        "prefill-stall-bound",
        "Decodes waited in steps longer than {tail_factor} x the decode-only median for at least "
        "{tail_share} of the time, and the largest part of that excess lies in steps that prefill "
        "new tokens while decodes run or are blocked.",
        ("tail_factor", "tail_share"),
        "excess of those steps, their prompt tokens, the worst one with culprit and victims",
        "A pause: there are no tokens. Prefills that run while nothing decodes stall nobody.",
        "Run the same workload with `--policy chunked` and a small chunk: the longest gaps must "
        "shrink while time to first token grows.",
        "Chunk prompts and let decodes run in the same step (stepscope: --policy "
        "chunked,chunk=256; vLLM: --enable-chunked-prefill with a smaller "
        "--max-num-batched-tokens; SGLang: --enable-mixed-chunk, --chunked-prefill-size).",
    ),
    "frontend_bound": Rule(
        "front-end-bound",
        "The engine idles for at least {idle_share} of the run while requests that have arrived "
        "are not yet queued, for at least half of that idle time.",
        ("idle_share",),
        "idle time, idle time with requests outside the engine",
        "no_load: there nobody is waiting anywhere.",
        "Submit the same requests straight to the engine: idle time must vanish.",
        "Look before the engine: tokenizer, HTTP server and client. More API processes help "
        "(vLLM: --api-server-count; SGLang: --tokenizer-worker-num).",
    ),
    "no_load": Rule(
        "no load",
        "The engine idles for at least {idle_share} of the run and no request waits anywhere.",
        ("idle_share",),
        "idle time, wall time, requests waiting during it",
        "host_bound: there the engine has work and is slow to start it.",
        "Double the request rate: idle time must fall while step time stays.",
        "Nothing to fix in the engine: send more load, or measure with a higher rate.",
    ),
    "host_bound": Rule(
        "host-bound",
        _LARGEST + "the host phases (recv, schedule, prepare, commit, detok, emit, other). On one "
        "timeline d2h_wait is the host's copy and counts too. The largest phase is named.",
        (),
        "share of the host phases, the largest phase, thread CPU time where recorded",
        "launch_bound: that is the host issuing the forward pass, and counts as forward.",
        "Halve the work of the named phase: step time must fall by half of its share.",
        "Take work off the step's path: overlap scheduling with the forward pass (vLLM: "
        "--async-scheduling; SGLang overlaps unless --disable-overlap-schedule is given) or make "
        "the named phase cheaper.",
    ),
    "sampling_bound": Rule(
        "sampling-bound",
        _LARGEST + "the sample phase.",
        (),
        "share and time of sampling, rows sampled per step",
        "d2h_wait: waiting for token ids is not sampling.",
        "Decode greedily: the sample phase and the step must shrink together.",
        "Sample greedily or with fewer logits processors; use a fused sampler (vLLM: "
        "VLLM_USE_FLASHINFER_SAMPLER=1; SGLang: --sampling-backend flashinfer).",
    ),
    "copy_bound": Rule(
        "copy-bound",
        _LARGEST + "assembling scattered KV pages (gather).",
        (),
        "share and time of gather, KV bytes per step",
        "bandwidth_bound on kv: that is attention reading the cache, within forward.",
        "Use an attention backend that reads pages in place: gather must vanish and forward must "
        "not grow by as much.",
        "Read the pages in place with a paged attention kernel (stepscope on CUDA: --attention "
        "paged; vLLM and SGLang: --attention-backend), or keep contexts shorter.",
    ),
    "launch_bound": Rule(
        "launch-bound",
        _LARGEST + "dispatch, that is the forward time of a twin with the same layers and "
        "operations but minimal widths, at the same batch and context.",
        (),
        "the twin's forward, share of dispatch, step time over batch size",
        "kernel_inefficient: there the kernels are slow, not their start.",
        "Compile or capture the forward pass: step time must fall by about the twin's time. A "
        "larger batch must cost almost nothing.",
        "Issue fewer operations: compile or capture the step (vLLM: drop --enforce-eager; SGLang: "
        "drop --disable-cuda-graph), or decode more requests at once.",
    ),
    "bandwidth_bound": Rule(
        "bandwidth-bound",
        _LARGEST + "bytes read (weights once per step, plus the KV cache) at the measured read "
        "ceiling for that working set. weights or kv is named by bytes; from {at_roofline} of the "
        "forward time on there is nothing left to fix in the kernels.",
        ("at_roofline",),
        "bytes per step, the read ceiling, floor against measured time",
        "kernel_inefficient: there the bytes would allow a much faster step. compute_bound: there "
        "arithmetic takes longer than reading.",
        "Halve the bytes (a smaller dtype or a quantized model): step time must fall nearly in "
        "proportion. A larger batch must cost little if weights are named.",
        "Read fewer bytes per token: quantize the weights (vLLM and SGLang: --quantization) or "
        "decode more requests per step, which share one read of the weights.",
    ),
    "compute_bound": Rule(
        "compute-bound",
        _LARGEST + "arithmetic at the measured GEMM ceiling, in steps where it takes longer than "
        "reading the bytes.",
        (),
        "FLOPs per step, the GEMM ceiling, prompt tokens per step",
        "bandwidth_bound: there reading takes longer than arithmetic.",
        "Halve the tokens per step: step time must halve too.",
        "Compute fewer tokens: reuse prefixes (vLLM: --enable-prefix-caching; SGLang does unless "
        "--disable-radix-cache is given), or compute in a faster dtype.",
    ),
    "kernel_inefficient": Rule(
        "limited by kernel inefficiency",
        _LARGEST + "what is left of forward after the floor (bytes or FLOPs at the measured "
        "ceiling) and the twin's dispatch.",
        (),
        "forward time, its floor, the twin, the rate that matrix-vector products reach",
        "bandwidth_bound: there the floor explains the time. launch_bound: there the twin does.",
        "Run the same shapes with another kernel or dtype: if step time stays, bytes or dispatch "
        "were the limit after all.",
        "Change the kernels: another dtype (which one is faster depends on the CPU), a "
        "compiled forward, or another backend (vLLM and SGLang: --attention-backend).",
    ),
    "cpu_starved": Rule(
        "starved of cores",
        _LARGEST + "what decode-only steps in noisy blocks take beyond the median of quiet ones, "
        "as far as nothing else explains it.",
        (),
        "time in noisy blocks, the share of the cores that others took there",
        "kernel_inefficient: there the time is lost on quiet cores as well.",
        "Run again on an idle machine: the excess must be gone.",
        "Stop what else runs on these cores, or give the engine cores of its own (taskset); on a "
        "shared machine OMP_WAIT_POLICY=PASSIVE keeps threads from spinning for each other.",
    ),
    "undetermined": Rule(
        "undetermined",
        "The largest share of the time cannot be split further with what was recorded, for "
        "example because no ceilings or no twin were measured on this device.",
        (),
        "what is missing, and what is known without it",
        "Every verdict with a name: this one says that the data do not decide.",
        "Measure what is missing and analyse the same run again.",
        "Measure the ceilings of this device once (`stepscope ceilings`) and record the run again.",
    ),
}


def rule_text(name: str, limits: Thresholds | None = None) -> str:
    """The rule in words with its thresholds filled in; KeyError for an unknown verdict."""
    limits = limits or Thresholds()
    values = {f.name: _shown(f.name, getattr(limits, f.name)) for f in fields(limits)}
    return RULES[name].rule.format(**values)


def _shown(field_name: str, value: float) -> str:
    return f"{value * 100:g} %" if field_name in SHARES else f"{value:g}"


SHARES = frozenset(
    {
        "tail_share",
        "pause_share",
        "recompute_share",
        "kv_full",
        "idle_share",
        "mixed_within",
        "host_gap",
        "top_host_phase",
        "low_mbu",
        "at_roofline",
        "hol_prefill_share",
        "contention_cpu",
        "contention_time",
        "admission_kv",
        "admission_share",
        "graph_miss_share",
        "launch_host",
        "launch_tail",
    }
)
