"""Pooling of a packed row: from one vector per token to one or several per text; sums are float32."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine import gpu
from teimgr.engine.batching.batch import PackedBatch, Run, to_device
from teimgr.engine.heads import Rows
from teimgr.engine.native_library import address, native_library
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import LateInteraction, Listwise

_FEW_RUNS = 8  # runs of equal length in a batch on a GPU


@dataclass(frozen=True, slots=True)
class Segments:
    """The pooled tokens of each text: int64 [N] each, on the device. `begins` is where the text itself starts.

    `runs` is set if reducing the texts run by run is faster.
    """

    begins: Tensor
    starts: Tensor
    stops: Tensor
    runs: tuple[Run, ...] = ()

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> Segments:
        """Make the segments of `batch`; a prompt that is not pooled lies between `begins` and `starts`."""
        borders = to_device(batch.cu_seqlens.astype(np.int64), device)
        begins, stops = borders[:-1], borders[1:]
        if batch.prompt_lens is None:
            by_run = gpu.is_gpu(device) and 0 < len(batch.runs) <= _FEW_RUNS
            return cls(begins, begins, stops, batch.runs if by_run else ())
        return cls(begins, begins + to_device(batch.prompt_lens, device), stops)

    @property
    def lengths(self) -> Tensor:
        """Return the pooled tokens per text, float32 [N, 1]."""
        return (self.stops - self.starts).float().unsqueeze(1)

    def reduce(self, values: Tensor, how: str) -> Tensor:
        """Compute the `sum` or `max` over the pooled tokens: [T, H] → [N, H].

        The kernel takes segments without gaps, so the prompt and the rest of a text are two segments. On a GPU it uses
        one thread per number of the result, which adds up the tokens one by one: run by run is faster if there are few
        runs.
        """
        if self.runs:
            parts = [values[run.start : run.stop].view(run.texts, run.length, -1) for run in self.runs]
            return torch.cat([part.sum(dim=1) if how == "sum" else part.amax(dim=1) for part in parts])
        if self.starts is self.begins:
            borders = torch.cat([self.begins, self.stops[-1:]])
            return torch.segment_reduce(values, how, offsets=borders, axis=0)
        borders = torch.cat([torch.stack([self.begins, self.starts], dim=1).flatten(), self.stops[-1:]])
        return torch.segment_reduce(values, how, offsets=borders, axis=0, initial=None)[1::2]

    def positions(self, tokens: int) -> Tensor:
        """Number the tokens of every text from 1, including the prompt: float32 [T, 1]."""
        counts = self.stops - self.begins
        begins = torch.repeat_interleave(self.begins, counts, output_size=tokens)
        return (torch.arange(1, tokens + 1, device=begins.device) - begins).float().unsqueeze(1)


def pool(hidden: Tensor, batch: PackedBatch, poolings: Sequence[str]) -> Tensor:
    """Pool [T, H] of any float type to float32 [N, H × len(poolings)]."""
    library = native_library()
    is_plain = hidden.dtype is torch.float32 and not gpu.is_gpu(hidden.device) and hidden.is_contiguous()
    if library is not None and tuple(poolings) == ("mean",) and batch.prompt_lens is None and is_plain:
        # One call instead of ten, which take a quarter of a millisecond with cold caches after a forward.
        pooled = torch.empty(batch.texts, hidden.shape[1])
        begins = address(batch.cu_seqlens)
        library.pool_mean(hidden.data_ptr(), len(hidden), begins, batch.texts, hidden.shape[1], pooled.data_ptr())
        return pooled
    segments = Segments.of(batch, hidden.device)
    parts = [POOLINGS[name](hidden, segments) for name in poolings]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _weighted_mean(hidden: Tensor, segments: Segments) -> Tensor:
    weights = segments.positions(len(hidden))
    return segments.reduce(hidden.float() * weights, "sum") / segments.reduce(weights, "sum")


POOLINGS: dict[str, Callable[[Tensor, Segments], Tensor]] = {
    "cls": lambda hidden, segments: hidden[segments.starts].float(),
    "last_token": lambda hidden, segments: hidden[segments.stops - 1].float(),
    "max": lambda hidden, segments: segments.reduce(hidden.float(), "max"),
    "mean": lambda hidden, segments: segments.reduce(hidden.float(), "sum") / segments.lengths,
    "mean_sqrt_len": lambda hidden, segments: segments.reduce(hidden.float(), "sum") / segments.lengths.sqrt(),
    "weighted_mean": _weighted_mean,
}


class DenseHead:
    """Pooling, then `projections`, in float32. Also the score of cross-encoders that are built from such modules.

    Without `poolings` its input is one vector per text.
    """

    def __init__(self, poolings: Sequence[str], projections: nn.Sequential, width: int) -> None:
        self.width = width
        self._poolings = tuple(poolings)
        self._projections = projections

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return DENSE rows, neither cut nor normalised by the request's options."""
        is_pooled = not self._poolings or (batch.kept is not None and len(hidden) == batch.texts)
        pooled = hidden.float() if is_pooled else pool(hidden, batch, self._poolings)
        return Rows(self._projections(pooled) if len(self._projections) else pooled)

    @property
    def is_mean(self) -> bool:
        """True if its output is the plain mean of hidden states."""
        return self._poolings == ("mean",) and not len(self._projections)

    @property
    def is_token(self) -> bool:
        """True if its output is the plain hidden state of the token that `token_of` names."""
        return self._poolings in (("cls",), ("last_token",)) and not len(self._projections)

    def token_of(self, batch: PackedBatch) -> NDArray[np.int64] | None:
        """Return the only token of each text whose hidden states it reads, [N]; None if it reads others."""
        if self._poolings == ("cls",):
            return batch.begins if batch.prompt_lens is None else batch.begins + batch.prompt_lens
        return batch.ends - 1 if self._poolings == ("last_token",) else None


