"""Work in the background of a block."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import orjson

from teimgr.control.background import DelayedJson, in_background


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


class Kept:
    """A value whose first write waits on its thread until it is let go, with the value as it was."""

    def __init__(self, path: Path) -> None:
        self.value = 1
        self.is_reading, self.may_go_on = threading.Event(), threading.Event()
        self.file = DelayedJson(path, "a value", self._content)

    def _content(self) -> dict[str, Any]:
        found = {"value": self.value}
        self.is_reading.set()
        assert self.may_go_on.wait(30)
        return found


async def test_a_change_that_comes_while_the_one_before_is_written_is_written_too(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "kept.json")
    kept.file.write_soon()
    assert await asyncio.to_thread(kept.is_reading.wait, 30)
    kept.value = 2
    kept.file.write_soon()
    closing = asyncio.create_task(kept.file.close())
    await asyncio.sleep(0)
    kept.may_go_on.set()
    await closing
    assert orjson.loads((tmp_path / "kept.json").read_bytes()) == {"version": 1, "value": 2}
