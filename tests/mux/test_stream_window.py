"""How far a stream may run ahead."""

from __future__ import annotations

import asyncio

from teimgr.wire.rerank_stream import FEW, HELD_BYTES, StreamWindow


async def entered(window: StreamWindow, limit: int = 10_000) -> int:
    """How many messages the window lets in now, one task entering as long as it can."""
    count = 0

    async def enter() -> None:
        nonlocal count
        while count < limit:
            await window.enter()
            count += 1

    task = asyncio.create_task(enter())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    return count


async def test_a_window_lets_in_its_limit_and_one_more_for_each_that_leaves() -> None:
    window = StreamWindow(50)

    assert await entered(window) == 50
    window.leave(100)
    window.leave(100)
    assert await entered(window) == 2
    assert window.in_flight == 50


async def test_large_answers_shrink_it_to_what_may_lie_in_memory() -> None:
    window = StreamWindow(1024)
    await entered(window)

    for _ in range(1024):
        window.leave(HELD_BYTES // 10)

    assert await entered(window) == 10


async def test_a_conversation_goes_on_however_large_the_answers() -> None:
    window = StreamWindow(1024)
    await window.enter()

    window.leave(HELD_BYTES * 2)

    assert await entered(window) == FEW


async def test_small_answers_open_it_again() -> None:
    window = StreamWindow(64)
    await window.enter()
    window.leave(HELD_BYTES)

    await window.enter()
    window.leave(10)

    assert await entered(window) == 64
