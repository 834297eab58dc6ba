"""A tokenizer from a Hugging Face directory: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.tokenizer import (
    TextTokenizer,
    TokenBytes,
    TokenizerParts,
    byte_level_bytes,
    sentencepiece_bytes,
)

TEMPLATE_FILE = "chat_template.jinja"
MOST_ERROR_CHARS = 150
MOST_IDS = 1 << 32  # `tokenizers` counts in 32 bits


def tokenizer_from_directory(path: Path, config: dict[str, Any]) -> TextTokenizer | None:
    """The directory's tokenizer, None if it has no tokenizer.json.

    Raises UsageError for a decoder that is not known here, StepscopeError for damaged files.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    settings = json_object(path / "tokenizer_config.json")
    description = json_object(file)
    if not isinstance(description.get("model"), dict) or "vocab" not in description["model"]:
        raise StepscopeError(f"{file} has no vocabulary; download it again.")
    token_bytes, strip_first_space = _decoding(file, description.get("decoder"))
    backend = _backend(file, description)
    bos = _bos_id(path, backend, settings, config)
    return TextTokenizer(
        TokenizerParts(
            backend=backend,
            token_bytes=token_bytes,
            strip_first_space=strip_first_space,
            bos_id=bos,
            add_bos=_adds_bos(backend, settings, bos),
            eos_ids=eos_ids_of(path, config),
            chat_template=_chat_template(path, settings),
        )
    )


def _backend(file: Path, description: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(description))
    except Exception as error:
        # The Rust library raises Exception itself, no class of its own, for all it rejects.
        if type(error) is not Exception:
            raise
        what = textwrap.shorten(str(error), MOST_ERROR_CHARS, placeholder="...")
        raise StepscopeError(
            f"{file} is no tokenizer that can be read ({what}); download it again or choose another"
            " model."
        ) from None


def eos_ids_of(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a text: generation_config.json's, else config.json's; one id or a list."""
    chosen = json_object(path / "generation_config.json").get("eos_token_id")
    ids = config.get("eos_token_id") if chosen is None else chosen
    return tuple(
        _token_id(path, "eos_token_id", i)
        for i in (ids if isinstance(ids, list) else [ids])
        if i is not None
    )


def _token_id(path: Path, key: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_IDS:
        raise StepscopeError(
            f"{path} has {value!r} as {key} where a token id belongs; download it again."
        )
    return value


def json_object(file: Path) -> dict[str, Any]:
    """A JSON object, empty if the file is absent; StepscopeError if it is something else."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StepscopeError(f"{file} is not valid JSON ({error}); download it again.") from None
    if not isinstance(value, dict):
        raise StepscopeError(f"{file} is not a JSON object; download it again.")
    return value


def _decoding(file: Path, decoder: Any) -> tuple[TokenBytes, bool]:
    """How tokens turn into bytes, and whether a text's first space is the tokenizer's own."""
    listed = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    steps = [step for step in listed if isinstance(step, dict)] if isinstance(listed, list) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"]:
        return byte_level_bytes, False
    if "ByteFallback" in kinds:
        strips = any(step.get("type") == "Strip" and step.get("start") for step in steps)
        return sentencepiece_bytes, strips
    raise UsageError(
        f"{file} has an unknown decoder ({', '.join(map(str, kinds)) or 'none'}) where byte-level"
        " BPE and SentencePiece with byte fallback are known; choose a Llama-family model."
    )


def _bos_id(
    path: Path, backend: Tokenizer, settings: dict[str, Any], config: dict[str, Any]
) -> int | None:
    named = settings.get("bos_token")
    text = named.get("content") if isinstance(named, dict) else named
    if isinstance(text, str):  # JSON may hold a lone surrogate, which no vocabulary has
        found: int | None = backend.token_to_id(text.encode("utf-8", "replace").decode())
        if found is not None:
            return found
    told = config.get("bos_token_id")
    return None if told is None else _token_id(path, "bos_token_id", told)


def _adds_bos(backend: Tokenizer, settings: dict[str, Any], bos: int | None) -> bool:
    """tokenizer_config.json's word, else what tokenizer.json's post-processor does."""
    said = settings.get("add_bos_token")
    if isinstance(said, bool):
        return said and bos is not None
    return bos is not None and backend.encode("", add_special_tokens=True).ids[:1] == [bos]


def _chat_template(path: Path, settings: dict[str, Any]) -> str | None:
    file = path / TEMPLATE_FILE
    if file.is_file():
        return file.read_text("utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several under names: one of them is the default
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
