"""A batch without padding: all its texts in one row of tokens, shortest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """Neighbours of equal length: `texts` × `length` tokens from token `start` on."""

    start: int
    texts: int
    length: int

    @property
    def stop(self) -> int:
        """The token after the last one."""
        return self.start + self.texts * self.length


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """N texts, T tokens, in ascending order of length.

    `ids` and `position_ids` are int64 [T]; positions start again at 0 with every text. Text i of the batch is text
    `order[i]` of what was packed, and its tokens are `cu_seqlens[i]` to `cu_seqlens[i + 1]` (int32 [N + 1]).
    `prompt_lens` (int32 [N]) is None where pooling takes every token.
    """

    ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    runs: tuple[Run, ...]
    order: NDArray[np.intp]
    prompt_lens: NDArray[np.int32] | None = None

    def filled(self) -> PackedBatch:
        """The same texts with a few idle tokens behind them, so that rows of few different lengths occur.

        A CPU kernel is made and kept for every length of row it meets; on average this costs one token in a hundred.
        The idle tokens are a run of texts of one token; `cu_seqlens` and `order` do not mention them.
        """
        idle = -self.tokens % _row_step(self.tokens)
        if idle == 0:
            return self
        nothing = np.zeros(idle, dtype=np.int64)
        return replace(
            self,
            ids=np.concatenate([self.ids, nothing]),
            position_ids=np.concatenate([self.position_ids, nothing]),
            runs=(*self.runs, Run(self.tokens, idle, 1)),
        )

    @property
    def texts(self) -> int:
        """N."""
        return len(self.order)

    @property
    def tokens(self) -> int:
        """T, idle ones not counted."""
        return int(self.cu_seqlens[-1])


def pack(texts: Sequence[NDArray[np.int32]], prompt_lens: Sequence[int] | None = None) -> PackedBatch:
    """Put the token ids of one or more texts, none of them empty, into one row."""
    lengths = np.fromiter(map(len, texts), dtype=np.int32, count=len(texts))
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    cu_seqlens = np.zeros(len(texts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    ids = np.concatenate([texts[i] for i in order]).astype(np.int64)
    return PackedBatch(
        ids=ids,
        position_ids=np.arange(len(ids), dtype=np.int64) - np.repeat(cu_seqlens[:-1], lengths),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths[-1]),
        runs=tuple(_runs(lengths)),
        order=order,
        prompt_lens=_sorted_prompt_lens(prompt_lens, order, lengths),
    )


def _row_step(tokens: int) -> int:
    if tokens <= 128:
        return 8
    return 32


def _runs(lengths: NDArray[np.int32]) -> Iterator[Run]:
    values, counts = np.unique(lengths, return_counts=True)
    start = 0
    for length, texts in zip(values.tolist(), counts.tolist(), strict=True):
        yield Run(start, texts, length)
        start += texts * length


def _sorted_prompt_lens(
    prompt_lens: Sequence[int] | None, order: NDArray[np.intp], lengths: NDArray[np.int32]
) -> NDArray[np.int32] | None:
    """A prompt never leaves a text without a token to pool."""
    if prompt_lens is None or not any(prompt_lens):
        return None
    return np.minimum(np.asarray(prompt_lens, dtype=np.int32)[order], lengths - 1)
