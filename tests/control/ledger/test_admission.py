"""Loads take turns at the ledger, and none waits for another one's relief; what workers grow to counts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from tests.support.models import build

from teimgr.config.settings import Settings
from teimgr.control.ledger.admission import Admission
from teimgr.control.ledger.footprints import FIRST_CALLS_BYTES, Footprints, ModelOptions
from teimgr.control.ledger.ledger import HEADROOM_BYTES, Footprint, Ledger, Reservation
from teimgr.control.placement.planner import worker_spec
from teimgr.spec import InstanceSpec, WorkerSpec

MIB = 2**20
SIZES = {
    "loading": Footprint(host_bytes=30 * MIB, loading_bytes=60 * MIB),
    "large": Footprint(host_bytes=70 * MIB),
    "small": Footprint(host_bytes=40 * MIB),
}


class Known(Footprints):
    """The figures of three models."""

    def known(self, spec: ModelOptions, device_kind: str) -> Footprint:
        return SIZES[spec.model_id]


def _spec(name: str) -> WorkerSpec:
    return worker_spec(InstanceSpec(name=name, model_id=name), Settings())


async def _refresh() -> None:
    pass


async def test_a_load_that_waits_for_an_eviction_keeps_none_behind_it_waiting() -> None:
    admission = Admission(Ledger(host_budget=100 * MIB), Known(), _refresh)
    asked, room = asyncio.Event(), asyncio.Event()

    async def relief(instance: str, needed: int, free: int, held: Mapping[str, int], device: str) -> bool:
        asked.set()
        await room.wait()
        return True

    admission.relieve_by(relief)
    loading = await admission.take(_spec("loading"), "cpu")
    large = asyncio.create_task(admission.take(_spec("large"), "cpu"))  # will fit, as it is expected
    await asyncio.sleep(0)
    small = asyncio.create_task(admission.take(_spec("small"), "cpu"))
    await asyncio.sleep(0)
    admission.settle(loading, _spec("loading"), "cpu", 50 * MIB, 0)  # takes more than expected
    await asyncio.wait_for(asked.wait(), 30)
    granted = await asyncio.wait_for(small, 30)
    assert isinstance(granted, Reservation)
    admission.release(granted)
    admission.release(loading)
    room.set()
    assert (await asyncio.wait_for(large, 30)).instance == "large"


async def test_a_worker_is_expected_to_take_the_most_that_earlier_ones_took(tmp_path: Path) -> None:
    admission = Admission(Ledger(), Footprints(), _refresh)
    spec = _spec(str(build("bert", tmp_path / "model")))

    async def life(*readings: int) -> list[int]:
        """What is reserved before the load, and after each of these readings of private memory."""
        await admission.look(spec, None)
        held = await admission.take(spec, "cpu")
        reserved = [held.footprint.host_bytes]
        for private in readings:
            admission.settle(held, spec, "cpu", private, 0)
            reserved.append(held.footprint.host_bytes)
        admission.release(held)
        return reserved

    _, first, grown = await life(30 * MIB, 40 * MIB)
    assert 30 * MIB < first < 40 * MIB == grown
    assert await life(30 * MIB, 40 * MIB) == [grown] * 3
    assert await life(30 * MIB) == [grown] * 2
    for _ in range(50):  # none grows any more
        last = await life(30 * MIB)
    assert first <= last[0] < 1.01 * first


async def test_workers_that_outgrow_the_budget_are_told_with_what_each_holds() -> None:
    admission = Admission(Ledger(host_budget=100 * MIB), Known(), _refresh)
    told: list[tuple[str, int, Mapping[str, int], str]] = []
    admission.tell_outgrown(lambda *what: told.append(what))
    large, small = _spec("large"), _spec("loading")
    first = await admission.take(large, "cpu")
    admission.settle(first, large, "cpu", 30 * MIB, 0)
    second = await admission.take(small, "cpu")
    admission.settle(second, small, "cpu", 50 * MIB, 0)
    assert not told
    admission.settle(first, large, "cpu", 57 * MIB, 0)
    held = {"large": 57 * MIB, "loading": 50 * MIB + FIRST_CALLS_BYTES}
    assert told == [("large", sum(held.values()) - 100 * MIB, held, "")]


async def test_the_system_shows_of_a_loaded_worker_only_what_it_takes_now() -> None:
    ledger = Ledger()
    ledger.report("", "host memory", 1000 * MIB, 100 * MIB + HEADROOM_BYTES)
    admission, spec = Admission(ledger, Known(), _refresh), _spec("large")
    held = await admission.take(spec, "cpu")
    admission.settle(held, spec, "cpu", 10 * MIB, 0)
    ledger.report("", "host memory", 1000 * MIB, 90 * MIB + HEADROOM_BYTES)
    assert ledger.free("") == 90 * MIB - FIRST_CALLS_BYTES
    admission.settle(held, spec, "cpu", 30 * MIB, 0)
    ledger.report("", "host memory", 1000 * MIB, 70 * MIB + HEADROOM_BYTES)
    assert ledger.free("") == 70 * MIB


async def test_a_load_that_ends_after_it_was_woken_keeps_none_behind_it_waiting() -> None:
    refreshing, may_refresh = asyncio.Event(), asyncio.Event()

    async def refresh() -> None:
        refreshing.set()
        await may_refresh.wait()

    admission = Admission(Ledger(host_budget=100 * MIB), Known(), refresh)
    loading = await admission.take(_spec("loading"), "cpu")
    first = asyncio.create_task(admission.take(_spec("large"), "cpu"))  # will fit, as it is expected
    await asyncio.sleep(0)
    second = asyncio.create_task(admission.take(_spec("small"), "cpu"))
    await asyncio.sleep(0)
    admission.release(loading)  # the last change of the ledger
    await asyncio.wait_for(refreshing.wait(), 30)

    first.cancel()
    may_refresh.set()

    assert (await asyncio.wait_for(second, 30)).instance == "small"
    assert not admission.claimed("")
