"""Pinned buffers are used again once their copy has ended, never before, and are bounded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.card import StandInCard, plain_memory
from tests.support.models import TEXTS

from teimgr.engine.batching import pinned_ring
from teimgr.engine.batching.batch import copy_to, to_device
from teimgr.engine.batching.pinned_ring import Event, PinnedRing
from teimgr.engine.heads import Rows
from teimgr.engine.host_copies import HostCopies
from teimgr.engine.job import Output

from ..conftest import Served

CPU = torch.device("cpu")


def ring(card: StandInCard, buffers: int) -> PinnedRing:
    return PinnedRing(buffers, plain_memory, card.event)


def test_a_buffer_is_used_again_once_its_copy_has_ended(card: StandInCard) -> None:
    own = ring(card, 2)
    card.copies_end = False
    first = own.take(100)
    first.free_after_copy()
    second = own.take(100)
    assert second.memory.data_ptr() != first.memory.data_ptr()

    card.copies_end = True
    assert own.take(100).memory.data_ptr() == first.memory.data_ptr()


def test_what_is_lent_or_freed_decides_not_the_order(card: StandInCard) -> None:
    own = ring(card, 2)
    one, other = own.take(100), own.take(100)
    other.free()

    assert own.take(50).memory.data_ptr() == other.memory.data_ptr()
    assert one.memory.data_ptr() not in {own.take(50).memory.data_ptr() for _ in range(5)}


def test_there_are_so_many_buffers_and_no_more(card: StandInCard) -> None:
    own = ring(card, 3)
    card.copies_end = False
    loans = [own.take(10_000) for _ in range(10)]
    for loan in loans:
        loan.memory.fill_(1)
        loan.free_after_copy()

    assert len({loan.memory.data_ptr() for loan in loans}) == 10
    assert own.size == 3 * 16_384


def test_a_larger_buffer_takes_the_place_of_a_smaller_one(card: StandInCard) -> None:
    own = ring(card, 2)
    for size in (10, 10_000, 100_000, 1_000_000):
        own.take(size).free()

    assert own.size == 131_072 + 1_048_576
    assert len(own.take(40 << 20).memory) == 40 << 20
    assert own.size == 131_072 + 1_048_576


def test_inputs_are_copied_and_may_change_afterwards(card: StandInCard) -> None:
    values = np.arange(1000, dtype=np.int64).reshape(10, 100)
    copies = [to_device(values + i, CPU) for i in range(40)]
    flags = to_device(values > 500, CPU)
    target = torch.zeros(10, 100, dtype=torch.int64)
    copy_to(target, values)
    expected = values.copy()
    values[:] = -1

    assert all(torch.equal(copies[i], torch.from_numpy(expected + i)) for i in range(40))
    assert torch.equal(flags, torch.from_numpy(expected > 500))
    assert torch.equal(target, torch.from_numpy(expected))
    assert to_device(np.zeros(0, np.int32), CPU).shape == (0,)
    assert 0 < pinned_ring.INPUTS.size <= 16 * 8192


def test_results_keep_their_memory_until_they_are_free(card: StandInCard) -> None:
    made = [{Output.DENSE: Rows(torch.full((4, 8), float(i)))} for i in range(3)]
    first = HostCopies(made[0])
    second = HostCopies(made[1])
    vectors = [each.wait()[Output.DENSE].values for each in (first, second)]
    assert [each.flat[0] for each in vectors] == [0.0, 1.0]

    first.free()
    third = HostCopies(made[2])
    assert third.wait()[Output.DENSE].values.ctypes.data == vectors[0].ctypes.data
    assert vectors[1].flat[0] == 1.0
    assert pinned_ring.RESULTS.size == 2 * 4096


def test_a_copy_that_cannot_be_started_gives_its_memory_back(
    card: StandInCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no event")

    rows = {Output.DENSE: Rows(torch.zeros(4, 8))}
    with monkeypatch.context() as patch:
        patch.setattr(pinned_ring, "new_event", fail)
        with pytest.raises(RuntimeError, match="no event"):
            HostCopies(rows)

    HostCopies(rows).wait()
    assert pinned_ring.RESULTS.size == 4096


def test_a_device_that_fails_while_copies_start_is_named_and_memory_that_can_be_given_back_is(
    card: StandInCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first copy's own event fails as well: its memory stays taken, and the second's is free."""
    events = iter([RuntimeError("later error"), card.event()])

    def event() -> Event:
        made = next(events)
        if isinstance(made, Exception):
            raise made
        return made

    def fail() -> None:
        raise RuntimeError("first error")

    own = PinnedRing(16, plain_memory, event)
    monkeypatch.setattr(pinned_ring, "RESULTS", own)
    monkeypatch.setattr(pinned_ring, "new_event", fail)
    with pytest.raises(RuntimeError, match="first error"):
        HostCopies({output: Rows(torch.zeros(4, 8)) for output in (Output.DENSE, Output.TOKENS)})

    assert [buffer.is_free() for buffer in own._buffers] == [False, True]


def test_an_engine_uses_few_buffers_for_many_batches(
    card: StandInCard, model_dir: Callable[..., Path], serve: Callable[..., Served]
) -> None:
    served = serve(model_dir("bert"), dtype="float16")
    for _ in range(20):
        served.embed(TEXTS)

    expected = served.embed(TEXTS).vectors
    for i, text in enumerate(TEXTS):
        np.testing.assert_allclose(served.embed([text]).vectors[0], expected[i], atol=2e-3)
    assert 0 < len(pinned_ring.INPUTS._buffers) <= 16
    assert 0 < len(pinned_ring.RESULTS._buffers) <= 4
    assert all(buffer.is_free() for buffer in pinned_ring.RESULTS._buffers)
