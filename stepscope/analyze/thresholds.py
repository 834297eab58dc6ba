"""Every number the analyzer compares against, in one place. All of them can be replaced."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Defaults of the rules. Shares are 0..1 of the time named in the rule that uses them."""

    min_decode_steps: int = 20  # fewer after warm-up: insufficient_data
    min_bucket_steps: int = 3  # fewer decode-only steps do not make a median of their bucket
    tail_factor: float = 1.5  # a step is long above this multiple of the decode-only median
    tail_share: float = 0.10  # excess of long steps / working time at which the tail branch fires
    pause_share: float = 0.50  # of the excess inside gc, compile, alloc or capture
    recompute_share: float = 0.50  # of a step's prefill tokens
    kv_full: float = 0.98  # pages used / pages in all
    idle_share: float = 0.50  # idle rows / wall of the run
    stall_factor: float = 0.5  # harmful: the gap grew by more than this multiple of the median
    stall_min_ns: int = 1_000_000  # ... and by more than this
    noise_factor: float = 3.0  # a prefill step this much costlier than on quiet cores is noise
    itl_gap_factor: float = 4.0  # a gap this many times its request's median is a stall
    mixed_within: float = 0.15  # two top terms this close, as a share of the step
    host_gap: float = 0.10
    top_host_phase: float = 0.05
    low_mbu: float = 0.40
    at_roofline: float = 0.85  # floor / model time
    chunk_factor: float = 2.0  # median mixed step / decode-only median
    min_mixed_steps: int = 3
    batch_flat: float = 1.15  # largest batch's median / smallest batch's
    batch_ratio: float = 2.0  # ... over at least this ratio of batch sizes
    min_batch_steps: int = 5
    hol_wait_factor: float = 4.0  # head of line: waited this many decode-only medians
    hol_prefill_share: float = 0.5  # ... of which this share passed in other requests' prefills
    hol_prompt_ratio: float = 2.0  # ... of prompts at least this many times longer
    contention_cpu: float = 0.20  # 1 - thread CPU time / wall, median over steps
    contention_time: float = 0.10  # working time inside noise events
    admission_kv: float = 0.90
    admission_share: float = 0.10
    graph_miss_share: float = 0.01
    launch_host: float = 0.80  # of a step, the host launching
    launch_tail: float = 0.10  # of a step, from the last launch to the device's end
