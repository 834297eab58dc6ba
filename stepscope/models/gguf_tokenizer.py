"""A byte-level BPE tokenizer rebuilt from GGUF metadata (tokenizer model `gpt2`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.gguf_file import GgufFile
from stepscope.models.tokenizer import END_TOKENS, TextTokenizer, TokenizerParts, byte_level_bytes
from stepscope.text import listing

CONTROL, USER_DEFINED = 3, 4
ADDS_BOS = ("llama-bpe",)  # where the file does not say, as llama.cpp does (src/llama-vocab.cpp)
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
    pre = _pre_tokenizer_name(file)
    tokens: list[str] = file.need("tokenizer.ggml.tokens", list)
    backend = _backend(file, tokens, pre)
    bos = file.metadata.get("tokenizer.ggml.bos_token_id")
    add_bos = bool(file.metadata.get("tokenizer.ggml.add_bos_token", pre in ADDS_BOS))
    return TextTokenizer(
        TokenizerParts(
            backend=backend,
            token_bytes=byte_level_bytes,
            strip_first_space=False,
            bos_id=bos,
            add_bos=add_bos,
            eos_ids=_eos_ids(file, tokens),
            chat_template=file.metadata.get("tokenizer.chat_template"),
        )
    )


def _pre_tokenizer_name(file: GgufFile) -> str:
    model = file.need("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise UsageError(
            f"{file.path} has a tokenizer of the kind '{model}', and only byte-level BPE ('gpt2')"
            " can be rebuilt from a GGUF file; use the model's directory with its tokenizer.json."
        )
    pre = str(file.metadata.get("tokenizer.ggml.pre", "missing"))
    if pre not in PRE_TOKENIZERS:
        raise UsageError(
            f"{file.path} has the unknown pre-tokenizer '{pre}' where"
            f" {listing([*PRE_TOKENIZERS])} are known; use the model's directory with its"
            " tokenizer.json."
        )
    return pre


def _backend(file: GgufFile, tokens: list[str], pre: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise StepscopeError(f"{file.path} lists a token twice; download or convert it again.")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unknown_token = None
    if isinstance(unknown, int) and unknown < len(tokens):
        unknown_token = tokens[unknown]
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
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    backend.add_special_tokens(_of_kind(tokens, kinds, CONTROL))
    backend.add_tokens(_of_kind(tokens, kinds, USER_DEFINED))
    return backend


def _of_kind(tokens: list[str], kinds: list[int], kind: int) -> list[AddedToken]:
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
    ids = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    kinds = file.metadata.get("tokenizer.ggml.token_type", [])
    control = {t.content: t for t in _of_kind(tokens, kinds, CONTROL)}
    ids += [tokens.index(token) for token in END_TOKENS if token in control]
    return tuple(dict.fromkeys(i for i in ids if i is not None))
