"""The largest batches are run at load, and fewer tokens allowed where they do not fit."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.card import StandInCard

from teimgr.engine.batching.batch import Encoded, PackedBatch
from teimgr.engine.job import Output
from teimgr.engine.model_choice import proven_tokens
from teimgr.errors import OutOfDeviceMemory

KNOWN = [Encoded(np.arange(5, 12, dtype=np.int32)), Encoded(np.array([3], dtype=np.int32))]


class Roomy:
    """A model with room for so many tokens; `shapes` are the texts and tokens of the batches it ran."""

    backbone = SimpleNamespace(device=torch.device("cpu"))

    def __init__(self, room: int, output: Output = Output.DENSE, width: int = 4) -> None:
        self.outputs, self.widths = frozenset({output, Output.TOKENS}), {output: width, Output.TOKENS: width}
        self.room = room
        self.shapes: list[tuple[int, int]] = []
        self.without_heads = 0

    def run(self, batch: PackedBatch, outputs: list[Output]) -> dict[Output, Any]:
        assert set(batch.ids) <= {3, *range(5, 12)}
        assert Output.TOKENS not in outputs
        if batch.tokens > self.room:
            raise torch.AcceleratorError("CUDA error: out of memory")
        self.shapes.append((batch.texts, batch.tokens))
        return {}

    def run_backbone(self, batch: PackedBatch) -> None:
        self.without_heads += 1


def test_a_batch_of_the_longest_texts_and_one_of_short_ones_are_run(card: StandInCard) -> None:
    model = Roomy(room=16384)

    assert proven_tokens(model, KNOWN, 16384, 512) == 16384  # type: ignore[arg-type]
    assert model.shapes == [(32, 16384), (1024, 16384)]


def test_tokens_are_halved_until_they_fit(card: StandInCard, caplog: pytest.LogCaptureFixture) -> None:
    model = Roomy(room=5000)

    assert proven_tokens(model, KNOWN, 16384, 8192) == 4096  # type: ignore[arg-type]
    assert model.shapes == [(1, 4096), (256, 4096)]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_device_without_room_for_a_small_batch_is_refused(card: StandInCard) -> None:
    with pytest.raises(OutOfDeviceMemory, match="256 tokens"):
        proven_tokens(Roomy(room=100), KNOWN, 16384, 512)  # type: ignore[arg-type]


def test_another_failure_is_not_memory(card: StandInCard) -> None:
    card.fault = torch.AcceleratorError("CUDA error: unspecified launch failure")
    with pytest.raises(torch.AcceleratorError, match="unspecified"):
        proven_tokens(Roomy(room=16384), KNOWN, 16384, 512)  # type: ignore[arg-type]


def test_results_that_a_batch_never_has_at_once_are_not_asked_for(card: StandInCard) -> None:
    model = Roomy(room=16384, output=Output.MULTI_VECTOR, width=1 << 14)

    assert proven_tokens(model, KNOWN, 16384, 512) == 16384  # type: ignore[arg-type]
    assert (model.shapes, model.without_heads) == ([], 2)
