"""What the load consists of: made sentences, or the lines of a file."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import lz4.frame

from teimgr.errors import InvalidConfig

_SENTENCES = (
    "An embedding turns a sentence into a point, and close points mean much the same thing.",
    "Semantic search finds the passage you had in mind even when it shares no word with your question.",
    "The quick brown fox jumps over the lazy dog while a pangram counts every letter.",
    "Attention lets each token look at every other token before it decides what it stands for.",
    "A neural network learns by nudging millions of weights towards smaller mistakes.",
    "Nearest neighbours in a vector index are found in milliseconds when the graph is well connected.",
    "Cosine similarity compares directions and forgets how long the vectors are.",
    "Retrieval gives a language model fresh facts instead of asking it to remember them all.",
    "Mean pooling averages the token vectors of a text into the one vector that is stored.",
    "Good tokenizers cut rare words into familiar pieces, so nothing is ever quite unknown.",
)
_CLAUSE = ", and this one goes on for a little longer so that the lengths within a batch differ"


def made_texts(count: int) -> list[str]:
    """`count` distinct English texts of some 15 to 30 words, always the same ones."""
    return [_text(index) for index in range(count)]


def file_texts(path: Path, count: int | None) -> list[str]:
    """The non-empty lines of a UTF-8 file, `.lz4` decompressed; repeated or cut to `count` where that is given.

    Raises:
        InvalidConfig: the file cannot be read, or has no text in it.
    """
    try:
        lines = [line for line in _lines(path) if line]
    except (OSError, EOFError, RuntimeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not lines:
        raise InvalidConfig(f"{path}: no texts in it")
    return lines if count is None else list(itertools.islice(itertools.cycle(lines), count))


def _text(index: int) -> str:
    clause = _CLAUSE if index % 3 == 0 else ""
    return f"{_SENTENCES[index % len(_SENTENCES)]} - sample {index + 1}{clause}"


def _lines(path: Path) -> Iterator[str]:
    opened = lz4.frame.open(path, "rt", encoding="utf-8") if path.suffix == ".lz4" else path.open(encoding="utf-8")
    with opened as file:
        for line in file:
            yield line.strip()
