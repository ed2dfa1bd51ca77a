"""Real prose of mixed length that every machine with Python has: docstrings and licences.

Only the standard library is used, so that a bare interpreter with torch can run the GPU scenario.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_SEED = 20
_LONGEST_WORDS = 450
_SOME_WORDS = 8
# A longer "query" of few words is an address or a ruled line of some licence: more tokens than a small model takes.
_QUERY_CHARACTERS = 120
# Shares of texts by length in words: what a store of notes, passages and a few long documents looks like. With a
# WordPiece vocabulary this mix has a mean near 77 tokens and a median near 41.
_MIX = ((3, 9, 0.13), (10, 18, 0.20), (19, 34, 0.27), (35, 70, 0.20), (71, 140, 0.11), (141, _LONGEST_WORDS, 0.09))


def corpus(count: int) -> list[str]:
    """`count` texts, always the same ones for the same Python installation, in random order of length.

    Raises:
        RuntimeError: this installation has too little prose.
    """
    chooser = random.Random(_SEED)
    groups = _grouped(sorted(set(_prose())))
    texts: list[str] = []
    for (low, high, share), group in zip(_MIX, groups, strict=True):
        wanted = round(count * share)
        if not group:
            raise RuntimeError(f"this installation has no text of {low} to {high} words")
        chooser.shuffle(group)
        texts.extend(group[index % len(group)] for index in range(wanted))
    chooser.shuffle(texts)
    return (texts + texts)[:count]


def queries(count: int) -> list[str]:
    """`count` short texts of 4 to 14 words, as typed into a search box."""
    chooser = random.Random(_SEED + 1)
    lines = {" ".join(words) for text in _prose() if 4 <= len(words := text.split()) <= 14}
    short = sorted(line for line in lines if len(line) <= _QUERY_CHARACTERS)
    chooser.shuffle(short)
    return [short[index % len(short)] for index in range(count)]


def some(count: int) -> list[str]:
    """`count` different texts of 8 words or more, as they come: quick, where their lengths do not matter.

    Raises:
        RuntimeError: this installation has too little prose.
    """
    found: dict[str, None] = {}
    for text in _passages_of_the_installation():
        if len(text.split()) >= _SOME_WORDS:
            found[text] = None
        if len(found) == count:
            return list(found)
    raise RuntimeError(f"this installation has only {len(found)} texts")


def digest(texts: list[str]) -> str:
    """Eight hex digits that differ where two runs had different texts."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:8]


def _grouped(texts: list[str]) -> list[list[str]]:
    lengths = [(text, len(text.split())) for text in texts]
    return [[text for text, words in lengths if low <= words <= high] for low, high, _ in _MIX]


@cache  # parsing the standard library takes some ten seconds
def _prose() -> tuple[str, ...]:
    return tuple(_passages_of_the_installation())


def _passages_of_the_installation() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        if "site-packages" not in path.parts and "test" not in path.parts:
            yield from _docstrings(path)
    for path in sorted(Path(sysconfig.get_path("purelib")).glob("*.dist-info/**/LICEN[CS]E*")):
        yield from _passages(path)


def _docstrings(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(path.read_text("utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield _cut(text)


def _passages(path: Path) -> Iterator[str]:
    """A licence whole, and each of its paragraphs."""
    if path.is_file():
        text = path.read_text("utf-8", "replace")
        yield _cut(text)
        yield from (_cut(part) for part in text.split("\n\n") if part.strip())


def _cut(text: str) -> str:
    return " ".join(text.split()[:_LONGEST_WORDS])