def finish(
    vectors: NDArray[np.float32], dimensions: int | None, normalize: bool, rounded: bool = False
) -> NDArray[np.float32]:
    """Cut [N, D] to `dimensions`, then scale every row to length 1 (norm in float64); a zero row stays zero.

    `rounded`: apply round(127 · tanh(x)) before the norm. That is part of the model, but the fidelity gate does not
    compare it, since the last bit of a number can change an integer.
    """
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    if rounded:
        cut = np.rint(np.tanh(cut) * np.float32(127.0))
    if not normalize:
        return cut
    library = native_library()
    if library is not None and cut.strides[1] == cut.itemsize and cut.dtype == np.float32:
        scaled = np.empty(cut.shape, np.float32)
        stride = cut.strides[0] // cut.itemsize
        numbers = stride * (len(cut) - 1) + cut.shape[1] if len(cut) else 0
        library.scale_rows(address(cut), numbers, len(cut), stride, cut.shape[1], address(scaled))
        return scaled
    norms = np.sqrt(np.einsum("nd,nd->n", cut, cut, dtype=np.float64))
    norms[norms == 0.0] = 1.0
    scaled = np.empty(cut.shape, np.float32)
    np.divide(cut, norms[:, None], out=scaled, casting="same_kind")  # divides in float64 without an array of float64
    return scaled


@torch.inference_mode()
def finish_on_device(vectors: Tensor, dimensions: int | None, normalize: bool, rounded: bool = False) -> Tensor:
    """Like `finish`, on the device of the vectors: cut before they are copied to the host."""
    cut = vectors if dimensions is None else vectors[:, :dimensions]
    if rounded:
        cut = (cut.float().tanh() * 127.0).round()
    if not normalize:
        return cut.contiguous()
    norms = cut.double().square().sum(dim=1, keepdim=True).sqrt()
    return (cut / norms.where(norms != 0.0, 1.0)).float()


_SUM, _MEAN = 0, 1  # of `torch.embedding_bag`; its wrapper in `functional` takes some microseconds


class TableMeanHead:
    """Mean pooling over an embedding table and `projections`, in float32, without materialising token rows: `hidden` is
    unused.

    `mapping` and `weights` are those of `StaticTable`, `width` that of a vector after the projections.
    """

    def __init__(
        self, table: Tensor, mapping: Tensor | None, weights: Tensor | None, projections: nn.Sequential, width: int
    ) -> None:
        self.width = width
        self._table = table
        self._mapping = mapping
        self._weights = weights
        self._projections = projections if len(projections) else None

    def __call__(self, hidden: Tensor | None, batch: PackedBatch) -> Rows:
        """Return DENSE rows, neither cut nor normalised by the request's options."""
        ids = to_device(batch.ids, self._table.device)
        borders = to_device(batch.cu_seqlens.astype("int64"), self._table.device)
        places = ids if self._mapping is None else self._mapping[ids]
        if self._weights is None:
            means = torch.embedding_bag(self._table, places, borders, mode=_MEAN, include_last_offset=True)[0]
        else:
            weights = self._weights[ids]
            bags = torch.embedding_bag(
                self._table, places, borders, mode=_SUM, per_sample_weights=weights, include_last_offset=True
            )
            means = bags[0] / borders.diff().float().unsqueeze(1)
        return Rows(means if self._projections is None else self._projections(means))


