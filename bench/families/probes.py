"""What every row is asked: one word to more than the longest length, in several scripts, equal lengths, and no text."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.models import CORPUS, PAIRS, TEXTS

from teimgr.engine.job import Input, Pair

BLANK = " "
"""A text without words: the special tokens alone."""


def probes(longest: int, pairs: bool) -> list[Input]:
    """Short texts and those of about half, most, and more than `longest` tokens; pairs where `pairs`."""
    words = [word for line in CORPUS for word in line.split()]
    long = [" ".join(words[i % len(words)] for i in range(count)) for count in _counts(longest)]
    if not pairs:
        return [*TEXTS, *long, BLANK]
    return [*(Pair(*pair) for pair in PAIRS), *(Pair(TEXTS[2], text) for text in long), Pair(long[-1], TEXTS[4])]


def _counts(longest: int) -> Sequence[int]:
    """Numbers of words, of some two tokens each."""
    return (longest // 4, longest * 3 // 8, longest // 2, longest)
