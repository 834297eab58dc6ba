"""SentencePiece from scores alone, against merging by hand."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepscope.errors import StepscopeError
from stepscope.models.gguf_file import read_gguf
from stepscope.models.gguf_tokenizer import tokenizer_from_gguf
from stepscope.models.tokenizer import TextTokenizer
from tests import tiny_llama as tiny

SPACE = "\u2581"
WORDS = ["ab", "bc", "abc", "aa", "aab", f"{SPACE}a", f"{SPACE}ab", "ca", "cab", SPACE * 2, "bb"]
CONTROL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CHARACTERS = [SPACE, "a", "b", "c"]
TOKENS = [*CONTROL, *BYTES, *CHARACTERS, *WORDS, "<turn>"]
SCORES = [0.0] * 259 + [-100.0] * 4 + [-float(n) for n in range(len(WORDS))] + [0.0]
KINDS = [2, 3, 3] + [6] * 256 + [1] * (4 + len(WORDS)) + [4]
METADATA: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.token_type": KINDS,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


def tokenizer_with(folder: Path, **changes: Any) -> TextTokenizer:
    metadata = METADATA | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    found = tokenizer_from_gguf(read_gguf(tiny.write_gguf(folder / "t.gguf", {}, metadata)))
    assert found is not None
    return found


def merged(text: str) -> list[int]:
    """The best neighbours first, the leftmost of equals; what is no piece falls into bytes."""
    pieces = list(text.replace(" ", SPACE))
    score = dict(zip(WORDS, SCORES[263:], strict=False))
    while True:
        best = max(
            ((score.get(a + b, -1e9), -i) for i, (a, b) in enumerate(pairwise(pieces))),
            default=(-1e9, 0),
        )
        if best[0] == -1e9:
            break
        at = -best[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        known = piece in CHARACTERS or piece in WORDS
        ids += [TOKENS.index(piece)] if known else [3 + byte for byte in piece.encode()]
    return ids


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return tokenizer_with(tmp_path_factory.mktemp("spm"), add_space_prefix=False)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(text=st.text(alphabet="abc \u00e9\n", max_size=24))
def test_merges_are_those_of_the_scores(plain: TextTokenizer, text: str) -> None:
    assert plain.encode(text) == [1, *merged(text)]
    assert plain.decode(plain.encode(text)) == text


def test_a_text_begins_as_after_a_space_unless_told(tmp_path: Path) -> None:
    by_default = tokenizer_with(tmp_path)
    assert by_default.encode("ab") == [1, TOKENS.index(f"{SPACE}ab")]
    assert by_default.decode(by_default.encode("ab")) == "ab"


def test_user_defined_tokens_are_found_whole(plain: TextTokenizer) -> None:
    assert plain.encode("a<turn>b") == [1, *(TOKENS.index(t) for t in ("a", "<turn>", "b"))]


def test_bos_is_left_out_where_the_file_says_so(tmp_path: Path) -> None:
    assert tokenizer_with(tmp_path, add_bos_token=False).encode("") == []


@pytest.mark.parametrize("changes", [{"scores": SCORES[:-1]}, {"token_type": KINDS[:-1]}])
def test_one_score_and_kind_for_each_token(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(StepscopeError, match="kinds of token"):
        tokenizer_with(tmp_path, **changes)
    with pytest.raises(StepscopeError, match=r"tokenizer\.ggml\.scores"):
        tokenizer_with(tmp_path, scores=None)
