"""Tokenizers: rebuilt from a GGUF and read from tokenizer.json; text streamed token by token."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE

from stepscope.errors import StepscopeError, UsageError
from stepscope.models.gguf_file import read_gguf
from stepscope.models.gguf_tokenizer import tokenizer_from_gguf
from stepscope.models.hf_tokenizer import tokenizer_from_directory
from stepscope.models.tokenizer import BYTE_OF, Detokenizer, TextTokenizer
from tests import tiny_llama as tiny

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SYMBOLS = sorted(BYTE_OF, key=lambda c: BYTE_OF[c])
MERGES = ["h e", "l l", "he ll", "Ġ w", "1 2", "12 3"]
TOKENS = [*SPECIALS, *SYMBOLS, *(merge.replace(" ", "") for merge in MERGES), "<tool>"]
KINDS = [3] * len(SPECIALS) + [1] * (len(SYMBOLS) + len(MERGES)) + [4]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
}
TEXTS = [
    "hello world",
    "  two spaces, then\r\n\tmore\n",
    "grüße, 你好, こんにちは, สวัสดี, مرحبا",
    "👩‍👩‍👧‍👦 and 🇫🇷",
    "def f(x):\n    return x**2  # 1234567",
]


def from_gguf(folder: Path, **changes: Any) -> TextTokenizer:
    metadata = {**METADATA, **{f"tokenizer.{k}": v for k, v in changes.items()}}
    found = tokenizer_from_gguf(read_gguf(tiny.write_gguf(folder / "t.gguf", {}, metadata)))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return from_gguf(tmp_path_factory.mktemp("gguf"))


def spelled(tokenizer: TextTokenizer, text: str) -> list[bytes]:
    return [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]


def streamed(tokenizer: TextTokenizer, ids: list[int], skip_special: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special)
    return [*(stream.push(i) for i in ids), stream.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_round_trip(bpe: TextTokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert "".join(streamed(bpe, ids)) == text


def test_merges_and_digits(bpe: TextTokenizer) -> None:
    assert spelled(bpe, "hell w123") == [b"hell", b" w", b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [("smollm", [b"1", b"2", b"3"]), ("llama-bpe", [b"123"]), ("qwen2", [b"1", b"2", b"3"])],
)
def test_each_pre_tokenizer_splits_digits_its_way(
    tmp_path: Path, pre: str, expected: list[bytes]
) -> None:
    tokenizer = from_gguf(tmp_path, **{"ggml.pre": pre, "ggml.add_bos_token": False})
    assert spelled(tokenizer, "123") == expected


def test_qwen2_composes_characters(tmp_path: Path) -> None:
    qwen = from_gguf(tmp_path, **{"ggml.pre": "qwen2"})
    assert qwen.decode(qwen.encode("e\u0301")) == "é"


def test_llama_bpe_keeps_whole_words_and_adds_its_bos(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"ggml.pre": "llama-bpe", "ggml.merges": MERGES[1:]}
    assert from_gguf(tmp_path, **changes).encode("hell")[1:] == [TOKENS.index("hell")]
    assert from_gguf(tmp_path, **changes).encode("") == [1]
    assert from_gguf(tmp_path, **changes, **{"ggml.add_bos_token": False}).encode("") == []


def test_special_tokens_in_text_are_recognised_and_skipped(bpe: TextTokenizer) -> None:
    ids = bpe.encode("he<|im_end|><tool>")
    assert ids == [TOKENS.index("he"), 2, TOKENS.index("<tool>")]
    assert bpe.decode(ids) == "he<tool>"
    assert bpe.decode(ids, skip_special=False) == "he<|im_end|><tool>"
    assert streamed(bpe, ids) == ["he", "", "<tool>", ""]


def test_end_tokens_are_the_files_own_then_the_known_ones(tmp_path: Path) -> None:
    assert from_gguf(tmp_path).eos_ids == (2, 0)
    assert from_gguf(tmp_path, **{"ggml.eos_token_id": 0}).eos_ids == (0, 2)
    assert from_gguf(tmp_path, **{"ggml.eot_token_id": 5}).eos_ids == (2, 5, 0)


def test_an_incomplete_character_is_held_back(bpe: TextTokenizer) -> None:
    ids = bpe.encode("a😀b")
    assert streamed(bpe, ids) == ["a", "", "", "", "😀", "b", ""]
    assert streamed(bpe, ids[:3]) == ["a", "", "", "\ufffd"]


def test_nothing_beyond_the_vocabulary_is_text(bpe: TextTokenizer) -> None:
    assert bpe.vocab_size == len(TOKENS)
    assert bpe.decode([10**6, bpe.vocab_size]) == ""


def test_lone_surrogates_do_not_stop_encoding(bpe: TextTokenizer) -> None:
    assert bpe.decode(bpe.encode("a\udc80b")) == "a?b"


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=60), st.booleans())
def test_streaming_any_ids_equals_decoding_them(
    bpe: TextTokenizer, ids: list[int], skip_special: bool
) -> None:
    """`tokenizers` itself is the oracle, with its own byte-level decoder."""
    whole = bpe.decode(ids, skip_special)
    assert "".join(streamed(bpe, ids, skip_special)) == whole
    assert whole == bpe._backend.decode(ids, skip_special_tokens=skip_special)


@given(st.text(max_size=40))
def test_any_text_survives_the_round_trip(bpe: TextTokenizer, text: str) -> None:
    sound = text.encode("utf-8", "replace").decode()
    assert bpe.decode(bpe.encode(text), skip_special=False) == sound


def test_a_push_reads_only_its_own_token(bpe: TextTokenizer) -> None:
    asked: list[int] = []

    class Counted:
        special_ids = frozenset[int]()
        strips_first_space = False

        def token_bytes(self, token_id: int) -> bytes:
            asked.append(token_id)
            return bpe.token_bytes(token_id)

    ids = [200] * 500  # a byte that never completes a character
    stream = Detokenizer(Counted())  # type: ignore[arg-type]
    for i in ids:
        stream.push(i)
    assert asked == ids


def test_chat_renders_the_models_template(bpe: TextTokenizer) -> None:
    turn = "<|im_start|>user\nhell<|im_end|>\n<|im_start|>"
    assert bpe.chat("hell") == bpe.encode(turn)
    assert bpe.chat([{"role": "user", "content": "hell"}]) == bpe.encode(turn)
    system = "<|im_start|>system\nbe brief<|im_end|>\n"
    assert bpe.chat("hell", system="be brief") == bpe.encode(system + turn)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages[0].content | tojson }}", '"<é & \\"q\\">"'),
        ("{{ strftime_now('%%') }}{{ bos_token }}{{ eos_token }}", "%<|im_start|><|im_end|>"),
        ("{% for m in [1, 2] %}{% break %}{% endfor %}x", "x"),
    ],
)
def test_templates_find_the_functions_they_expect(tmp_path: Path, template: str, text: str) -> None:
    tokenizer = from_gguf(tmp_path, chat_template=template)
    ids = tokenizer.chat('<é & "q">')
    assert tokenizer.decode(ids, skip_special=False) == text


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{% for m in messages %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages[0].absent + 'x' }}",
    ],
)
def test_broken_refusing_and_prying_templates(tmp_path: Path, template: str) -> None:
    tokenizer = from_gguf(tmp_path, chat_template=template)
    with pytest.raises(StepscopeError, match="chat template fails on these messages"):
        tokenizer.chat("hell")


def test_a_base_model_has_no_chat(tmp_path: Path) -> None:
    tokenizer = from_gguf(tmp_path, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(UsageError, match="no chat template"):
        tokenizer.chat("hell")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml.model": "bert"}, "kind 'bert'"),
        ({"ggml.pre": "tekken"}, "pre-tokenizer 'tekken'"),
        ({"ggml.pre": None}, "pre-tokenizer 'missing'"),
        ({"ggml.merges": ["h q"]}, "merges 'h q'"),
        ({"ggml.merges": None}, "'tokenizer.ggml.merges'"),
        ({"ggml.tokens": [*TOKENS, "he"]}, "lists a token twice"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(StepscopeError, match=words):
        from_gguf(tmp_path, **changes)


def byte_level_backend() -> Tokenizer:
    vocab = {token: i for i, token in enumerate(TOKENS)}
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    backend = Tokenizer(BPE(vocab, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False) for t in SPECIALS])
    return backend


def sentencepiece_backend() -> Tokenizer:
    """Llama 2's kind: U+2581 for spaces, bytes as <0x..>, the text's first space dropped."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    backend = Tokenizer(
        BPE(vocab, [("▁", "a")], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return backend


def written(folder: Path, backend: Tokenizer, **settings: Any) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def from_directory(folder: Path, **config: Any) -> TextTokenizer:
    found = tokenizer_from_directory(folder, config)
    assert found is not None
    return found


def test_tokenizer_json_and_gguf_agree(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<|im_start|>"}, "chat_template": TEMPLATE}
    folder = written(tmp_path, byte_level_backend(), **settings)
    from_json = from_directory(folder, eos_token_id=2)
    gguf = from_gguf(tmp_path)
    for text in ["hello world", "grüße 👩‍👩‍👧", "<|im_end|>he"]:
        assert from_json.encode(text) == gguf.encode(text)
    assert from_json.chat("hell") == gguf.chat("hell")
    assert (from_json.bos_id, from_json.add_bos, from_json.eos_ids) == (1, False, (2,))


def test_templates_of_a_directory(tmp_path: Path) -> None:
    named = [{"name": "tool", "template": "t"}, {"name": "default", "template": "he"}]
    folder = written(tmp_path, byte_level_backend(), chat_template=named)
    assert from_directory(folder).chat("x") == [TOKENS.index("he")]
    (folder / "chat_template.jinja").write_text("ll")
    assert from_directory(folder).chat("x") == [TOKENS.index("ll")]


@pytest.mark.parametrize("said", [None, True, False])
def test_bos_is_added_where_the_directory_says_so(tmp_path: Path, said: bool | None) -> None:
    backend = byte_level_backend()
    begin = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    if said is None:
        backend.post_processor = begin
    settings = {} if said is None else {"add_bos_token": said}
    folder = written(tmp_path, backend, bos_token="<|im_start|>", **settings)
    tokenizer = from_directory(folder)
    assert tokenizer.encode("he") == ([] if said is False else [1]) + [TOKENS.index("he")]


def test_sentencepiece_spaces_and_bytes(tmp_path: Path) -> None:
    tokenizer = from_directory(written(tmp_path, sentencepiece_backend()))
    ids = tokenizer.encode("a a😀")
    assert tokenizer.decode(ids) == "a a😀"
    assert streamed(tokenizer, ids) == ["a", " a", "", "", "", "😀", ""]


@given(ids=st.lists(st.sampled_from([0, 1, 2, *range(259, 263)]), max_size=20))
def test_sentencepiece_streaming_equals_decoding(
    ids: list[int], spm: Callable[[], TextTokenizer]
) -> None:
    tokenizer = spm()
    assert "".join(streamed(tokenizer, ids)) == tokenizer._backend.decode(ids)


@pytest.fixture(scope="module")
def spm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], TextTokenizer]:
    folder = written(tmp_path_factory.mktemp("spm"), sentencepiece_backend())
    tokenizer = from_directory(folder)
    return lambda: tokenizer


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "no vocabulary"),
        ('{"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}}', r"decoder \(WordPiece\)"),
        ('{"model": {"vocab": {}}, "decoder": null}', r"decoder \(none\)"),
    ],
)
def test_damaged_and_unknown_tokenizer_files(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(StepscopeError, match=words):
        tokenizer_from_directory(tmp_path, {})


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    assert tokenizer_from_directory(tmp_path, {}) is None
