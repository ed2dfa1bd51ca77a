"""A model that is a table: a token's vector is looked up, and nothing sees its neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from teimgr.engine.backbone import Batching
from teimgr.engine.batch import PackedBatch
from teimgr.engine.heads.base import moved
from teimgr.errors import ModelLoadFailed
from teimgr.model_files import Layout


@dataclass(frozen=True, slots=True)
class TableConfig:
    """What is asked of a transformer's config; both are the size of a vector."""

    hidden_size: int
    intermediate_size: int


class StaticTable:
    """In the place of a `Transformer`: vectors by token id, of sentence-transformers' StaticEmbedding or of Model2Vec.

    In a Model2Vec table with a small vocabulary `mapping` (int64 [ids]) gives an id's row; `weights` ([ids]) multiply
    it. Rows of eight bits have no scale, there as here.
    """

    def __init__(self, table: Tensor, mapping: Tensor | None = None, weights: Tensor | None = None) -> None:
        self._table = table
        self._mapping = mapping
        self._weights = weights
        self.config: Any = TableConfig(table.shape[1], table.shape[1])
        self.device = table.device
        self.dtype = torch.float32
        self.batching = Batching.BY_RUN

    @property
    def width(self) -> int:
        """The size of a vector."""
        return self._table.shape[1]

    def use(self, batching: Batching) -> None:
        """Any way of batching is right, and all are the same."""
        self.batching = batching

    def convert(self, dtype: torch.dtype) -> None:
        """Give vectors of `dtype`; the table stays as it is in the file, mapped and shared between workers."""
        self.dtype = dtype

    def hidden(self, batch: PackedBatch) -> Tensor:
        """The vector of every token, [T, H]."""
        return self.hidden_plain(batch.ids)

    def hidden_plain(
        self, ids: NDArray[Any], type_ids: NDArray[Any] | None = None, keys: NDArray[np.int32] | None = None
    ) -> Tensor:
        """Ids of any shape → [ids, H]. Neither halves nor neighbours mean anything here."""
        places = moved(ids.reshape(-1).astype(np.int64, copy=False), self.device)
        rows = functional.embedding(places if self._mapping is None else self._mapping[places], self._table)
        if self._weights is not None:
            rows = rows.float() * self._weights[places].unsqueeze(1)
        return rows.to(self.dtype)


def load_table(layout: Layout, device: torch.device) -> StaticTable:
    """The table as it is in the file, on `device`.

    Raises:
        ModelLoadFailed: the file has no table, or its parts do not belong together.
    """
    tensors = _tensors(layout)
    table = tensors.get("embedding.weight", tensors.get("embeddings"))
    if table is None or table.dim() != 2 or not (table.is_floating_point() or table.dtype is torch.int8):
        raise ModelLoadFailed(f"no table of vectors among {', '.join(sorted(tensors)) or 'no tensors'}")
    mapping, weights = tensors.get("mapping"), tensors.get("weights")
    if mapping is not None and not 0 <= int(mapping.min()) <= int(mapping.max()) < len(table):
        raise ModelLoadFailed("the mapping of ids to rows points outside the table")
    if weights is not None and weights.shape != (len(table if mapping is None else mapping),):
        raise ModelLoadFailed("there are not as many weights as ids")
    return StaticTable(
        table.to(device),
        None if mapping is None else mapping.long().to(device),
        None if weights is None else weights.float().to(device),
    )


def _tensors(layout: Layout) -> dict[str, Tensor]:
    file = layout.transformer / "model.safetensors"
    try:
        if file.is_file():
            return load_file(file)
        return torch.load(layout.transformer / "pytorch_model.bin", map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ModelLoadFailed(f"the table of vectors cannot be read: {error}") from error
