"""Generators run step by step on one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from threading import Event, get_ident

import pytest

from teimgr.wire.step_thread import StepThread


@pytest.fixture
def thread() -> Iterator[StepThread]:
    made = StepThread("steps")
    yield made
    made.close()


async def test_generators_take_turns(thread: StepThread) -> None:
    taken: list[str] = []
    threads: set[int] = set()
    both_wait = Event()

    def steps(name: str, count: int) -> Generator[None, None, str]:
        both_wait.wait(10)
        for _ in range(count):
            taken.append(name)
            threads.add(get_ident())
            yield
        return name

    long = asyncio.create_task(thread.run(steps("long", 50)))
    short = asyncio.create_task(thread.run(steps("short", 3)))
    await asyncio.sleep(0)
    both_wait.set()

    assert [await long, await short] == ["long", "short"]
    assert taken[:6] == ["long", "short"] * 3
    assert len(threads) == 1
    assert get_ident() not in threads


async def test_an_error_is_the_callers_and_the_others_go_on(thread: StepThread) -> None:
    def failing() -> Generator[None, None, None]:
        yield
        raise ValueError("no")

    def fine() -> Generator[None, None, int]:
        yield
        yield
        return 7

    found = await asyncio.gather(thread.run(failing()), thread.run(fine()), return_exceptions=True)
    assert isinstance(found[0], ValueError)
    assert found[1] == 7


async def test_a_cancelled_call_ends_its_generator(thread: StepThread) -> None:
    began, ended = Event(), Event()

    def endless() -> Generator[None, None, None]:
        try:
            while True:
                began.set()
                yield
        finally:
            ended.set()

    call = asyncio.create_task(thread.run(endless()))
    await asyncio.to_thread(began.wait, 10)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(ended.wait, 10)
