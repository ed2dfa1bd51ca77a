"""Truncation of texts and pairs to a number of tokens, at no more cost than the tokens that are kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Encoding, Tokenizer

# A text, or a pair for the model's pair template.
Text = str | tuple[str, str]

# The word pattern of GPT-4's tokenizer and its successors (Qwen, Llama 3): a space may begin a word, never lie within.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_WORD_PATTERNS = [{"Regex": _WORDS % digits} for digits in ("", "{1,3}")]


class Truncation(NamedTuple):
    """Keep `limit` tokens, special ones included; of a pair the longer half is cut first. `left` keeps the end."""

    limit: int
    left: bool

    def kept(self, encoding: Encoding) -> NDArray[np.intp] | None:
        """The positions of the tokens that stay, special ones always; None where all do."""
        if len(encoding) <= self.limit:
            return None
        half_of = _halves(encoding)
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
        return max(0, self.limit - int((half_of < 0).sum()))


def _halves(encoding: Encoding) -> NDArray[np.int8]:
    """Which half each token belongs to, 0 or 1; -1 for special ones."""
    return np.array([-1 if half is None else half for half in encoding.sequence_ids], dtype=np.int8)


class Shortener:
    """Cuts very long texts to `characters` before tokenization, only where that cannot change the result.

    A text is cut at a space between two letters or digits, in a tokenizer that never joins characters over a space
    (`safe`): then the tokens of what is kept are those of the whole text. If they exceed the limit, truncation would
    have dropped everything beyond; if they do not, the whole text must be tokenized after all. `holds` decides.
    """

    def __init__(self, characters: int, safe: bool) -> None:
        self._characters = characters
        self._safe = safe

    def short(self, text: Text, left: bool) -> Text:
        """`text` itself, or a shorter one; of a pair each half by itself."""
        if isinstance(text, str):
            return self.short_text(text, left)
        first, second = (self.short_text(half, left) for half in text)
        return text if first is text[0] and second is text[1] else (first, second)

    def short_text(self, text: str, left: bool) -> str:
        if not self._safe or len(text) <= self._characters:
            return text
        at = _space(text, len(text) - self._characters if left else self._characters, after=left)
        if at is None:
            return text
        return text[at:] if left else text[:at]

    def holds(self, encoding: Encoding, short: Text, text: Text, truncation: Truncation) -> bool:
        """Whether truncating `encoding`, that of `short`, keeps the same tokens as truncating that of `text`."""
        if short is text:
            return True
        if isinstance(short, str) or isinstance(text, str):
            return len(encoding) > truncation.limit
        half_of = _halves(encoding)
        room, kept = truncation.room(half_of), truncation.counts(half_of)
        if sum(kept) < room:
            return False
        # The shorter half is untouched and the longer one fills the rest, or both have half: the text beyond a cut
        # could only make a half longer that is long enough.
        shorter = kept.index(min(kept))
        if kept[shorter] < room // 2:
            return short[shorter] is text[shorter]
        return kept[0] == kept[1]


def _space(text: str, at: int, *, after: bool) -> int | None:
    """The first space from `at` on, or the last one before it, between two letters or digits."""
    while (at := text.find(" ", at) if after else text.rfind(" ", 1, at)) > 0:
        if text[at - 1].isalnum() and text[at + 1 : at + 2].isalnum():
            return at
        at += 1 if after else 0
    return None


def breaks_at_spaces(tokenizer: Tokenizer) -> bool:
    """Whether no token can span letters or digits on both sides of a space; False where that is not certain."""
    if any(" " in token.content.strip() for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    # As in tokenizer.json; the whole of that has the vocabulary, which takes some 10 ms to write and to parse.
    spec = None if tokenizer.pre_tokenizer is None else json.loads(tokenizer.pre_tokenizer.__getstate__())
    return any(_splits(part) for part in flattened(spec, "pretokenizers"))


def _splits(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind == "ByteLevel":
        return bool(part.get("use_regex", True))
    if kind == "Split":
        return part["pattern"] in _WORD_PATTERNS and part["behavior"] == "Isolated" and not part["invert"]
    if kind == "Metaspace":
        return bool(part.get("split", True))
    return kind in ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


def flattened(spec: dict[str, Any] | None, children: str) -> Iterable[dict[str, Any]]:
    """The parts of a normalizer or pre-tokenizer of tokenizer.json, sequences flattened."""
    if spec is None:
        return []
    if spec["type"] == "Sequence":
        return [part for child in spec[children] for part in flattened(child, children)]
    return [spec]
