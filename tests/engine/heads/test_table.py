"""The mean of a table's rows by one kernel, against the pooling of rows that are written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from teimgr.engine.backbone import StaticTable
from teimgr.engine.batching.batch import Encoded, pack_as_given
from teimgr.engine.heads.pooling import DenseHead

ROWS, WIDTH, IDS = 50, 8, 100


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_is_that_of_the_rows(mapped: bool, weighted: bool) -> None:
    torch.manual_seed(0)
    parts: dict[str, Any] = {
        "mapping": torch.arange(IDS) // 2 if mapped else None,
        "weights": torch.rand(IDS) if weighted else None,
    }
    table = StaticTable(torch.randn(ROWS if mapped else IDS, WIDTH), **parts)
    chooser = np.random.default_rng(0)
    texts = [Encoded(chooser.integers(0, IDS, length, dtype=np.int32)) for length in (3, 1, 40, 7)]
    batch = pack_as_given(texts)

    means = table.mean_head(nn.Sequential())(torch.empty(0), batch).values

    pooled = DenseHead(("mean",), nn.Sequential(), WIDTH)(table.hidden(batch), batch).values
    torch.testing.assert_close(means, pooled, rtol=1e-6, atol=1e-7)
    assert table.is_float32_on_cpu
