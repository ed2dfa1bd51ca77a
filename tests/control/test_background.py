"""Work in the background of a block."""

from __future__ import annotations

import asyncio

from teimgr.control.background import in_background


async def test_work_runs_while_the_block_does_and_has_ended_after_it() -> None:
    seen = []
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            seen.append("ended")

    async with in_background(work, "some work"):
        await asyncio.wait_for(begun.wait(), 5)
        assert "some work" in {task.get_name() for task in asyncio.all_tasks()}
    assert seen == ["ended"]
