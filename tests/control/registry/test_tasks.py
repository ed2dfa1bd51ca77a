"""A value that is watched: the last one is never missed."""

from __future__ import annotations

import asyncio

from teimgr.control.registry.tasks import Observable


async def test_a_watcher_sees_the_value_now_and_the_last_one() -> None:
    live = Observable(0)

    async def watch() -> list[int]:
        return [value async for value in live.follow()]

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    for value in range(1, 100):
        live.set(value)
    live.close()
    seen = await watching
    assert (seen[0], seen[-1]) == (0, 99)


async def test_a_watcher_that_comes_late_sees_the_last_value_once() -> None:
    live = Observable(1)
    live.set(2)
    live.close()
    assert [value async for value in live.follow()] == [2]


async def test_a_watcher_that_is_slow_misses_no_end() -> None:
    live = Observable(0)
    following = live.follow()
    assert await anext(following) == 0
    live.set(1)
    live.close()
    assert [value async for value in following][-1] == 1
