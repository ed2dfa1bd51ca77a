"""Loads take turns at the ledger, and none waits for another one's relief."""

from __future__ import annotations

import asyncio

from teimgr.config.settings import Settings
from teimgr.control.ledger.admission import Admission
from teimgr.control.ledger.footprints import Footprints, ModelOptions
from teimgr.control.ledger.ledger import Footprint, Ledger, Refusal, Reservation
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

    async def relief(spec: WorkerSpec, refusal: Refusal) -> bool:
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
