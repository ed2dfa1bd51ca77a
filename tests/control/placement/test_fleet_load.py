"""The slots of workers that load at the same time."""

from __future__ import annotations

import asyncio

from teimgr.control.placement.fleet_load import LoadSlots


async def test_workers_load_one_after_the_other_where_the_device_has_no_more_room() -> None:
    limits: dict[str | None, int] = {None: 2, "card": 0}
    slots = LoadSlots(lambda gpu: limits[gpu])
    await slots.take(None)
    await slots.take(None)
    await slots.take("card")
    waiting = [asyncio.create_task(slots.take(None)) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    waiting[0].cancel()
    slots.give_back(None)
    await asyncio.wait(waiting[:2])

    assert waiting[0].cancelled()
    assert (waiting[1].done(), waiting[2].done()) == (True, False)
    limits[None] = 1
    slots.give_back(None)
    assert not waiting[2].done(), "one loads, and there is no memory for two"
    slots.give_back(None)
    await waiting[2]
