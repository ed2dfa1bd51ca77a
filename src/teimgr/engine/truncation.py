"""Very long texts cut before they cost time, only where that provably changes nothing.

A cut lies at a space between two letters or digits, in a tokenizer that never joins characters over a space: then the
tokens of what is kept are those of the whole text. If they exceed the limit, truncation would have dropped everything
beyond; if they do not, the whole text has to be tokenized after all. `Shortener.holds` tells which.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.tokenizer_files import Text


class Cut(NamedTuple):
    """Keep `limit` tokens, special ones included; of a pair the longer half is cut first. `left` keeps the end."""

    limit: int
    left: bool

    def kept(self, encoding: Encoding) -> NDArray[np.intp] | None:
        """Where the tokens are that stay, special ones always; None where all do."""
        if len(encoding) <= self.limit:
            return None
        half_of = halves(encoding)
        stays = half_of < 0
        for half, count in enumerate(self.counts(half_of)):
            tokens = np.flatnonzero(half_of == half)
            stays[tokens[len(tokens) - count :] if self.left else tokens[:count]] = True
        return np.flatnonzero(stays)

    def counts(self, half_of: NDArray[np.int8]) -> tuple[int, int]:
        """How many tokens of the first and of the second half stay; a single text is a first half."""
        first, second = (int((half_of == half).sum()) for half in (0, 1))
        room = self.room(half_of)
        if first + second <= room:
            return first, second
        if min(first, second) * 2 <= room:  # the shorter one stays whole
            return (first, room - first) if first <= second else (room - second, second)
        less = room // 2
        return (less, room - less) if first <= second else (room - less, less)

    def room(self, half_of: NDArray[np.int8]) -> int:
        """How many tokens may stay beside the special ones."""
        return max(0, self.limit - int((half_of < 0).sum()))


def halves(encoding: Encoding) -> NDArray[np.int8]:
    """Which half each token is of, 0 or 1; -1 for special ones."""
    return np.array([-1 if half is None else half for half in encoding.sequence_ids], dtype=np.int8)


class Shortener:
    """Cuts to `characters`; `safe` is whether the tokenizer breaks at spaces."""

    def __init__(self, characters: int, safe: bool) -> None:
        self._characters = characters
        self._safe = safe

    def short(self, text: Text, left: bool) -> Text:
        """`text` itself, or what is left of it; of a pair each half by itself."""
        if isinstance(text, str):
            return self.short_text(text, left)
        first, second = (self.short_text(half, left) for half in text)
        return text if first is text[0] and second is text[1] else (first, second)

    def short_text(self, text: str, left: bool) -> str:
        """The same for one text."""
        if not self._safe or len(text) <= self._characters:
            return text
        at = _space_after(text, len(text) - self._characters) if left else _space_before(text, self._characters)
        if at is None:
            return text
        return text[at:] if left else text[:at]

    def holds(self, encoding: Encoding, short: Text, text: Text, cut: Cut) -> bool:
        """Whether what `cut` keeps of `encoding`, which is that of `short`, is what it keeps of `text` too."""
        if short is text:
            return True
        if isinstance(short, str) or isinstance(text, str):
            return len(encoding) > cut.limit
        half_of = halves(encoding)
        room, kept = cut.room(half_of), cut.counts(half_of)
        if sum(kept) < room:
            return False
        # The shorter half is untouched and the longer one fills the rest, or both have half: whatever lies beyond a
        # cut could only make a half longer that is long enough.
        shorter = kept.index(min(kept))
        if kept[shorter] < room // 2:
            return short[shorter] is text[shorter]
        return kept[0] == kept[1]


def _space_before(text: str, at: int) -> int | None:
    """The last space at or before `at` between two letters or digits."""
    while (at := text.rfind(" ", 1, at)) > 0:
        if text[at - 1].isalnum() and text[at + 1 : at + 2].isalnum():
            return at
    return None


def _space_after(text: str, at: int) -> int | None:
    at -= 1
    while (at := text.find(" ", at + 1)) > 0:
        if text[at - 1].isalnum() and text[at + 1 : at + 2].isalnum():
            return at
    return None
