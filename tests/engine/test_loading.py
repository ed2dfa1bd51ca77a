"""Limits follow from options and model, and what cannot be served is refused by the name of its key."""

from __future__ import annotations

from pathlib import Path

import pytest

from teimgr.engine.loading import EngineOptions, _limits


@pytest.mark.parametrize(("batch", "beside_queries"), [(16384, 4096), (4096, 2048), (1000, 1000)])
def test_bulk_batches_are_smaller_beside_queries_on_a_gpu_too(batch: int, beside_queries: int) -> None:
    options = EngineOptions(path=Path("x"), model_id="x", device="cuda", max_batch_tokens=batch)
    limits = _limits(options, None)  # type: ignore[arg-type]  # only a CPU's limits look at the model

    assert (limits.tokens, limits.bulk_tokens_beside_interactive) == (batch, beside_queries)
