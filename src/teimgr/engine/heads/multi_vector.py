"""Several vectors of a text: late-interaction tokens, BGE-M3's outputs, marks of a listwise reranker."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from teimgr.engine.batching.batch import PackedBatch, to_device
from teimgr.engine.heads import Rows
from teimgr.errors import ModelLoadFailed
from teimgr.models.layout import LateInteraction, Listwise


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
