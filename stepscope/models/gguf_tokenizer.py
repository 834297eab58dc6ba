"""A tokenizer rebuilt from GGUF metadata: byte-level BPE (`gpt2`) or SentencePiece (`llama`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.gguf_file import GgufFile
from stepscope.models.gguf_sentencepiece import adds_space, sentencepiece_backend
from stepscope.models.tokenizer import (
    END_TOKENS,
    TextTokenizer,
    TokenizerParts,
    byte_level_bytes,
    sentencepiece_bytes,
)
from stepscope.text import listing

CONTROL, USER_DEFINED = 3, 4
MOST_IDS = 1 << 32  # `tokenizers` counts in 32 bits
SENTENCEPIECE = "llama"
ADDS_BOS = (
    "llama-bpe",
    SENTENCEPIECE,
)  # where the file does not say, as llama.cpp does (src/llama-vocab.cpp)
WHOLE_WORDS_FIRST = ("llama-bpe",)  # a word that is a token is never split by merges


def _digits_then_words() -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )


def _by_pattern(digits: str) -> Any:
    """The split of Llama 3's and Qwen 2's tokenizer.json, which differ in the run of digits."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "smollm": _digits_then_words,
    "llama-bpe": lambda: _by_pattern(r"\p{N}{1,3}"),
    "qwen2": lambda: _by_pattern(r"\p{N}"),
}


def tokenizer_from_gguf(file: GgufFile) -> TextTokenizer | None:
    """The file's tokenizer, None if it has none.

    Raises UsageError for a kind of tokenizer that is not known here: a guessed split would change
    the ids without a sign of it. Raises StepscopeError if its parts do not fit together.
    """
    if "tokenizer.ggml.model" not in file.metadata:
        return None
    pieces = file.need("tokenizer.ggml.model", str) == SENTENCEPIECE
    pre = SENTENCEPIECE if pieces else _pre_tokenizer_name(file)
    tokens = _tokens(file)
    backend = _sentencepiece(file, tokens) if pieces else _backend(file, tokens, pre)
    backend.add_special_tokens(_of_kind(file, tokens, CONTROL))
    backend.add_tokens(_of_kind(file, tokens, USER_DEFINED))
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", pre in ADDS_BOS))
    return TextTokenizer(
        TokenizerParts(
            backend=backend,
            token_bytes=sentencepiece_bytes if pieces else byte_level_bytes,
            strip_first_space=pieces and adds_space(file),
            bos_id=_token_id(file, "bos"),
            add_bos=add_bos,
            eos_ids=_eos_ids(file, tokens),
            chat_template=_optional(file, "tokenizer.chat_template", str),
        )
    )


def _pre_tokenizer_name(file: GgufFile) -> str:
    model = file.need("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UsageError(
            f"{file.path} has a tokenizer of the kind '{model}', and byte-level BPE ('gpt2') and"
            " SentencePiece BPE ('llama') can be rebuilt from a GGUF file; use the model's"
            " directory with its tokenizer.json."
        )
    pre = str(file.metadata.get("tokenizer.ggml.pre", "missing"))
    if pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"{file.path} has the unknown pre-tokenizer '{pre}' where"
            f" {listing([*PRE_TOKENIZERS])} are known; use the model's directory with its"
            " tokenizer.json."
        )
    return pre


def _optional(file: GgufFile, key: str, kind: type) -> Any:
    return file.need(key, kind) if key in file.metadata else None


def _token_id(file: GgufFile, kind: str) -> int | None:
    found: int | None = _optional(file, f"tokenizer.ggml.{kind}_token_id", int)
    if found is not None and not 0 <= found < MOST_IDS:
        raise StepscopeError(
            f"{file.path} has {found} as its {kind} token; download or convert it again."
        )
    return found


def _tokens(file: GgufFile) -> list[str]:
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    if not all(isinstance(token, str) for token in tokens):
        raise StepscopeError(
            f"{file.path} has tokens that are not text; download or convert it again."
        )
    if len(set(tokens)) != len(tokens):
        raise StepscopeError(f"{file.path} lists a token twice; download or convert it again.")
    return tokens


def _backend(file: GgufFile, tokens: list[str], pre: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = _token_id(file, "unknown")
    unknown_token = None if unknown is None or unknown >= len(tokens) else tokens[unknown]
    backend = Tokenizer(
        BPE(
            vocab=vocab,
            merges=_merges(file, vocab),
            unk_token=unknown_token,
            ignore_merges=pre in WHOLE_WORDS_FIRST,
        )
    )
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":  # its tokenizer.json normalizes, which GGUF does not record
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    kinds = file.need("tokenizer.ggml.token_type", list)
    return sentencepiece_backend(file, tokens, kinds)


def _of_kind(file: GgufFile, tokens: list[str], kind: int) -> list[AddedToken]:
    kinds = _optional(file, "tokenizer.ggml.token_type", list) or []
    return [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, its_kind in zip(tokens, kinds, strict=False)
        if its_kind == kind
    ]


def _merges(file: GgufFile, vocab: dict[str, int]) -> list[tuple[str, str]]:
    merges = []
    for line in file.need("tokenizer.ggml.merges", list):
        left, _, right = str(line).partition(" ")
        if not (left in vocab and right in vocab and left + right in vocab):
            raise StepscopeError(
                f"{file.path} merges '{line}', which its vocabulary does not have; download or"
                " convert it again."
            )
        merges.append((left, right))
    return merges


def _eos_ids(file: GgufFile, tokens: list[str]) -> tuple[int, ...]:
    """The ids at which the model stops: the file's own first, then known names of end tokens."""
    ids = [_token_id(file, kind) for kind in ("eos", "eot", "eom")]
    control = {token.content for token in _of_kind(file, tokens, CONTROL)}
    ids += [tokens.index(token) for token in END_TOKENS if token in control]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
