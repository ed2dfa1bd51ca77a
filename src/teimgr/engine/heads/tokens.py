"""The hidden state of every token."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from teimgr.engine.batch import PackedBatch
from teimgr.engine.heads.base import Rows, moved


class TokensHead:
    """The last hidden states as they are, special tokens and prompt included."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __call__(self, hidden: Tensor, batch: PackedBatch) -> Rows:
        """The batch's own rows, in the model's type."""
        return Rows(hidden, moved(batch.cu_seqlens.astype(np.int64), hidden.device))
