"""Dense models with routes by role (a Router or Asym of sentence-transformers): queries through other modules than
documents.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from teimgr.engine.backbone import StaticTable, Transformer
from teimgr.engine.batching.batch import Encoded, PackedBatch, to_device
from teimgr.engine.heads import Rows
from teimgr.engine.job import Output
from teimgr.engine.model import Model
from teimgr.errors import ModelLoadFailed


class RoutedModel(Model):
    """A model of queries and one of documents, each of which has passed the gate on its own: each text goes to the one
    of its role. The transformer may be the same.
    """

    def __init__(self, documents: Model, queries: Model) -> None:
        """Raises ModelLoadFailed where their vectors have different sizes."""
        widths = [model.widths[Output.DENSE] for model in (queries, documents)]
        if widths[0] != widths[1]:
            raise ModelLoadFailed(
                f"the route of queries gives vectors of {widths[0]} numbers and the one of documents of {widths[1]}: "
                "they cannot be compared"
            )
        self._documents, self._queries = documents, queries
        super().__init__(_larger(documents, queries).backbone, {Output.DENSE: documents._heads[Output.DENSE]})

    @property
    def is_native(self) -> bool:
        parts = [part for part in (self._documents, self._queries) if not isinstance(part.backbone, StaticTable)]
        return all(part.is_native for part in parts)

    @property
    def is_packed(self) -> bool:
        return self._documents.is_packed and self._queries.is_packed

    def close(self, timeout_s: float) -> None:
        self._documents.close(timeout_s)
        if self._queries.backbone is not self._documents.backbone:
            self._queries.close(timeout_s)

    @torch.inference_mode()
    def run(self, batch: PackedBatch, outputs: Iterable[Output]) -> dict[Output, Rows]:
        wanted = list(outputs)
        queries = batch.queries
        if queries is None or not queries.any():
            return self._documents.run(batch, wanted)
        if queries.all():
            return self._queries.run(batch, wanted)
        values = torch.empty(batch.texts, self.widths[Output.DENSE], device=self.backbone.device)
        for model, texts in ((self._queries, queries), (self._documents, ~queries)):
            found = model.run(batch.only(texts), [Output.DENSE])[Output.DENSE].values
            values[to_device(np.flatnonzero(texts), values.device)] = found.float()
        return {Output.DENSE: Rows(values)} if wanted else {}

    def run_reference(self, encoded: Encoded) -> dict[Output, Rows]:
        return (self._queries if encoded.query else self._documents).run_reference(encoded)


def _larger(first: Model, second: Model) -> Model:
    """The one with the wider transformer, by which the limits of a batch are worked out."""
    return max(first, second, key=lambda one: one.backbone.width if isinstance(one.backbone, Transformer) else 0)
