"""Whether a process has worked, from two readings of the processor time of its threads."""

from __future__ import annotations

import asyncio

import pytest

from teimgr.control.supervision.work_meter import WorkMeter


class Process:
    """Its threads have run for `share` of the time that has passed; it is read within a turn of the loop."""

    def __init__(self, share: float | None) -> None:
        self.share = share

    async def activity_s(self) -> float | None:
        at = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        return None if self.share is None else self.share * at


@pytest.mark.parametrize(("share", "worked"), [(4.0, True), (0.3, True), (0.0, False), (None, False)])
async def test_a_process_has_worked_that_ran_for_a_part_of_the_time(share: float | None, worked: bool) -> None:
    async with WorkMeter(Process(share)) as meter:
        assert await meter.has_worked() is worked


async def test_each_call_looks_at_the_time_since_the_last_one() -> None:
    process = Process(1.0)
    async with WorkMeter(process) as meter:
        assert await meter.has_worked()
        process.share = 0.0  # it would have gone backwards: no work since
        assert not await meter.has_worked()
        assert not await meter.has_worked()
        process.share = 1.0
        assert await meter.has_worked()


async def test_nothing_waits_for_a_reading_that_nobody_asks_for() -> None:
    class Silent:
        async def activity_s(self) -> float | None:
            await asyncio.Event().wait()
            return None

    async with asyncio.timeout(5), WorkMeter(Silent()):
        pass
