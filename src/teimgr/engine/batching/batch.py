"""Tokenized inputs, and their packing: a batch without padding, all texts in one row of tokens, shortest first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from teimgr.errors import TeimgrError

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


@dataclass(slots=True, eq=False)  # `frozen` would cost half a microsecond per query
class Encoded:
    """One or several tokenized inputs, texts or pairs, of one length and with the same settings.

    `ids` are int32 [length], or [texts, length] and contiguous; never empty. `type_ids` (uint8, same shape) are the
    token types of pairs, None for models without them. If `keys` is set, every token attends only to the first `keys`
    tokens. The first `prompt_tokens` belong to a prompt that is not pooled. `query` is the role on models with roles,
    `task` the task on models with weights by task (from 1; 0 means none).
    """

    ids: NDArray[np.int32]
    type_ids: NDArray[np.uint8] | None = None
    keys: int | None = None
    prompt_tokens: int = 0
    query: bool = False
    task: int = 0

    @property
    def texts(self) -> int:
        return 1 if self.ids.ndim == 1 else len(self.ids)

    @property
    def length(self) -> int:
        """Tokens per text."""
        length: int = self.ids.shape[-1]
        return length

    def part(self, which: slice | Sequence[int]) -> Encoded:
        """Select some of several inputs by position; a slice does not copy the ids."""
        return replace(self, ids=self.ids[which], type_ids=None if self.type_ids is None else self.type_ids[which])


_MIN_GROUPED = 16  # inputs; sorting fewer by length does not pay
_PLACES = np.arange(_MIN_GROUPED)
_PLACES.flags.writeable = False  # shared by all entries of one row


@dataclass(slots=True, eq=False)
class TokenizedTexts:
    """N tokenized inputs in arrays: input i has `lengths[i]` ids from `begins[i]` on (int64 [N] each) in `ids`.

    `ids` is int32 [T], `type_ids` uint8 [T] or None; `prompt_tokens` and `task` are as in `Encoded`. Inputs that failed
    or have other settings are in `others` instead; their length here is 0.
    """

    ids: NDArray[np.int32]
    begins: NDArray[np.int64]
    lengths: NDArray[np.int64]
    type_ids: NDArray[np.uint8] | None = None
    prompt_tokens: int = 0
    others: dict[int, Encoded | TeimgrError] = field(default_factory=dict)
    task: int = 0

    @classmethod
    def of(cls, results: Sequence[Encoded | TeimgrError]) -> TokenizedTexts:
        """Make a value in which all results are `others`."""
        return cls.without_ids(len(results), dict(enumerate(results)))

    @classmethod
    def without_ids(cls, texts: int, others: dict[int, Encoded | TeimgrError]) -> TokenizedTexts:
        """Make a value of `texts` inputs; those that are not in `others` have no result yet."""
        return cls(np.zeros(0, np.int32), np.zeros(texts, np.int64), np.zeros(texts, np.int64), others=others)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Encoded | TeimgrError:
        if (other := self.others.get(i)) is not None:
            return other
        begin = int(self.begins[i])
        own = slice(begin, begin + int(self.lengths[i]))
        types = None if self.type_ids is None else self.type_ids[own]
        return Encoded(self.ids[own], types, prompt_tokens=self.prompt_tokens, task=self.task)

    def put(self, i: int, other: Encoded | TeimgrError) -> None:
        """Set the result of input i, in place of that in the arrays."""
        self.others[i] = other
        self.lengths[i] = 0

    def missing(self) -> list[int]:
        """Return the inputs that have no result yet."""
        if np.count_nonzero(self.lengths) == len(self.lengths):  # the usual case, computed far faster
            return []
        return [row for row in np.flatnonzero(self.lengths == 0).tolist() if row not in self.others]

    def replace(self, rows: Sequence[int], by: TokenizedTexts) -> None:
        """Set the results of the inputs `rows` to `by`, which was made with the same options."""
        self.others.update((rows[i], other) for i, other in by.others.items())
        self.lengths[rows] = by.lengths
        if len(by.ids):
            self.begins[rows] = by.begins + len(self.ids)
            if by.type_ids is not None:
                self.type_ids = by.type_ids if self.type_ids is None else np.concatenate([self.type_ids, by.type_ids])
            self.ids = np.concatenate([self.ids, by.ids])
            self.prompt_tokens, self.task = by.prompt_tokens, by.task

    def by_length(self, begin: int, stop: int) -> Iterator[tuple[NDArray[np.intp], Encoded | TeimgrError]]:
        """Yield the inputs `begin` to `stop` in groups of equal length, ordered by their first input.

        Each group comes with the places of its inputs, counted from `begin`; a failed input is a group alone.
        """
        if stop - begin < _MIN_GROUPED:
            for i in range(begin, stop):
                yield _PLACES[i - begin : i - begin + 1], self[i]
            return
        order = np.argsort(self.lengths[begin:stop], kind="stable")
        ascending = self.lengths[begin:stop][order]
        borders = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
        for places in sorted(np.split(order, borders), key=lambda places: int(places[0])):
            if length := int(self.lengths[begin + places[0]]):
                at = self.begins[begin + places][:, None] + np.arange(length)
                types = None if self.type_ids is None else self.type_ids[at]
                yield places, Encoded(self.ids[at], types, prompt_tokens=self.prompt_tokens, task=self.task)
            else:
                for place in places.tolist():
                    yield np.array([place]), self[begin + place]


@dataclass(slots=True)  # `frozen` would cost half a microsecond per query
class PackedBatch:
    """N texts, T tokens, in ascending order of length.

    `ids` and `position_ids` are int64 [T]; positions restart at 0 with every text. Text i of the batch is input
    `order[i]` of those given to `pack`, and its tokens are `cu_seqlens[i]` to `cu_seqlens[i + 1]` (int32 [N + 1]).
    The others are None if no text needs them: `prompt_lens` (int32 [N], leading tokens that are not pooled), `type_ids`
    (int64 [T]), `keys` (int32 [N], the number of leading tokens that a text's tokens attend to), `queries` (bool [N],
    the role on models with roles), `tasks` (int32 [N]; a run has one task), `kept` (int64 [N], one token of each text:
    a native forward may compute only their hidden states).
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
    tasks: NDArray[np.int32] | None = None
    kept: NDArray[np.int64] | None = None

    def rounded_up(self) -> PackedBatch:
        """Append a few idle tokens, so that rows have few different lengths.

        oneDNN creates and caches a kernel for every row length; this costs one token in a hundred on average. The idle
        tokens are a run of texts of one token; `cu_seqlens` and `order` leave them out.
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

    def part(self, run: Run) -> PackedBatch:
        """Return the texts of one run as a batch."""
        tokens, first = slice(run.start, run.stop), int(np.searchsorted(self.cu_seqlens, run.start))
        texts = slice(first, first + run.texts)
        return PackedBatch(
            ids=self.ids[tokens],
            position_ids=self.position_ids[tokens],
            cu_seqlens=self.cu_seqlens[first : first + run.texts + 1] - np.int32(run.start),
            max_seqlen=run.length,
            runs=(Run(0, run.texts, run.length),),
            order=np.arange(run.texts),
            prompt_lens=None if self.prompt_lens is None else self.prompt_lens[texts],
            type_ids=None if self.type_ids is None else self.type_ids[tokens],
            keys=None if self.keys is None else self.keys[texts],
            queries=None if self.queries is None else self.queries[texts],
            tasks=None if self.tasks is None else self.tasks[texts],
        )

    def only(self, texts: NDArray[np.bool_]) -> PackedBatch:
        """Return the marked texts, at least one, in order as a batch, without roles."""
        lengths = np.diff(self.cu_seqlens)
        tokens, kept = np.repeat(texts, lengths), lengths[texts]
        return PackedBatch(
            ids=self.ids[: self.tokens][tokens],
            position_ids=self.position_ids[: self.tokens][tokens],
            cu_seqlens=np.concatenate([np.zeros(1, np.int32), np.cumsum(kept, dtype=np.int32)]),
            max_seqlen=int(kept.max()),
            runs=tuple(_runs(kept, None)),
            order=np.arange(len(kept)),
            prompt_lens=None if self.prompt_lens is None else self.prompt_lens[texts],
            type_ids=None if self.type_ids is None else self.type_ids[: self.tokens][tokens],
            keys=None if self.keys is None else self.keys[texts],
        )

    def keys_of(self, run: Run) -> NDArray[np.int32] | None:
        """Return the `keys` of the texts of one run, int32 [texts]; None if all tokens attend to all."""
        if self.keys is None or run.start >= self.tokens:
            return None
        first = int(np.searchsorted(self.cu_seqlens, run.start))
        keys = self.keys[first : first + run.texts]
        return keys if (keys < run.length).any() else None

    def positions(self, offset: int) -> NDArray[np.int64]:
        """Return `position_ids` from `offset` on. An offset above 0 is the padding token's id plus 1; a padding token
        in a text then has that id as its position and is not counted, as in the library.
        """
        if offset == 0:
            return self.position_ids
        if not self.has_padding(offset):
            return self.position_ids + offset
        is_padding = self.ids == offset - 1
        seen = np.cumsum(is_padding)
        first = np.arange(len(self.ids)) - self.position_ids
        counted = self.position_ids + offset - (seen - seen[first] + is_padding[first])
        return np.where(is_padding, offset - 1, counted)

    def has_padding(self, offset: int) -> bool:
        """True if a text contains the padding token, and positions begin after its id."""
        return offset > 0 and bool((self.ids == offset - 1).any())

    @property
    def begins(self) -> NDArray[np.int64]:
        """The first token of every text, [N]."""
        return self.cu_seqlens[:-1].astype(np.int64)

    @property
    def ends(self) -> NDArray[np.int64]:
        """The token after every text, [N]."""
        return self.cu_seqlens[1:].astype(np.int64)

    @property
    def texts(self) -> int:
        return len(self.order)

    @property
    def tokens(self) -> int:
        """T, without idle tokens."""
        return int(self.cu_seqlens[-1])


def pack_as_given(inputs: Sequence[Encoded]) -> PackedBatch:
    """Pack for embedding tables: the texts in their own order, without positions or runs of equal length."""
    if len(inputs) == 1 and inputs[0].texts == 1:
        ids = inputs[0].ids.reshape(-1).astype(np.int64)
        return PackedBatch(ids, _NO_POSITIONS, np.array((0, len(ids)), np.int32), 0, (), np.zeros(1, np.intp))
    lengths = _lengths(inputs)
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    ids = np.concatenate([each.ids.reshape(-1) for each in inputs], dtype=np.int64)
    return PackedBatch(ids, _NO_POSITIONS, cu_seqlens, 0, (), np.arange(len(lengths)))


def pack(inputs: Sequence[Encoded]) -> PackedBatch:
    if len(inputs) == 1 and inputs[0].texts == 1:
        return _pack_one(inputs[0])
    tasks = None
    if any(each.task for each in inputs):
        order = np.lexsort((_of_each(inputs, [each.task for each in inputs], np.int32), _lengths(inputs)))
        inputs = sorted(inputs, key=lambda each: (each.length, each.task))  # stable
        tasks = _of_each(inputs, [each.task for each in inputs], np.int32)
    else:
        order = np.argsort(_lengths(inputs), kind="stable")
        inputs = sorted(inputs, key=lambda each: each.length)
    lengths = _lengths(inputs)
    cu_seqlens = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=cu_seqlens[1:])
    ids = np.concatenate([each.ids.reshape(-1) for each in inputs], dtype=np.int64)
    prompt_lens = type_ids = keys = queries = None
    if any(each.prompt_tokens for each in inputs):  # at least one token of a text is pooled
        prompt_lens = np.minimum(_of_each(inputs, [each.prompt_tokens for each in inputs], np.int32), lengths - 1)
    if any(each.type_ids is not None for each in inputs):
        types = [np.zeros(each.ids.size, np.uint8) if each.type_ids is None else each.type_ids for each in inputs]
        type_ids = np.concatenate([each.reshape(-1) for each in types], dtype=np.int64)
    if any(each.keys is not None for each in inputs):
        keys = _of_each(inputs, [each.length if each.keys is None else each.keys for each in inputs], np.int32)
    if any(each.query for each in inputs):
        queries = _of_each(inputs, [each.query for each in inputs], np.bool_)
    return PackedBatch(
        ids=ids,
        position_ids=np.arange(len(ids), dtype=np.int64) - np.repeat(cu_seqlens[:-1], lengths),
        cu_seqlens=cu_seqlens,
        max_seqlen=int(lengths[-1]),
        runs=tuple(_runs(lengths, tasks)),
        order=order,
        prompt_lens=prompt_lens,
        type_ids=type_ids,
        keys=keys,
        queries=queries,
        tasks=tasks,
    )


def _pack_one(one: Encoded) -> PackedBatch:
    """Like `pack` for one text, without sorting and grouping, steps that add up in a query's time."""
    length = one.length
    return PackedBatch(
        ids=one.ids.reshape(-1).astype(np.int64),
        position_ids=np.arange(length),
        cu_seqlens=np.array((0, length), np.int32),
        max_seqlen=length,
        runs=(Run(0, 1, length),),
        order=np.zeros(1, np.intp),
        prompt_lens=np.array((min(one.prompt_tokens, length - 1),), np.int32) if one.prompt_tokens else None,
        type_ids=None if one.type_ids is None else one.type_ids.reshape(-1).astype(np.int64),
        keys=None if one.keys is None else np.array((one.keys,), np.int32),
        queries=np.array((True,)) if one.query else None,
        tasks=np.array((one.task,), np.int32) if one.task else None,
    )