class MultiVectorHead:
    """Projects the kept tokens in float32, and normalises them if the model does so."""

    def __init__(self, projections: nn.Sequential, late: LateInteraction, width: int) -> None:
        self.width = width
        self._projections = projections
        self._normalize = late.normalize
        self._skipped = np.array(late.skip_ids, dtype=np.int64)
        self._skip_in_queries = late.skip_in_queries

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return MULTI_VECTOR rows; a text with only skipped tokens has none."""
        kept = self._kept(batch)
        if kept is not None:
            hidden = hidden[to_device(np.flatnonzero(kept), hidden.device)]
        vectors: Tensor = self._projections(hidden.float())
        if self._normalize:
            vectors = functional.normalize(vectors, dim=-1)
        return Rows(vectors, to_device(offsets(kept, batch), hidden.device))

    def _kept(self, batch: PackedBatch) -> NDArray[np.bool_] | None:
        """Return which tokens have a vector, bool [T]; None if all have."""
        if len(self._skipped) == 0:
            return None
        kept = ~np.isin(batch.ids, self._skipped)
        if batch.queries is not None and not self._skip_in_queries:
            kept |= np.repeat(batch.queries, np.diff(batch.cu_seqlens))
        return None if kept.all() else kept


def offsets(kept: NDArray[np.bool_] | None, batch: PackedBatch) -> NDArray[np.int64]:
    """Return the borders of the texts among the kept tokens, int64 [N + 1]."""
    borders = batch.cu_seqlens.astype(np.int64)
    if kept is None:
        return borders
    before = np.concatenate([[0], np.cumsum(kept)])
    return np.asarray(before[borders], dtype=np.int64)


class M3SparseHead:
    """BGE-M3's sparse weights: relu(linear(hidden)) per token, the maximum per id; `unused_ids` get no weight."""

    def __init__(self, linear: nn.Linear, unused_ids: tuple[int, ...], vocabulary: int) -> None:
        self.width = vocabulary
        self._linear = linear
        self._unused = np.array(unused_ids, dtype=np.int64)

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return SPARSE rows. The host removes weights of 0, so that nothing waits for the device here."""
        tokens, places, texts, ids = self._entries(batch)
        of_token = self._linear(hidden.float()).relu().squeeze(1)[to_device(tokens, hidden.device)]
        weights = torch.zeros(len(ids), device=hidden.device)
        weights = weights.scatter_reduce(0, to_device(places, hidden.device), of_token, "amax")
        borders = np.searchsorted(texts, np.arange(batch.texts + 1))
        return Rows(weights, to_device(borders, hidden.device), to_device(ids, hidden.device))

    def _entries(self, batch: PackedBatch) -> tuple[NDArray[np.int64], ...]:
        """Return the tokens that count and the entry of each, then the text and the id of each entry, ascending."""
        tokens = np.flatnonzero(~np.isin(batch.ids, self._unused))
        text_of = np.repeat(np.arange(batch.texts, dtype=np.int64), np.diff(batch.cu_seqlens))
        keys, places = np.unique(text_of[tokens] * self.width + batch.ids[tokens], return_inverse=True)
        return tokens, places, keys // self.width, keys % self.width


class M3MultiVectorHead:
    """BGE-M3's vectors: linear(hidden) of every token but the first, normalised."""

    def __init__(self, linear: nn.Linear) -> None:
        self.width = linear.out_features
        self._linear = linear

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        kept = batch.position_ids > 0
        vectors = self._linear(hidden[to_device(np.flatnonzero(kept), hidden.device)].float())
        return Rows(functional.normalize(vectors, dim=-1), to_device(offsets(kept, batch), hidden.device))


def load_linear(path: Path, device: torch.device) -> nn.Linear:
    """Load a float32 layer whose `weight` and `bias` are in a file of torch.save.

    Raises:
        ModelLoadFailed: the file cannot be read as such.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        linear = nn.Linear(state["weight"].shape[1], state["weight"].shape[0], bias="bias" in state)
        linear.load_state_dict(state)
    except (OSError, RuntimeError, KeyError, TypeError, AttributeError, EOFError, pickle.UnpicklingError) as error:
        raise ModelLoadFailed(f"{path.name} holds no linear layer: {error}") from error
    return linear.float().requires_grad_(False).to(device)


class MarkedVectorsHead:
    """Projects the hidden states at the marks: of each document in order, then of the query."""

    def __init__(self, projections: nn.Sequential, listwise: Listwise, width: int) -> None:
        self.width = width
        self._projections = projections
        self._marks = np.array((listwise.document_id, listwise.query_id), dtype=np.int64)

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """Return MULTI_VECTOR rows."""
        marked = np.isin(batch.ids, self._marks)
        at_marks = hidden[to_device(np.flatnonzero(marked), hidden.device)]
        return Rows(self._projections(at_marks.float()), to_device(offsets(marked, batch), hidden.device))


class OnlyDocumentHead:
    """Scores a list of one document: the cosine of the first marked vector and the last."""

    def __init__(self, vectors: MarkedVectorsHead) -> None:
        self.width = 1
        self._vectors = vectors

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        found = self._vectors(hidden, batch)
        assert found.offsets is not None
        first, last = found.values[found.offsets[:-1]], found.values[found.offsets[1:] - 1]
        return Rows(functional.cosine_similarity(first, last, dim=-1)[:, None])
