"""The switch interval is short within blocks, and as before when the last of them ends; threads that compute rest."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator

import pytest

from teimgr.wire import gil_interval
from teimgr.wire.freeing import free
from teimgr.wire.gil_interval import short_turns
from teimgr.wire.json_pieces import dumps
from teimgr.wire.json_scan import completed, loads
from teimgr.wire.step_thread import StepThread

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
        while time.perf_counter() - began < 2 * gil_interval._WORK_S:
            pass
        yield
    return STEPS


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    taken: list[float] = []
    monkeypatch.setattr(gil_interval.time, "sleep", taken.append)
    return taken


async def test_a_thread_that_computes_rests_between_its_steps(rests: list[float]) -> None:
    """Else it has the GIL whenever a loop wants it: a call that needs it 100 times took 400 ms beside such a thread."""
    thread = StepThread("steps")
    try:
        assert await thread.run(steps()) == STEPS
    finally:
        thread.close()
    assert len(rests) >= STEPS - 1

    rests.clear()
    assert await asyncio.to_thread(completed, steps()) == STEPS
    assert len(rests) == STEPS


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