def _lengths(inputs: Sequence[Encoded]) -> NDArray[np.int32]:
    """Return the tokens of every text, int32 [N]."""
    return _of_each(inputs, [each.length for each in inputs], np.int32)


def _of_each(inputs: Sequence[Encoded], values: Sequence[Any], dtype: type[np.generic]) -> NDArray[Any]:
    """Repeat the value of each of `inputs` for all of its texts: [N]."""
    given = np.array(values, dtype=dtype)
    counts = [each.texts for each in inputs]
    return given if sum(counts) == len(counts) else np.repeat(given, counts)


def _runs(lengths: NDArray[np.int32], tasks: NDArray[np.int32] | None) -> Iterator[Run]:
    changes = lengths[1:] != lengths[:-1]
    if tasks is not None:
        changes |= tasks[1:] != tasks[:-1]
    borders = [0, *(np.flatnonzero(changes) + 1).tolist(), len(lengths)]
    start = 0
    for first, end in pairwise(borders):
        length = int(lengths[first])
        yield Run(start, end - first, length)
        start += (end - first) * length


_NO_POSITIONS = np.zeros(0, np.int64)


def to_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `values` to a tensor on `device`, asynchronously; if that is a GPU, `values` may change afterwards."""
    import torch  # here: schedulers import this module without torch

    from teimgr.engine import gpu

    tensor = torch.from_numpy(values)
    if not gpu.is_gpu(device):
        return tensor
    target = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    copy_to(target, values)
    return target


def copy_to(target: torch.Tensor, values: NDArray[Any]) -> None:
    """Copy `values` into a tensor on any device, asynchronously; `values` may change afterwards."""
    import torch

    from teimgr.engine import gpu
    from teimgr.engine.batching import pinned_ring

    if not gpu.is_gpu(target.device) or not values.size:
        target.copy_(torch.from_numpy(values))
        return
    loan = pinned_ring.INPUTS.take(values.nbytes)
    source = loan.memory.view(target.dtype).view(values.shape)
    np.copyto(source.numpy(), values)
    target.copy_(source, non_blocking=True)
    loan.free_after_copy()
