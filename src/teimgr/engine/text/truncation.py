"""Truncates texts and pairs to a number of tokens, at a cost proportional to the kept tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding

from teimgr.engine.text.boundaries import Boundaries
from teimgr.errors import InputTooLong

# A text, or a pair for the model's pair template.
Text = str | tuple[str, str]

# Characters per token of the first attempt; languages have some four, code and numbers fewer.
FIRST_PER_TOKEN = 16
_MIN_FIRST = 4096
# A text that must not be truncated is tokenized in full up to this many characters; of longer texts, a part with too
# many tokens is enough to refuse them.
COUNTED_CHARACTERS = 2**16
# Limit of one call of the library: at most half a second without the GIL, and some 10 ms to read its tokens.
MAX_CHARACTERS = 2**18
# Limit of texts with few tokens, like half a million newlines.
MAX_SCANNED_CHARACTERS = 2**19
# Tokens at the beginning of a cut text that may differ from those of the whole text.
_MAX_SLACK = 4096


class Truncation(NamedTuple):
    """Keep `limit` tokens, including special ones; of a pair the longer half is cut first. `left` keeps the end."""

    limit: int
    left: bool

    def kept(self, encoding: Encoding) -> NDArray[np.intp] | None:
        """Return the positions of the tokens that stay, special ones always; None if all do."""
        if len(encoding) <= self.limit:
            return None
        half_of = _halves(encoding)
        stays = half_of < 0
        for half, count in enumerate(self.counts(half_of)):
            tokens = np.flatnonzero(half_of == half)
            stays[tokens[len(tokens) - count :] if self.left else tokens[:count]] = True
        return np.flatnonzero(stays)

    def counts(self, half_of: NDArray[np.int8]) -> tuple[int, int]:
        """Return how many tokens of the first and second half stay; a single text is a first half."""
        first, second = (int((half_of == half).sum()) for half in (0, 1))
        room = self.room(half_of)
        if first + second <= room:
            return first, second
        if min(first, second) * 2 <= room:  # the shorter half is kept whole
            return (first, room - first) if first <= second else (room - second, second)
        less = room // 2
        return (less, room - less) if first <= second else (room - less, less)

    def room(self, half_of: NDArray[np.int8]) -> int:
        return max(0, self.limit - int((half_of < 0).sum()))


def _halves(encoding: Encoding) -> NDArray[np.int8]:
    """Return the half of each token, 0 or 1; -1 for special ones."""
    return np.array([-1 if half is None else half for half in encoding.sequence_ids], dtype=np.int8)


def longest_part(text: Text) -> int:
    """Return the characters of a text, or of the longer half of a pair."""
    return len(text) if isinstance(text, str) else max(len(text[0]), len(text[1]))


class Short(NamedTuple):
    """A text, or its rest after a cut.

    If `exact`, its tokens equal those of the whole text up to (or from) the cut, except at most `slack` of them.
    """

    text: Text
    exact: bool
    slack: int = 0


class Shortener:
    """Cuts long texts before tokenization, only where that cannot change the result.

    A cut is exact if no token of the whole text spans it (`Boundaries`). Truncation to `tokens` then keeps the same
    tokens if the rest has more. The first cut leaves `first` characters, 16 per token, enough for nearly all texts;
    each further cut leaves four times as many. The last size bounds the work for one text. Cuts that are not exact are
    skipped, so a text without a place to cut is refused at once.
    """

    def __init__(self, boundaries: Boundaries, tokens: int) -> None:
        self._boundaries = boundaries
        self.first = min(max(tokens * FIRST_PER_TOKEN, _MIN_FIRST), MAX_CHARACTERS)

    def sizes(self, text: Text, first: int) -> Iterator[int]:
        """Return the characters to cut a text to if `first` did not decide, up to the whole of it or the bound."""
        size, longest = first, longest_part(text)
        while size < min(longest, MAX_SCANNED_CHARACTERS):
            size = min(size * 4, MAX_CHARACTERS) if size < MAX_CHARACTERS else MAX_SCANNED_CHARACTERS
            yield size

    def cuts(self, text: Text, left: bool, first: int) -> Iterator[Short]:
        """What to tokenize, one after the other until one decides: `text` cut to `first` characters and to more.

        All are exact but for one: of a text that only the last size is enough for, the cut before it tells whether it
        has so few tokens that this is allowed.
        """
        for size in (first, *self.sizes(text, first)):
            short = self.short(text, left, size)
            if short.exact or (size == MAX_CHARACTERS and self.short(text, left, MAX_SCANNED_CHARACTERS).exact):
                yield short

    def short(self, text: Text, left: bool, characters: int) -> Short:
        """Return `text` cut to `characters`, of a pair each half; its beginning is cut off if `left`."""
        if isinstance(text, str):
            return self._short(text, left, characters, slack=_MAX_SLACK)
        halves = [self._short(half, left, characters, slack=0) for half in text]
        first, second = (half.text for half in halves)
        assert isinstance(first, str)
        assert isinstance(second, str)
        whole = first is text[0] and second is text[1]
        return Short(text if whole else (first, second), all(half.exact for half in halves))

    def _short(self, text: str, left: bool, characters: int, slack: int) -> Short:
        if len(text) <= characters:
            return Short(text, exact=True)
        if left:
            begin = len(text) - characters
            found = self._boundaries.first(text, begin, begin + characters // 2, slack)
            return Short(text[begin:], exact=False) if found is None else Short(text[found.at :], True, found.slack)
        at = self._boundaries.last(text, characters // 2, characters)
        return Short(text[:characters], exact=False) if at is None else Short(text[:at], exact=True)

    def decides(self, encoding: Encoding, short: Short, text: Text, truncation: Truncation) -> bool:
        """True if truncating `encoding`, that of `short`, keeps the same tokens as truncating that of `text`."""
        if short.text is text:
            return True
        if not short.exact:
            return False
        if isinstance(short.text, str) or isinstance(text, str):
            return len(encoding) > truncation.limit + short.slack
        half_of = _halves(encoding)
        room, kept = truncation.room(half_of), truncation.counts(half_of)
        if sum(kept) < room:
            return False
        # Either the shorter half is whole and the longer one fills the rest, or both have half of the room: the text
        # after a cut could only lengthen a half that is long enough.
        shorter = kept.index(min(kept))
        if kept[shorter] < room // 2:
            return short.text[shorter] is text[shorter]
        return kept[0] == kept[1]


def too_many_characters(encoding: Encoding | None, limit: int, given: int, beyond: int = 0) -> InputTooLong:
    """The refusal of a text that no cut decided; `encoding` is of the largest one that was tokenized, if any was.
    `beyond` is what the input may have in tokens besides the `limit` of its text.
    """
    if encoding is None:
        most, why = MAX_SCANNED_CHARACTERS, "where these can be cut nowhere"
    elif len(encoding) > limit:
        most, why = MAX_CHARACTERS, "where these can be cut nowhere"
    else:
        most, why = MAX_SCANNED_CHARACTERS, f"where these have fewer than {limit + beyond} tokens"
    message = f"Input validation error: `inputs` must have at most {most} characters {why}. Given: {given}"
    return InputTooLong(message, limit + beyond, f"{given} characters")


def may_try(short: Short | None, before: Encoding, limit: int) -> TypeGuard[Short]:
    """True if the next cut of a text may be tokenized; `before` is the encoding of the one before."""
    return short is not None and (longest_part(short.text) <= MAX_CHARACTERS or len(before) <= limit)


def too_long(limit: int, given: int | str) -> InputTooLong:
    message = f"Input validation error: `inputs` must have less than {limit} tokens. Given: {given}"
    return InputTooLong(message, limit, f"{given} tokens")
