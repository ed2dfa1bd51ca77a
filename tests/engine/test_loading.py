"""Limits follow from options and model, and what cannot be served is refused by the name of its key."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from teimgr.engine.loading import EngineOptions, _limits, load_parts
from teimgr.errors import InvalidConfig


@pytest.mark.parametrize(("batch", "beside_queries"), [(16384, 4096), (4096, 2048), (1000, 1000)])
def test_bulk_batches_are_smaller_beside_queries_on_a_gpu_too(batch: int, beside_queries: int) -> None:
    options = EngineOptions(path=Path("x"), model_id="x", device="cuda", max_batch_tokens=batch)
    limits = _limits(options, None)  # type: ignore[arg-type]  # only a CPU's limits look at the model

    assert (limits.tokens, limits.bulk_tokens_beside_interactive) == (batch, beside_queries)


@pytest.mark.parametrize("tokens", [0, 1, 2])
def test_a_limit_without_room_for_a_text_is_refused_by_name(tokens: int, model_dir: Callable[..., Path]) -> None:
    path = model_dir("bert")
    with pytest.raises(InvalidConfig, match=f"max_batch_tokens is {tokens}.*at least 3"):
        load_parts(EngineOptions(path=path, model_id="x", max_batch_tokens=tokens))
    assert load_parts(EngineOptions(path=path, model_id="x", max_batch_tokens=3)).info.max_input_length == 3

    short = model_dir("bert", max_length=max(tokens, 1))
    with pytest.raises(InvalidConfig, match=f"max_seq_length.* is {max(tokens, 1)}.*at least 3"):
        load_parts(EngineOptions(path=short, model_id="x"))
