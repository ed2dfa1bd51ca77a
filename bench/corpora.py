"""The texts of `bench peers`, cut by tokens of the model's own tokenizer: mixed lengths, short, all of one length."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import corpus, weights

CORPORA = ("mixed", "short", "all-256", "all-512")
DESCRIBED = {
    "mixed": "8 to 512 tokens, long-tailed",
    "short": "5 to 20 tokens",
    "all-256": "256 tokens each",
    "all-512": "512 tokens each",
}
"""The lengths of each corpus in tokens, special tokens included."""
_MIXED = (8, 512)
_SHORT = (5, 20)
_SEED = 21
_STREAM_TEXTS = 400  # at least, of the prose that short and long texts are cut from
_MAX_TRIES = 50  # windows that are looked at, for each that is wanted


def names(model: Path) -> tuple[str, ...]:
    """The corpora of a model: one whose inputs are cut before 512 tokens has no `all-512`."""
    return CORPORA if weights.longest_input(model) >= 512 else CORPORA[:-1]


def corpora(model: Path, count: int) -> dict[str, list[str]]:
    """Different texts, always the same for a tokenizer and a Python installation: `count` of mixed lengths, four times
    as many short ones, and of 256 and 512 tokens (the latter only where the model takes them) as many as have about
    half of the mixed ones' tokens. Lengths are of a text alone, also where the model reads pairs.

    Raises:
        RuntimeError: the prose of this installation has too few such texts.
    """
    tokenizer = _tokenizer(model)
    found = {
        "mixed": _mixed(tokenizer, count),
        "short": _windows(tokenizer, 4 * count, *_SHORT),
        "all-256": _windows(tokenizer, max(1, count // 6), 256, 256),
    }
    if "all-512" in names(model):
        found["all-512"] = _windows(tokenizer, max(1, count // 12), 512, 512)
    return found


def token_counts(model: Path, texts: list[str]) -> list[int]:
    """The tokens of each text with special ones, uncut."""
    return [len(encoding.ids) for encoding in _tokenizer(model).encode_batch(texts)]


def _mixed(tokenizer: Any, count: int) -> list[str]:
    """Texts as they are; too short ones are left out, too long ones cut."""
    low, high = _MIXED
    texts = list(dict.fromkeys(corpus.corpus(count + count // 2 + 8)))
    found = []
    special = tokenizer.num_special_tokens_to_add(False)
    for text, encoding in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        if len(encoding.ids) + special >= low:
            end = encoding.offsets[: high - special][-1][1]
            found.append(text if len(encoding.ids) + special <= high else text[:end])
    return _enough(found, count)


def _windows(tokenizer: Any, count: int, low: int, high: int) -> list[str]:
    """`count` passages of `low` to `high` tokens, each from the begin of a word."""
    chooser = random.Random(f"{_SEED} {low} {high}")
    stream = _Stream.of(tokenizer, max(_STREAM_TEXTS, count if high < 100 else 0))
    found: dict[str, None] = {}
    for _ in range(_MAX_TRIES * count):
        length = chooser.randint(low, high)
        text = stream.window(chooser.randrange(len(stream.words)), length)
        if text and len(tokenizer.encode(text).ids) == length:
            found[text] = None
        if len(found) == count:
            break
    return _enough(list(found), count)


def _enough(texts: list[str], count: int) -> list[str]:
    if len(texts) < count:
        raise RuntimeError(f"this installation has prose for {len(texts)} of {count} texts only")
    return texts[:count]


@dataclass(frozen=True)
class _Stream:
    """Prose as one text with the places of its tokens; `words` are the tokens that begin a word."""

    text: str
    offsets: list[tuple[int, int]]
    words: list[int]
    special: int

    @classmethod
    def of(cls, tokenizer: Any, texts: int) -> _Stream:
        """The words of `texts` texts of the corpus, in a row."""
        text = " ".join(" ".join(corpus.corpus(texts)).split())
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        words = [at for at, (begin, _) in enumerate(offsets) if begin == 0 or text[begin - 1] == " "]
        return cls(text, offsets, words, tokenizer.num_special_tokens_to_add(False))

    def window(self, word: int, length: int) -> str:
        """The passage of `length` tokens, special ones included, that begins with a word; empty beyond the end."""
        first = self.words[word]
        last = first + length - self.special - 1
        return self.text[self.offsets[first][0] : self.offsets[last][1]] if last < len(self.offsets) else ""


def _tokenizer(model: Path) -> Any:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer
