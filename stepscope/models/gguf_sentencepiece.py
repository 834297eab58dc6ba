"""A SentencePiece BPE tokenizer rebuilt from GGUF metadata (tokenizer model `llama`).

The file lists pieces and scores but no merges. SentencePiece merges the neighbours whose union has
the best score (google/sentencepiece, src/bpe_model.cc), so every way of cutting a piece into two
pieces is a merge, and the piece's score is its priority.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE

from stepscope.errors import StepscopeError
from stepscope.models.gguf_file import GgufFile

SPACE = "\u2581"
NORMAL, UNKNOWN = 1, 2


def sentencepiece_backend(file: GgufFile, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Without its special tokens. Raises StepscopeError if scores or kinds are not one a token."""
    scores = file.need("tokenizer.ggml.scores", list)
    numbers = all(isinstance(score, int | float) for score in scores)
    if not (numbers and len(scores) == len(kinds) == len(tokens)):
        raise StepscopeError(
            f"{file.path} has {len(tokens):,} tokens, {len(scores):,} scores and {len(kinds):,}"
            " kinds of token where each has one of them, a number; download or convert it again."
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=merges_of(tokens, scores, kinds, vocab),
            unk_token=next((t for t, k in zip(tokens, kinds, strict=True) if k == UNKNOWN), None),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", SPACE)]
    if adds_space(file):
        steps.insert(0, normalizers.Prepend(SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    return backend


def adds_space(file: GgufFile) -> bool:
    """Whether a text begins as if after a space; so it is where the file does not say."""
    return bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))


def merges_of(
    tokens: list[str], scores: list[float], kinds: list[int], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Every cut of a normal piece into two pieces, the best score first."""
    found = []
    for token, score, kind in zip(tokens, scores, kinds, strict=True):
        if kind != NORMAL or len(token) < 2:
            continue
        cuts = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [(a, b) for a, b in cuts if a in vocab and b in vocab]
        known.sort(key=lambda cut: (vocab[cut[0]], vocab[cut[1]]))
        found += [(score, cut) for cut in known]
    found.sort(key=lambda merge: -merge[0])
    return [cut for _, cut in found]
