"""Entities of token classifiers: spans of a text with a label, in the form of transformers' pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

import numpy as np
from numpy.typing import NDArray

from teimgr.engine.job import Input

if TYPE_CHECKING:  # importing the tokenizer imports torch
    from teimgr.engine.text.tokenizer import TextTokenizer

Aggregation = Literal["none", "simple"]
OUTSIDE = "O"
_ONE_TOKEN_CHARS = 10_000


class Entity(TypedDict, total=False):
    """A token with its `entity`, or a group of tokens with its `entity_group`; `word` is the text from `start` to
    `end`, in characters.
    """

    entity: str
    entity_group: str
    score: float
    index: int
    word: str
    start: int
    end: int


class _Token(NamedTuple):
    row: int
    label: str
    score: np.float32
    start: int
    end: int


def entities(
    text: Input,
    logits: NDArray[np.float32],
    labels: Sequence[str],
    tokenizer: TextTokenizer,
    how: Aggregation,
    left: bool,
) -> list[Entity]:
    """Return the entities of a text from the logits [tokens, labels] of its tokens, including special ones; tokens
    outside of any entity ("O") are left out. `left`: the text was truncated on the left, so the logits are those of its
    end.

    "none" gives each token; "simple" groups neighbours of one kind, with the mean of their scores, as transformers
    does: "B-X" begins a group, "I-X" or "X" continues one of X. A group is called by what is behind the first "-" of
    its first label, so "L-X" and "U-X" of other schemes are each a group of X.
    """
    if not isinstance(text, str):
        return []  # token ids have no character positions
    found = list(_tokens(text, probabilities(logits), labels, tokenizer, left))
    if how == "none":
        return [
            Entity(
                entity=token.label,
                score=float(token.score),
                index=token.row,
                word=text[token.start : token.end],
                start=token.start,
                end=token.end,
            )
            for token in found
            if token.label != OUTSIDE
        ]
    return [_group(text, group) for group in _groups(found) if _name(group[0].label) != OUTSIDE]


def probabilities(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """The probability of each label, [tokens, labels], from logits."""
    from teimgr.engine.heads.scoring import activate  # imports torch

    return activate(logits, "softmax")


def _tokens(
    text: str, scores: NDArray[np.float32], labels: Sequence[str], tokenizer: TextTokenizer, left: bool
) -> Iterator[_Token]:
    """Yield the classified tokens of the text, without special ones."""
    kept = tokenizer.cut(text, max(len(scores) - tokenizer.special_tokens, 1), left=left)
    spans = tokenizer.tokenize(kept, True, "")
    if 0 < len(text) - len(kept) <= _ONE_TOKEN_CHARS and len(whole := tokenizer.tokenize(text, True, "")) == len(
        scores
    ):
        kept, spans = text, whole  # a word of unknown pieces is one token of any length
    rows = range(len(spans)) if len(spans) <= len(scores) or not left else range(len(scores) - len(spans), len(scores))
    before = len(text) - len(kept) if left else 0
    characters = _character_places(kept)
    for row, span in zip(rows, spans, strict=True):
        if span.special or not 0 <= row < len(scores) or span.start is None or span.stop is None:
            continue
        best = int(scores[row].argmax())
        start, end = before + characters[span.start], before + characters[span.stop]
        yield _Token(row, labels[best], scores[row, best], start, end)


def _character_places(text: str) -> NDArray[np.int64]:
    """Return the character at each byte of a text in UTF-8, and the end: int64 [bytes + 1]."""
    sizes = np.fromiter((len(character.encode()) for character in text), np.int64, len(text))
    return np.append(np.repeat(np.arange(len(text)), sizes), len(text))


def _kind(label: str) -> tuple[bool, str]:
    """Return whether a label begins an entity, and the kind of entity."""
    if label.startswith(("B-", "I-")):
        return label[0] == "B", label[2:]
    return False, label


def _name(label: str) -> str:
    return label.split("-", 1)[-1]


def _groups(tokens: Sequence[_Token]) -> list[list[_Token]]:
    groups: list[list[_Token]] = []
    for token in tokens:
        begins, kind = _kind(token.label)
        if groups and not begins and _kind(groups[-1][-1].label)[1] == kind:
            groups[-1].append(token)
        else:
            groups.append([token])
    return groups


def _group(text: str, tokens: list[_Token]) -> Entity:
    start, end = tokens[0].start, tokens[-1].end
    return Entity(
        entity_group=_name(tokens[0].label),
        score=float(np.mean([token.score for token in tokens])),
        word=text[start:end],
        start=start,
        end=end,
    )
