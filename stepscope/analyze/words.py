"""The words of a report in one sentence each: phases of a step, and terms."""

from __future__ import annotations

PHASES_IN_WORDS = {
    "recv": "requests that have arrived join the queue; on a row of kind idle, waiting for them",
    "schedule": "the policy decides who computes how many tokens, and pages are found for them",
    "prepare": "index tensors of the batch: token ids, positions, page tables, masks",
    "gather": "KV rows scattered over pages are assembled for attention, summed over layers; "
    "n/a where pages are read in place",
    "forward": "the model's layers without the gather, up to the logits",
    "sample": "from logits to token ids",
    "d2h_wait": "waiting for the ids to be on the host: on a GPU it is device lag, not sampling",
    "commit": "tokens are appended, requests that are done end, their pages become free",
    "detok": "token ids become text, and stop strings are looked for",
    "emit": "the text goes to the client",
    "other": "what no phase claims: the rest of the step's wall time",
}
TERMS_IN_WORDS = {
    "step": "one iteration of the engine loop; with a device timeline, from the end of the last "
    "one on the device to its own end there",
    "chunk": "a part of a prompt that is prefilled in one step, so that decodes are not held up "
    "by the whole of it",
    "dispatch": "what launching the operations of a forward costs, measured on the twin",
    "twin": "the same layers and operations at minimal widths: what it takes is dispatch",
    "floor": "bytes over the measured read bandwidth, or FLOPs over the measured GEMM rate, "
    "whichever takes longer",
    "overlap": "a step is scheduled while the last one is computed; its tokens come one "
    "iteration later, and a request that ends meanwhile costs one extra token",
    "num_extra_tokens": "tokens computed for requests that had ended before their result was "
    "known (overlap); null without overlap",
    "result_step": "the step whose tokens an iteration gave out: under overlap the one before",
    "graph_hit": "1 if a decode-only step was launched as a graph or compiled program, 0 if its "
    "batch fitted none; null without graphs and for prefills",
    "page": "a fixed number of tokens' K and V in the cache, given to requests as they grow",
}
WORDS = {**PHASES_IN_WORDS, **TERMS_IN_WORDS}
