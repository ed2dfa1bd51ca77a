"""Very long texts cut before they cost time, only where that provably changes nothing.

A cut lies at a space between two letters or digits, in a tokenizer that never joins characters over a space: then the
tokens of what is kept are those of the whole text. If they exceed the limit, truncation would have dropped everything
beyond; if they do not, the whole text has to be tokenized after all. `Shortener.holds` tells which.
"""

from __future__ import annotations

from tokenizers import Encoding

from teimgr.engine.tokenizer_library import Text
from teimgr.engine.truncation import Cut, halves


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
