"""Text to token ids and back, one token at a time where it is streamed.

Encoding is left to the `tokenizers` package. Decoding is done here, byte by byte: a token is a run
of bytes, so text can be emitted as soon as its UTF-8 is complete, at a cost that does not grow with
what was emitted before.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from stepscope.errors import UsageError
from stepscope.models.chat_template import render_chat

Message = Mapping[str, str]
TokenBytes = Callable[[str], bytes]

# Names under which Llama-family vocabularies end a turn or a text.
END_TOKENS = (
    "<|endoftext|>",
    "<|im_end|>",
    "<|end_of_text|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "</s>",
)


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's printable byte alphabet (openai/gpt-2, src/encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF = _byte_level_alphabet()


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; one with characters outside the alphabet stands for itself."""
    if all(c in BYTE_OF for c in token):
        return bytes(BYTE_OF[c] for c in token)
    return token.encode()


def sentencepiece_bytes(token: str) -> bytes:
    """Bytes of a SentencePiece token: <0x0A> is one byte, U+2581 is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.replace("\u2581", " ").encode()


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """What a file says about its tokenizer, whatever its format."""

    backend: Tokenizer
    token_bytes: TokenBytes
    strip_first_space: bool
    bos_id: int | None
    add_bos: bool
    eos_ids: tuple[int, ...]
    chat_template: str | None


class TextTokenizer:
    """A model's own vocabulary, special tokens and chat template."""

    def __init__(self, parts: TokenizerParts) -> None:
        self._parts = parts
        self._backend = parts.backend
        added = parts.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._vocab_size = max(parts.backend.get_vocab().values(), default=-1) + 1
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """The highest id in use, plus one."""
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._parts.eos_ids

    @property
    def bos_id(self) -> int | None:
        return self._parts.bos_id

    @property
    def add_bos(self) -> bool:
        return self._parts.add_bos

    @property
    def strips_first_space(self) -> bool:
        return self._parts.strip_first_space

    @property
    def has_chat_template(self) -> bool:
        return self._parts.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of the text. Special tokens written in it are recognised, none is added but BOS."""
        ids = self._encode(text)
        return [self.bos_id, *ids] if self.add_bos and self.bos_id is not None else ids

    def chat(self, messages: str | Sequence[Message], system: str | None = None) -> list[int]:
        """Ids of a conversation in the model's own template, up to where the model answers.

        Raises UsageError if the model has no chat template, StepscopeError if rendering fails.
        """
        if self._parts.chat_template is None:
            raise UsageError("This model has no chat template; send the prompt as raw text.")
        turns: list[Message] = (
            [{"role": "user", "content": messages}] if isinstance(messages, str) else [*messages]
        )
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        text = render_chat(
            self._parts.chat_template,
            turns,
            bos_token=self._token(self.bos_id),
            eos_token=self._token(self.eos_ids[0] if self.eos_ids else None),
        )
        return self._encode(text)

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids; bytes that are not UTF-8 become U+FFFD."""
        stream = Detokenizer(self, skip_special)
        return "".join([*(stream.push(i) for i in ids), stream.flush()])

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one id stands for; none for an id outside the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._parts.token_bytes(self._token(token_id))
            self._bytes[token_id] = known
        return known

    def _token(self, token_id: int | None) -> str:
        return "" if token_id is None else (self._backend.id_to_token(token_id) or "")

    def _encode(self, text: str) -> list[int]:
        # Lone surrogates (a command line with broken bytes) cannot be encoded: they become '?'.
        sound = text.encode("utf-8", "replace").decode()
        return list(self._backend.encode(sound, add_special_tokens=False).ids)


class Detokenizer:
    """Text of a growing sequence of ids: what was pushed, joined with flush(), equals decode().

    An incomplete UTF-8 sequence is held back until it is complete or turns out to be invalid.
    """

    def __init__(self, tokenizer: TextTokenizer, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip_next = tokenizer.strips_first_space

    def push(self, token_id: int) -> str:
        """The text that this id completes, often '' in the middle of a character."""
        if token_id in self._skipped:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._strip_next and raw:
            self._strip_next = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What was held back at the end: U+FFFD for a character that never came."""
        return self._decoder.decode(b"", final=True)
