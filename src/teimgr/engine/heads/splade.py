"""SPLADE: a weight per vocabulary entry, from a masked-LM head's logits for every token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.batching.batch import PackedBatch, Run, to_device
from teimgr.engine.heads import Rows
from teimgr.engine.native_library import give_way
from teimgr.models.layout import Splade

# Bytes of logits computed at a time. On a CPU, larger temporaries are mapped and unmapped by every operation.
_CPU_BYTES = 24_000_000
_CUDA_BYTES = 512_000_000
_ROOM = 512  # entries per text, on average over a batch; models have 20 to 300
_ROW_STEP = 32  # oneDNN creates and caches a kernel per number of rows

Decode = Callable[[Tensor], Tensor]


class SpladeWeights:
    """Pooled weights of texts, computed in groups to avoid materialising [T, vocabulary].

    `decode` maps hidden states [t, H] to logits [t, vocabulary].
    """

    def __init__(self, decode: Decode, width: int, splade: Splade) -> None:
        self.width = width
        self._decode = decode
        self._max = splade.strategy == "max"
        self._twice = splade.activation == "log1p_relu"
        self._most = None if splade.most is None or splade.most >= width else splade.most

    def groups(self, hidden: Tensor, batch: PackedBatch) -> Iterator[Tensor]:
        """Yield float32 [n, vocabulary] for n texts at a time, until the batch is done."""
        room = max(1, (_CUDA_BYTES if gpu.is_gpu(hidden.device) else _CPU_BYTES) // (4 * self.width))
        borders = batch.cu_seqlens.tolist()
        begin = 0
        while begin < batch.texts:
            give_way()
            stop = begin + 1
            while stop < batch.texts and borders[stop + 1] - borders[begin] <= room:
                stop += 1
            if stop == begin + 1:
                found = self._of_text(hidden, borders[begin], borders[stop], room)
            else:
                found = self._of_texts(hidden, batch, borders[begin], borders[stop])
            yield self.limited(found)
            begin = stop

    def reads_hidden(self, batch: PackedBatch) -> bool:
        return True

    def limited(self, weights: Tensor) -> Tensor:
        """Keep the largest weights of each text and set the others to zero; NaN counts as the largest. Unlimited:
        all."""
        if self._most is None:
            return weights
        places = weights.topk(self._most, dim=-1).indices
        return torch.zeros_like(weights).scatter_(-1, places, weights.gather(-1, places))

    def _of_text(self, hidden: Tensor, start: int, stop: int, room: int) -> Tensor:
        """Compute one text of any length: [1, vocabulary]."""
        total: Tensor | None = None
        for begin in range(start, stop, room):
            logits = self._logits(hidden, begin, min(begin + room, stop))
            part = self._pooled(logits.unsqueeze(0))
            total = part if total is None else torch.maximum(total, part) if self._max else total + part
        assert total is not None
        return self._activated(total) if self._max else total

    def _of_texts(self, hidden: Tensor, batch: PackedBatch, start: int, stop: int) -> Tensor:
        """Compute the texts of tokens `start` to `stop`, decoded together: [n, vocabulary]."""
        logits = self._logits(hidden, start, stop)
        parts = []
        for run in batch.runs:
            if (piece := _overlap(run, start, stop)) is not None:
                tokens = logits[piece.start - start : piece.stop - start]
                parts.append(self._pooled(tokens.view(piece.texts, piece.length, -1)))
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._activated(pooled) if self._max else pooled

    def _logits(self, hidden: Tensor, start: int, stop: int) -> Tensor:
        """Return logits [stop - start, vocabulary]; decodes a few tokens before them to round up the number of rows."""
        rows = stop - start
        begin = max(0, stop - (rows + -rows % _ROW_STEP))
        return self._decode(hidden[begin:stop])[-rows:]

    def _pooled(self, logits: Tensor) -> Tensor:
        """Pool [n, length, vocabulary] → [n, vocabulary]; the activation is monotonic, so the maximum may be taken
        first."""
        return logits.amax(dim=1).float() if self._max else self._activated(logits.float()).sum(dim=1)

    def _activated(self, logits: Tensor) -> Tensor:
        weights = logits.relu().log1p_()
        return weights.log1p_() if self._twice else weights


class RoutedWeights:
    """Weights of documents by `documents`, and of a query's ids by `table`, float32 [vocabulary]."""

    def __init__(self, documents: SpladeWeights, table: Tensor) -> None:
        self.width = documents.width
        self._documents = documents
        self._table = table
        self._room = max(1, _CPU_BYTES // (4 * self.width))

    def reads_hidden(self, batch: PackedBatch) -> bool:
        return batch.queries is None or not batch.queries.all()

    def groups(self, hidden: Tensor, batch: PackedBatch) -> Iterator[Tensor]:
        """Like those of `SpladeWeights`."""
        if batch.queries is None:
            yield from self._documents.groups(hidden, batch)
            return
        first = 0
        for weights in (
            self._documents.groups(hidden, batch) if self.reads_hidden(batch) else self._empty(batch, hidden)
        ):
            for row in range(len(weights)):
                if batch.queries[first + row]:
                    weights[row] = self._of_query(batch, first + row, weights.device)
            yield weights
            first += len(weights)

    def _of_query(self, batch: PackedBatch, text: int, device: torch.device) -> Tensor:
        ids = batch.ids[batch.cu_seqlens[text] : batch.cu_seqlens[text + 1]]
        places = to_device(np.unique(ids), device)
        self._table = self._table.to(device)  # copied once: a copy waits for the device
        row = torch.zeros(self.width, device=device)
        row[places] = self._table[places]
        return self._documents.limited(row.unsqueeze(0))[0]

    def _empty(self, batch: PackedBatch, hidden: Tensor) -> Iterator[Tensor]:
        for begin in range(0, batch.texts, self._room):
            yield torch.zeros(min(self._room, batch.texts - begin), self.width, device=hidden.device)


class SpladeHead:
    """SPLADE weights as sparse rows; NaN entries are kept, so that they are detected.

    Their number is first known on the device. On a GPU, space for `_ROOM` entries per text is filled without waiting,
    and all weights are kept until the number has reached the host.
    """

    def __init__(self, weights: SpladeWeights | RoutedWeights) -> None:
        self.width = weights.width
        self.device_bytes_per_text = 4 * weights.width
        self._weights = weights

    def reads_hidden(self, batch: PackedBatch) -> bool:
        """True if the weights of `batch` depend on its hidden states; else these may be empty."""
        return self._weights.reads_hidden(batch)

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return SPARSE rows."""
        groups = self._weights.groups(hidden, batch)
        if not gpu.is_gpu(hidden.device):
            return _nonzero(groups)
        weights = torch.cat(list(groups))
        kept = weights != 0.0
        # The place of each kept entry; all other entries, and those without room, are put after the last one.
        room = min(weights.numel(), batch.texts * _ROOM)
        places = kept.flatten().cumsum(0).sub_(1).clamp_(max=room).masked_fill_(~kept.flatten(), room)
        columns = torch.arange(self.width, dtype=torch.int64, device=hidden.device).expand_as(weights).flatten()
        values = torch.zeros(room + 1, device=hidden.device).scatter_(0, places, weights.flatten())
        indices = torch.zeros(room + 1, dtype=torch.int64, device=hidden.device).scatter_(0, places, columns)
        offsets = functional.pad(kept.sum(dim=1).cumsum(0), (1, 0))
        # On the host: on a full device the search would fail and the result would be lost.
        return Rows(values[:room], offsets, indices[:room], lambda: _nonzero([weights.cpu()]))


def _nonzero(groups: Iterable[Tensor]) -> Rows:
    """Return SPARSE rows from weights [n, vocabulary] for n texts at a time; waits for the device."""
    values, indices, counts = [], [], []
    for weights in groups:
        kept = weights != 0.0
        rows, columns = kept.nonzero(as_tuple=True)
        indices.append(columns)
        values.append(weights[rows, columns])
        counts.append(kept.sum(dim=1))
    return Rows(torch.cat(values), functional.pad(torch.cat(counts).cumsum(0), (1, 0)), torch.cat(indices))


class SpladeVectorHead:
    """SPLADE weights as dense vectors."""

    def __init__(self, weights: SpladeWeights | RoutedWeights) -> None:
        self.width = weights.width
        self._weights = weights

    def reads_hidden(self, batch: PackedBatch) -> bool:
        """True if the weights of `batch` follow from its hidden states; else these may be empty."""
        return self._weights.reads_hidden(batch)

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        return Rows(torch.cat(list(self._weights.groups(hidden, batch))))


def _overlap(run: Run, start: int, stop: int) -> Run | None:
    """The texts of `run` within the tokens `start` to `stop`, which are borders of texts."""
    first, last = max(run.start, start), min(run.stop, stop)
    return Run(first, (last - first) // run.length, run.length) if first < last else None
