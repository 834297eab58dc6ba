"""Stop strings, stop ids, min_tokens and failing rows: where a text ends, on the pure engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepscope.engine.plan import StepPlan
from stepscope.engine.policies import POLICIES
from stepscope.engine.request import Request
from stepscope.engine.stops import StopText
from stepscope.runner.replay import TokenText
from tests.engine.harness import ContentRunner, Outcome, alone, ask, build, finish, run

ALPHABET = "abé日🙂"  # one to four bytes in UTF-8
texts = st.text(ALPHABET, max_size=14)
stop_lists = st.lists(st.text(ALPHABET, min_size=1, max_size=4), min_size=1, max_size=3)


# ------------------------------------------------------------------ the reference


def first_end(text: str, stops: Sequence[str], unarmed: int = 0) -> tuple[int, int] | None:
    """(end, begin) of the stop string that is complete first, by trying every place."""
    found = [
        (begin + len(stop), begin)
        for stop in stops
        for begin in range(len(text))
        if text.startswith(stop, begin) and begin + len(stop) > unarmed
    ]
    return min(found, default=None)


def cut(text: str, stops: Sequence[str], unarmed: int = 0) -> str:
    found = first_end(text, stops, unarmed)
    return text if found is None else text[: found[1]]


def shown(pieces: Sequence[str], stops: Sequence[str], unarmed: int = 0) -> tuple[list[str], bool]:
    """What StopText releases piece by piece (flushed at the end), and whether it was met."""
    watch = StopText(stops)
    released = [watch.push(piece, i >= unarmed) for i, piece in enumerate(pieces)]
    return [*released, watch.flush()], watch.met


# ------------------------------------------------------------------ the watch alone

CASES: list[tuple[str, list[str], list[str], list[str]]] = [
    # what it is, stop strings, pieces, what is released with each piece and at the end
    ("never met", ["##"], ["a#", "b", "#"], ["a", "#b", "", "#"]),
    ("inside one piece", ["##"], ["a##b", "c"], ["a", "", ""]),
    ("across two pieces", ["##"], ["a#", "#b", "c"], ["a", "", "", ""]),
    ("at the very start", ["ab"], ["a", "b"], ["", "", ""]),
    ("overlapping prefix", ["aab"], ["a", "a", "a", "b", "x"], ["", "", "a", "", "", ""]),
    ("prefix of itself", ["abac"], ["aba", "bac", "z"], ["", "ab", "", ""]),
    ("two, the second", ["xyz", "b"], ["ax", "yb", "z"], ["a", "xy", "", ""]),
    ("two, the first complete wins", ["abcd", "c"], ["ab", "c", "d"], ["", "ab", "", ""]),
    ("of two with one end the longer", ["c", "abc"], ["xabc"], ["x", ""]),
    ("multi-byte characters", ["日é"], ["a日", "日é🙂"], ["a", "日", ""]),
    ("empty pieces", ["ab"], ["", "a", "", "b"], ["", "", "", "", ""]),
]


@pytest.mark.parametrize(("name", "stops", "pieces", "expected"), CASES, ids=[c[0] for c in CASES])
def test_what_is_released_when(
    name: str, stops: list[str], pieces: list[str], expected: list[str]
) -> None:
    released, met = shown(pieces, stops)
    assert released == expected
    assert met == (name != "never met")


@given(texts, stop_lists)
def test_the_pieces_do_not_matter(text: str, stops: list[str]) -> None:
    whole, met = shown([text], stops)
    single, met_too = shown(list(text), stops)
    assert "".join(whole) == "".join(single) == cut(text, stops)
    assert met == met_too == (first_end(text, stops) is not None)


@given(st.lists(texts, max_size=6), stop_lists, st.integers(0, 4))
def test_released_text_is_the_reference_and_only_what_may_stop_is_held(
    pieces: list[str], stops: list[str], unarmed: int
) -> None:
    text = "".join(pieces)
    ends = [0, *accumulate(map(len, pieces))]
    expected = cut(text, stops, ends[min(unarmed, len(pieces))])
    released, _ = shown(pieces, stops, unarmed)
    assert "".join(released) == expected
    for count in range(len(pieces) + 1):
        so_far = "".join(released[:count])
        assert expected.startswith(so_far)
        if first_end(text[: ends[count]], stops, ends[min(unarmed, count)]) is None:
            held = text[len(so_far) : ends[count]]
            beginnings = [s[:n] for s in stops for n in range(len(s))]
            tails = [text[: ends[count]].endswith(b) * len(b) for b in beginnings]
            assert len(held) == max(tails), "the longest tail that begins a stop string, no more"


# ------------------------------------------------------------------ in the engine


class Bytes:
    """A vocabulary of byte strings, and 0 as its end token."""

    special_ids = frozenset({0})
    strips_first_space = False

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.pieces = [b"", *pieces]

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id]


class Scripted(ContentRunner):
    """Says what it is told to, request by request; a request without a script as ever."""

    def __init__(self, page_size: int, scripts: Mapping[int, Sequence[int]]) -> None:
        super().__init__(page_size)
        self.scripts = scripts

    def sample(self, logits: list[list[int]], batch: StepPlan) -> list[int]:
        usual = super().sample(logits, batch)
        asked = [s.request for s in batch.slices if s.samples]
        return [
            self.scripts[r.id][r.output_tokens] if r.id in self.scripts else token
            for r, token in zip(asked, usual, strict=True)
        ]


def spoken(
    scripts: Mapping[int, Sequence[bytes | None]], requests: Sequence[Request], **options: Any
) -> Outcome:
    """The engine with these byte pieces as tokens (None: EOS), and its text."""
    vocabulary = sorted({p for pieces in scripts.values() for p in pieces if p is not None})
    ids = {None: 0} | {piece: i for i, piece in enumerate(vocabulary, 1)}
    page_size = options.setdefault("page_size", 4)
    runner = Scripted(page_size, {k: [ids[p] for p in v] for k, v in scripts.items()})
    made = build(requests, runner=runner, eos=[0], **options)
    # Requests without a script say any id at all.
    made.engine.text = TokenText(Bytes([*vocabulary, *[b"~"] * 256]))  # type: ignore[arg-type]
    return finish(made)


def text_of(done: Outcome, request: int) -> str:
    return "".join(o.piece for step in done.emitted for o in step if o.request.id == request)


def said(pieces: Sequence[bytes | None], **how: Any) -> tuple[str, str | None, int]:
    """(text, finish reason, output tokens) of one request that is told to say these pieces."""
    how.setdefault("max_tokens", len(pieces))
    done = spoken({0: pieces}, [ask(0, 5, **how)])
    record = done.records[0]
    return text_of(done, 0), record.finish_reason, record.output_tokens


def test_it_stops_at_the_token_that_completes_the_string() -> None:
    pieces = [b"Hel", b"lo\n", b"\nUs", b"er:", b" no", b"!"]
    assert said(pieces, stop=("\n\nUser:",)) == ("Hello", "stop", 4)
    assert said(pieces, stop=("\n\n",)) == ("Hello", "stop", 3)
    assert said(pieces, stop=("nobody", "er: ")) == ("Hello\n\nUs", "stop", 5)


def test_a_character_of_several_tokens() -> None:
    raw = "a🙂b".encode()
    pieces = [raw[i : i + 1] for i in range(len(raw))]
    assert said(pieces, stop=("🙂",)) == ("a", "stop", 5)
    assert said(pieces, stop=("🙂b",)) == ("a", "stop", 6)
    assert said(pieces, stop=("🙃",)) == ("a🙂b", "length", 6)


def test_at_the_very_start_and_at_the_last_token() -> None:
    assert said([b"ab", b"c"], stop=("ab",)) == ("", "stop", 1)
    assert said([b"ab", b"c"], stop=("c",)) == ("ab", "stop", 2)
    assert said([b"x", b"a", b"b"], stop=("ab",)) == ("x", "stop", 3)


def test_never_met_ends_like_any_other_and_shows_what_was_held_back() -> None:
    assert said([b"a", b"#", b"#"], stop=("###",)) == ("a##", "length", 3)
    assert said([b"a", b"#", None], stop=("##",)) == ("a#", "eos", 3)
    assert said([b"a", b"\xf0\x9f"], stop=("🙂",)) == ("a\ufffd", "length", 2)
    assert said([b"a", b"\xf0\x9f"], stop=("\ufffd",)) == ("a", "stop", 2)


def test_stop_ids_are_not_shown_and_end_the_text() -> None:
    # Pieces in order are tokens 1, 2, 3.
    assert said([b"a", b"b", b"c"], stop_ids=(3,), max_tokens=3) == ("ab", "stop", 3)
    assert said([b"a", b"b", b"c"], stop_ids=(2, 9)) == ("a", "stop", 2)
    assert said([b"a", b"b", b"c"], stop_ids=(2,), stop=("ac",)) == ("a", "stop", 2)
    assert said([b"a", None, b"c"], stop_ids=(0,), ignore_eos=True) == ("a", "stop", 2)
    assert said([b"a", None, b"c"], ignore_eos=True) == ("ac", "length", 3)


@pytest.mark.parametrize(
    ("least", "expected"),
    [
        (0, ("", "stop", 1)),
        (1, ("#", "stop", 2)),
        (2, ("##", "stop", 3)),
        (3, ("###", "length", 3)),
    ],
)
def test_min_tokens_before_a_stop_string(least: int, expected: tuple[str, str, int]) -> None:
    assert said([b"#", b"#", b"#"], stop=("#",), min_tokens=least) == expected


def test_min_tokens_before_eos_and_stop_ids() -> None:
    """Also with a runner that does not suppress them."""
    assert said([None, b"a", None, b"b"], min_tokens=1) == ("a", "eos", 3)
    assert said([b"a", b"a", b"a", b"b"], min_tokens=2, stop_ids=(1,)) == ("aa", "stop", 3)
    assert said([b"#", b"|", b"#", b"|"], min_tokens=2, stop=("#|",)) == ("#|", "stop", 4)
    assert said([b"#", b"|", b"#", b"|"], min_tokens=1, stop=("#|",)) == ("", "stop", 2)


def test_a_stopped_request_is_complete_and_the_others_never_notice() -> None:
    others = [ask(i, 6 + i, 12) for i in (1, 2)]
    pieces = [b"a", b"b", b"#", b"#", b"c", b"c"]
    done = spoken({0: pieces}, [ask(0, 5, 6, stop=("##",)), *others], pages=60)
    record = done.records[0]
    assert (record.finish_reason, record.error, record.output_tokens) == ("stop", None, 4)
    assert done.requests[0].pages.tolist() == [] and done.scheduler.pool.used == 0
    last = next(row for row in done.work if row.num_finished)
    assert last.num_output_tokens == 3 and record.finished_ns == last.emitted_ns
    parts = [p for p in done.parts if p.request == 0]
    assert sum(p.output_tokens for p in parts) == 4 and parts[-1].last_step == last.step
    mine = [o for step in done.emitted for o in step if o.request.id == 0]
    assert [o.finished for o in mine] == [False, False, False, True]
    for other in others:
        prompt = other.tokens[: other.prompt_tokens]
        assert done.outputs[other.id] == alone(prompt, 12, eos=[0])


byte_texts = st.text(ALPHABET + "#", min_size=1, max_size=12)


@st.composite
def tokenized(draw: st.DrawFn) -> list[bytes]:
    """A text cut into tokens anywhere, also inside a character, and perhaps a broken byte."""
    raw = draw(byte_texts).encode() + draw(st.sampled_from([b"", b"\xf0\x9f", b"\xff"]))
    cuts = draw(st.sets(st.integers(1, len(raw))))
    ends = sorted({*cuts, len(raw)} - {0})
    return [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(tokenized(), stop_lists), min_size=1, max_size=4),
    st.sampled_from(sorted(POLICIES)),
    st.integers(8, 40),
)
def test_text_equals_decoding_everything_and_cutting_it(
    asked: list[tuple[list[bytes], list[str]]], policy: str, pages: int
) -> None:
    """Under every policy, and with so few pages that requests are preempted in mid-word."""
    scripts = {i: pieces for i, (pieces, _) in enumerate(asked)}
    requests = [ask(i, 5, len(p), stop=tuple(stops)) for i, (p, stops) in enumerate(asked)]
    done = spoken(scripts, requests, policy=policy, pages=pages)
    for i, (pieces, stops) in enumerate(asked):
        whole = b"".join(pieces).decode("utf-8", errors="replace")
        assert text_of(done, i) == cut(whole, stops)
        met = first_end(whole, stops) is not None
        assert done.records[i].finish_reason == ("stop" if met else "length")
    assert done.scheduler.pool.used == 0
    assert done.engine.text._open == {}, "no text stays open"  # type: ignore[attr-defined]


# ------------------------------------------------------------------ rows that say nothing


def test_a_failing_request_leaves_no_text_open() -> None:
    done = build([ask(0, 5, 6), ask(1, 5, 2)], runner=Scripted(16, {0: [1, -1], 1: [1, 1]}))
    text = done.engine.text = TokenText(Bytes([b"\xf0"]))  # type: ignore[arg-type]
    finish(done)
    assert [r.finish_reason for r in done.records.values()] == ["error", "length"]
    assert text._open == {}


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("when", [0, 3])
def test_a_row_that_is_not_finite_fails_alone(policy: str, when: int) -> None:
    asked = [ask(i, 5 + i, 10) for i in range(4)]
    script = {2: [7] * when + [-1]}
    done = run(asked, policy, page_size=4, runner=Scripted(4, script))
    record = done.records[2]
    assert record.finish_reason == "error" and "not finite" in str(record.error)
    assert record.error and record.error.startswith("request 2: ")
    assert record.output_tokens == when and done.outputs[2] == [7] * when
    assert (record.first_token_ns is None) == (when == 0) and record.finished_ns is not None
    for i in (0, 1, 3):
        assert done.outputs[i] == alone(asked[i].tokens[: 5 + i], 10)
        assert done.records[i].finish_reason == "length"
    assert sum(p.output_tokens for p in done.parts) == sum(
        r.output_tokens for r in done.records.values()
    )
    assert sum(row.num_output_tokens or 0 for row in done.work) == 30 + when
    assert done.scheduler.pool.used == 0
