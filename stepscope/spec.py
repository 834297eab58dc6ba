"""A model and a device as plain numbers, and what a step costs: bytes and FLOPs by arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
KV_DTYPES = (*ELEMENT_BYTES, "int8")
# Weight-only formats: bf16 activations; int8 and fp8 have a scale per row, int4 scale and zero per
# group. fp8 (e4m3) is for GPUs that multiply it.
INT4_GROUPS = {"int4": 32, "int4-g64": 64, "int4-g128": 128}
FP8 = "fp8"
QUANTIZED = ("int8", FP8, *INT4_GROUPS)


def compute_dtype(dtype: str) -> str:
    """What activations and norms are in."""
    return "bf16" if dtype in QUANTIZED else dtype


def product_dtype(dtype: str) -> str:
    """What most products are computed in, whose measured rate is their ceiling."""
    return FP8 if dtype == FP8 else compute_dtype(dtype)


def matrix_bytes(parameters: int, dtype: str) -> int:
    """Bytes of matrices that nobody has loaded; the scale of an int8 or fp8 row is left out."""
    if dtype in INT4_GROUPS:
        return parameters // 2 + 4 * parameters // INT4_GROUPS[dtype]
    return parameters * (1 if dtype in ("int8", FP8) else ELEMENT_BYTES[dtype])


def head_bytes(spec: ModelSpec) -> int:
    """Bytes of the output head, which only a step that samples reads; int8 under int4, bf16 under
    fp8."""
    dtype = "int8" if spec.dtype in INT4_GROUPS else spec.dtype
    dtype = compute_dtype(dtype) if dtype == FP8 else dtype
    return matrix_bytes(spec.head_params, dtype) if spec.head_bytes is None else spec.head_bytes


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the frequencies of RoPE are stretched beyond `original` positions (models/rope.py)."""

    kind: str  # linear, llama3, yarn, or divisors: one per frequency, as a GGUF file stores them
    factor: float = 1.0
    original: int = 0
    low_freq: float = 1.0  # llama3
    high_freq: float = 4.0
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    attention: float | None = None  # yarn: factor of cos and sin; None = 0.1 ln(factor) + 1
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder, and by which of a handful of traits its family differs.

    linear_bytes, expert_bytes, head_bytes and norm_bytes are the bytes of the tensors as loaded;
    they are None until a loader has seen real tensors. The embedding table is not part of a step's
    weight bytes unless it is tied and so serves as the output head. With experts, `intermediate`
    is the width of one expert.
    """

    name: str
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_context: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tied: bool = True
    dtype: str = "fp32"
    kv_dtype: str = "fp32"
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    add_bos: bool = False
    linear_bytes: int | None = None  # all layers' projections, without the routed experts
    norm_bytes: int | None = None  # with the biases: all that is no matrix
    head_bytes: int | None = None
    embedding_bytes: int | None = None  # resident, but read by the row
    expert_bytes: int | None = None  # every expert of every layer
    rope: RopeScaling | None = None
    window: int | None = None  # tokens a local layer attends to, the query's own included
    layer_pattern: str = "f"  # repeated over the layers: s(liding window) or f(ull)
    local_rope_theta: float | None = None  # of local layers, which then are not scaled
    qkv_bias: bool = False
    qk_norm: bool = False  # RMSNorm over each head of q and k, before RoPE
    post_norms: bool = False  # a norm after attention and after the MLP, too
    activation: str = "silu"  # or gelu_tanh
    scale_embeddings: bool = False  # by sqrt(hidden)
    query_scale: float | None = None  # of the scores; None = 1 / sqrt(head_dim)
    attn_softcap: float | None = None
    final_softcap: float | None = None
    experts: int = 0  # 0 = one dense MLP
    experts_per_token: int = 0
    renormalize: bool = True  # the chosen experts' weights sum to 1
    source: str = ""  # hub id and commit; empty for files on disk and random weights

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelSpec:
        rope = raw.get("rope")
        if rope:
            rope = RopeScaling(**{**rope, "divisors": tuple(rope["divisors"])})
        return cls(**{**raw, "eos_ids": tuple(raw["eos_ids"]), "rope": rope})

    @property
    def layer_linears(self) -> tuple[tuple[str, int, int], ...]:
        """(name, out, in) of the matrix products of one layer, fused as they are run.

        With experts gate_up and down are those of one expert.
        """
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        router = (("router", self.experts, self.hidden),) if self.experts else ()
        return (
            ("qkv", qkv, self.hidden),
            ("o", self.hidden, self.heads * self.head_dim),
            *router,
            ("gate_up", 2 * self.intermediate, self.hidden),
            ("down", self.hidden, self.intermediate),
        )

    @property
    def linear_params(self) -> int:
        """Parameters of the layers' products that one token goes through."""
        layer = sum(rows * cols for _, rows, cols in self.layer_linears)
        more_experts = self.experts_per_token - 1 if self.experts else 0
        return self.layers * (layer + more_experts * self.mlp_params)

    @property
    def mlp_params(self) -> int:
        """Gate, up and down of one layer, or of one expert of it."""
        return 3 * self.intermediate * self.hidden

    @property
    def local_layers(self) -> int:
        """How many layers attend to the window only."""
        return sum(self.is_local(layer) for layer in range(self.layers))

    def is_local(self, layer: int) -> bool:
        sliding = self.layer_pattern[layer % len(self.layer_pattern)] == "s"
        return sliding and self.window is not None

    @property
    def head_params(self) -> int:
        return self.vocab * self.hidden

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step which samples reads once; with experts, one token's step."""
        return self.weight_bytes_of(1)

    def weight_bytes_of(self, tokens: int, expert_reads: int | None = None) -> int:
        """Bytes of weights that a sampling step of so many tokens reads.

        expert_reads: (layer, expert) pairs whose weights the step really read, where it was
        recorded. Without it the expectation if every token chose its k of E experts evenly:
        E x (1 - (1 - k / E)^tokens) per layer, an upper bound, since real routers have favourites.
        """
        loaded = self.linear_bytes
        linear = matrix_bytes(self.linear_params, self.dtype) if loaded is None else loaded
        if self.experts:
            if self.linear_bytes is None:
                own = self.layers * self.experts_per_token * self.mlp_params
                linear -= matrix_bytes(own, self.dtype)
            linear += self._expert_bytes_of(tokens, expert_reads)
        vectors = self._vector_params * ELEMENT_BYTES[compute_dtype(self.dtype)]
        vectors = vectors if self.norm_bytes is None else self.norm_bytes
        return linear + head_bytes(self) + vectors

    def _expert_bytes_of(self, tokens: int, expert_reads: int | None) -> int:
        pairs = self.layers * self.experts
        every = matrix_bytes(pairs * self.mlp_params, self.dtype)
        missed = (1 - self.experts_per_token / self.experts) ** tokens
        share = 1 - missed if expert_reads is None else expert_reads / pairs
        return round(share * (every if self.expert_bytes is None else self.expert_bytes))

    @property
    def _vector_params(self) -> int:
        """Norms and biases."""
        layer = (4 if self.post_norms else 2) * self.hidden
        layer += 2 * self.head_dim if self.qk_norm else 0
        layer += (self.heads + 2 * self.kv_heads) * self.head_dim if self.qkv_bias else 0
        return self.layers * layer + self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token holds in the cache: K and V of every layer.

        int8: one byte per element, and for each head's K and V a scale in fp32.
        """
        if self.kv_dtype == "int8":
            return 2 * self.layers * self.kv_heads * (self.head_dim + 4)
        return 2 * self.layers * self.kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    def resized(self, **changes: Any) -> ModelSpec:
        """The same model with other dimensions; byte counts as loaded no longer hold."""
        unknown = ("linear_bytes", "norm_bytes", "head_bytes", "embedding_bytes", "expert_bytes")
        # Divisors are listed one by one, so those of another head_dim say nothing.
        fits = self.rope is None or not self.rope.divisors or "head_dim" not in changes
        rope = self.rope if fits else None
        return replace(self, **{**dict.fromkeys(unknown), "rope": rope, **changes})


def step_kv_bytes(spec: ModelSpec, context_tokens: int, local_tokens: int | None = None) -> int:
    """K and V read by attention: 2 x layers x kv_heads x head_dim x sum of context x element.

    local_tokens: what the local layers read of it; None = all.
    """
    total = spec.kv_bytes_per_token * context_tokens
    if local_tokens is None or not spec.local_layers:
        return total
    unread = spec.kv_bytes_per_token * (context_tokens - local_tokens)
    return total - unread * spec.local_layers // spec.layers


def linear_flops(spec: ModelSpec, tokens: int, sampled_rows: int) -> int:
    """2 FLOPs per parameter and token; the head only for rows that are sampled."""
    return 2 * spec.linear_params * tokens + 2 * spec.head_params * sampled_rows


def attention_flops(spec: ModelSpec, query_key_pairs: int, local_pairs: int | None = None) -> int:
    """QK^T and PV: 4 x layers x heads x head_dim per (query, key) pair (FlashAttention, sec. 4).

    local_pairs: the pairs within the window, for the local layers; None = all.
    """
    local = 0 if local_pairs is None else spec.local_layers
    pairs = (spec.layers - local) * query_key_pairs + local * (local_pairs or 0)
    return 4 * spec.heads * spec.head_dim * pairs


def prefill_pairs(requests: int, tokens: int, cached_tokens: int) -> int:
    """(query, key) pairs of causal prefills, from sums.

    Exact for one request and for equal ones: a chunk of c tokens after s cached ones has
    c*s + c*(c+1)/2 pairs. Sums of unequal chunks are treated as equal ones.
    """
    if requests == 0:
        return 0
    return round(tokens * (cached_tokens + (tokens + requests) / 2) / requests)


def windowed_decode_tokens(spec: ModelSpec, requests: int, context_tokens: int) -> int:
    """Sum of min(context, window) over decodes, from sums: unequal contexts are treated as equal
    ones, which is exact where all lie on one side of the window and an upper bound elsewhere."""
    if spec.window is None:
        return context_tokens
    return min(context_tokens, requests * spec.window)


def windowed_prefill_tokens(spec: ModelSpec, requests: int, tokens: int, cached: int) -> int:
    """Keys that prefills read on a local layer: a chunk's own and the window before its first."""
    if spec.window is None:
        return tokens + cached
    return tokens + min(cached, requests * (spec.window - 1))


def windowed_pairs(spec: ModelSpec, requests: int, tokens: int, cached: int) -> int:
    """(query, key) pairs of causal prefills within the window, from sums as prefill_pairs.

    The query at position p has min(p + 1, window) keys: those before the window fills are a
    triangle, the others full.
    """
    pairs = prefill_pairs(requests, tokens, cached)
    if spec.window is None or requests == 0:
        return pairs
    count, before = tokens / requests, cached / requests
    growing = min(max(spec.window - 1 - before, 0.0), count)
    each = growing * (before + (growing + 1) / 2) + (count - growing) * spec.window
    return min(pairs, round(requests * each))
