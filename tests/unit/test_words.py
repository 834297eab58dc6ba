"""Every phase has its words, and no word is that of a verdict or a flag."""

from __future__ import annotations

from stepscope.analyze.metrics import METRICS
from stepscope.analyze.rules import FLAGS, RULES
from stepscope.analyze.words import PHASES_IN_WORDS, WORDS
from stepscope.records import PHASES


def test_every_phase_is_explained() -> None:
    assert tuple(PHASES_IN_WORDS) == PHASES


def test_a_word_is_one_thing() -> None:
    assert not WORDS.keys() & {*RULES, *FLAGS, *METRICS}
