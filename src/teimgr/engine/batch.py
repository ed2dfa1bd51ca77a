"""Packing: a batch without padding, all texts in one row of tokens, shortest first; its arrays on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class Run(NamedTuple):
    """Consecutive texts of equal length: `texts` × `length` tokens from token `start` on."""

    start: int
    texts: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.texts * self.length


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """One tokenized input: a text or a pair.

    `ids` are int32 [length], never empty. `type_ids` (uint8 [length]) are the token types of pairs, None for models
    without them. Where `keys` is set, every token attends only to the first `keys` ones. The first `prompt_tokens`
    belong to a prompt that pooling leaves out. `query` is the role on late-interaction models.
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.uint8] | None = None
    keys: int | None = None
    prompt_tokens: int = 0
    query: bool = False


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """N texts, T tokens, in ascending order of length.

    `ids` and `position_ids` are int64 [T]; positions restart at 0 with every text. Text i of the batch is input
    `order[i]` of `pack`, and its tokens are `cu_seqlens[i]` to `cu_seqlens[i + 1]` (int32 [N + 1]).
    The others are None where no text needs them: `prompt_lens` (int32 [N], leading tokens that pooling leaves out),
    `type_ids` (int64 [T]), `keys` (int32 [N], the leading tokens of a text that its tokens attend to), `queries`
    (bool [N], the role on late-interaction models).
    """

    ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    max_seqlen: int
    runs: tuple[Run, ...]
    order: NDArray[np.intp]
    prompt_lens: NDArray[np.int32] | None = None
    type_ids: NDArray[np.int64] | None = None
    keys: NDArray[np.int32] | None = None
    queries: NDArray[np.bool_] | None = None

    def rounded_up(self) -> PackedBatch:
        """The same texts with a few idle tokens behind them, so that rows have few different lengths.

        oneDNN creates and caches a kernel for every length of row; this costs one token in a hundred on average.
        The idle tokens are a run of texts of one token; `cu_seqlens` and `order` leave them out.
        """
        idle = -self.tokens % (8 if self.tokens <= 128 else 32)
        if idle == 0:
            return self
        nothing = np.zeros(idle, dtype=np.int64)
        return replace(
            self,
            ids=np.concatenate([self.ids, nothing]),
            position_ids=np.concatenate([self.position_ids, nothing]),
            type_ids=None if self.type_ids is None else np.concatenate([self.type_ids, nothing]),
            runs=(*self.runs, Run(self.tokens, idle, 1)),
        )

    def keys_of(self, run: Run) -> NDArray[np.int32] | None:
        """The `keys` of the texts of one run, int32 [texts]; None where all tokens attend to all."""
        if self.keys is None or run.start >= self.tokens:
            return None
        first = int(np.searchsorted(self.cu_seqlens, run.start))
        keys = self.keys[first : first + run.texts]
        return keys if (keys < run.length).any() else None

    @property
    def begins(self) -> NDArray[np.int64]:
        """The first token of every text, [N]."""
        return self.cu_seqlens[:-1].astype(np.int64)

    @property
    def ends(self) -> NDArray[np.int64]:
        """The token behind every text, [N]."""
        return self.cu_seqlens[1:].astype(np.int64)

    @property
    def texts(self) -> int:
        return len(self.order)

    @property
    def tokens(self) -> int:
        """T, without idle tokens."""
        return int(self.cu_seqlens[-1])


def pack_as_given(texts: Sequence[Encoded]) -> PackedBatch:
    """For look-up tables: the texts in their own order, with neither positions nor runs of equal length."""
    cu_seqlens = np.zeros(len(texts) + 1, dtype=np.int32)
    np.cumsum([len(text.ids) for text in texts], out=cu_seqlens[1:])
    ids = np.concatenate([text.ids for text in texts]).astype(np.int64)
    return PackedBatch(ids, _NO_POSITIONS, cu_seqlens, 0, (), np.arange(len(texts)))


def pack(texts: Sequence[Encoded]) -> PackedBatch:
    lengths = np.fromiter((len(text.ids) for text in texts), dtype=np.int32, count=len(texts))
    order = np.argsort(lengths, kind="stable")
    lengths = lengths[order]
    texts = [texts[i] for i in order]
    cu_seqlens = np.zeros(len(texts) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    ids = np.concatenate([text.ids for text in texts]).astype(np.int64)
    prompt_lens = type_ids = keys = queries = None
    if any(text.prompt_tokens for text in texts):  # at least one token of a text is pooled
        prompt_lens = np.minimum(np.array([text.prompt_tokens for text in texts], dtype=np.int32), lengths - 1)
    if any(text.type_ids is not None for text in texts):
        types = [np.zeros(len(text.ids), dtype=np.uint8) if text.type_ids is None else text.type_ids for text in texts]
        type_ids = np.concatenate(types).astype(np.int64)
    if any(text.keys is not None for text in texts):
        seen = [len(text.ids) if text.keys is None else text.keys for text in texts]
        keys = np.array(seen, dtype=np.int32)
    if any(text.query for text in texts):
        queries = np.array([text.query for text in texts])
    return PackedBatch(
        ids=ids,
        position_ids=np.arange(len(ids), dtype=np.int64) - np.repeat(cu_seqlens[:-1], lengths),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths[-1]),
        runs=tuple(_runs(lengths)),
        order=order,
        prompt_lens=prompt_lens,
        type_ids=type_ids,
        keys=keys,
        queries=queries,
    )


def _runs(lengths: NDArray[np.int32]) -> Iterator[Run]:
    values, counts = np.unique(lengths, return_counts=True)
    start = 0
    for length, texts in zip(values.tolist(), counts.tolist(), strict=True):
        yield Run(start, texts, length)
        start += texts * length


_NO_POSITIONS = np.zeros(0, np.int64)


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """`values` as a tensor on `device`, copied asynchronously."""
    import torch  # here: scheduling needs this module and no torch

    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_to(target: torch.Tensor, values: NDArray[Any]) -> None:
    """Copy `values` into a tensor on any device, asynchronously; `values` may change afterwards."""
    import torch

    source = torch.from_numpy(values)
    target.copy_(source if target.device.type == "cpu" else source.pin_memory(), non_blocking=True)
