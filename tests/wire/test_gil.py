"""The switch interval is short within blocks, and as before when the last of them ends; threads that compute rest."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator, Iterator
from threading import Event, get_ident
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from teimgr.http.turns import TURNS_OF
from teimgr.wire import gil
from teimgr.wire.gil import StepThread, free, freed, short_turns
from teimgr.wire.json_pieces import dumps
from teimgr.wire.json_scan import completed, loads

STEPS = 20


def test_turns_are_short_until_the_last_block_ends() -> None:
    before = sys.getswitchinterval()
    with short_turns():
        with pytest.raises(KeyError), short_turns():
            raise KeyError
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


def steps() -> Generator[None, None, int]:
    """Each takes as long as a thread may compute without a rest."""
    for _ in range(STEPS):
        began = time.perf_counter()
        while time.perf_counter() - began < 2 * gil._WORK_S:
            pass
        yield
    return STEPS


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(gil.time, "sleep", taken.append)
    return taken


async def test_a_thread_that_computes_rests_between_its_steps(rests: list[float]) -> None:
    """Else it has the GIL whenever a loop wants it: a call that needs it 100 times took 400 ms beside such a thread."""
    assert await asyncio.to_thread(completed, steps()) == STEPS
    assert len(rests) == STEPS

    rests.clear()
    thread = StepThread("steps")
    try:
        assert await thread.run(steps()) == STEPS
    finally:
        thread.close()  # which does not wait for the rest after the last step
    assert len(rests) >= STEPS - 1


def test_long_reading_writing_and_freeing_rest(rests: list[float]) -> None:
    value = loads(b"[" + b'{"a":"b"},' * 40_000 + b"0]")
    assert len(rests) >= 5
    rests.clear()
    assert len(dumps(value)) > 400_000
    assert rests
    rests.clear()
    free(value)
    assert rests


async def test_a_thread_with_a_loop_does_not_sleep(rests: list[float]) -> None:
    assert completed(steps()) == STEPS
    assert not rests


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


class Holder(BaseModel):
    values: list[Any]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        (b"[" + b'"text",' * 99 + b"0]", 100),
        (b'{"input":[[' + b"0," * 99 + b"1]]}", 1 + 1 + 100),
        (b'{"a":{"b":{"c":' + b"[" * 900 + b"]" * 900 + b"}}}", 3 + 899),
        (b'["a"]', 1),
        (b"[]", 0),
        (b'"text"', 0),
    ],
)
def test_one_step_frees_few_values(text: bytes, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil, "_AT_ONCE", 1)
    assert sum(1 for _ in freed(orjson.loads(text))) == steps


def test_values_of_objects_are_freed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gil, "_AT_ONCE", 1)
    body = [Holder(values=[1, 2, 3]), Holder(values=[4])]
    assert sum(1 for _ in freed(body)) == 2 + 2 + 4


def test_what_another_holds_stays_as_it_is() -> None:
    shared: dict[str, Any] = {"inner": [1, [2]]}
    kept = shared["inner"]
    value = {"shared": shared, "own": [kept, "a"], "rows": [[shared], Holder(values=[kept])]}
    holder = value["rows"][1]
    free(value)
    assert value == {}
    assert shared == {"inner": [1, [2]]}
    assert holder.values == [[1, [2]]]


async def test_a_caller_with_many_generators_gets_no_more_steps_than_one_with_a_single_one(thread: StepThread) -> None:
    taken: list[str] = []
    all_wait = Event()

    def steps(name: str, count: int) -> Generator[None, None, None]:
        all_wait.wait(10)
        for _ in range(count):
            taken.append(name)
            yield

    async def of(caller: str, count: int) -> None:
        TURNS_OF.set(caller)
        await thread.run(steps(caller, count))

    calls = [asyncio.create_task(of(caller, 50)) for caller in ("many",) * 40 + ("one",)]
    await asyncio.sleep(0)
    all_wait.set()
    await asyncio.gather(*calls)

    last = max(at for at, name in enumerate(taken) if name == "one")
    assert taken[:last].count("many") <= 51
