"""What holds an event loop is recorded with its request; a loop that answers is not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from teimgr.observability.loop_watchdog import LoopWatchdog


@dataclass
class Request:
    method: str
    path: str
    body: bytes


def hold(request: Request, seconds: float) -> None:
    time.sleep(seconds)  # what is watched for


async def test_what_holds_the_loop_is_named_with_its_request_and_size() -> None:
    watchdog = LoopWatchdog("the test")
    async with asyncio.timeout(30):
        while not watchdog.held:
            hold(Request("POST", "/embed", b"x" * 77), 1.5)
            await asyncio.sleep(0)
    watchdog.stop()

    [alarm] = watchdog.alarms()
    assert alarm.startswith("the event loop of the test was held for ")
    assert "POST /embed, 77 bytes, in hold" in alarm
    assert watchdog.held_s > 0.2


async def test_a_loop_that_waits_is_not_held() -> None:
    watchdog = LoopWatchdog("the test")
    checked = asyncio.get_running_loop().run_in_executor(None, watchdog._check)
    await checked
    watchdog.stop()

    assert (watchdog.held, watchdog.alarms()) == (0, [])
