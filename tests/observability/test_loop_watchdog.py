"""What holds an event loop is recorded with its request; a loop that answers is not."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

import pytest

from teimgr.observability.loop_watchdog import LoopWatchdog


@dataclass
class Request:
    method: str
    path: str
    body: bytes


@dataclass
class Caller:
    name: str


def hold(request: Request, caller: Caller, seconds: float) -> None:
    time.sleep(seconds)  # what is watched for


async def test_what_holds_the_loop_is_named_with_its_request_and_size() -> None:
    watchdog = LoopWatchdog("the test")
    async with asyncio.timeout(30):
        while not watchdog.held:
            hold(Request("POST", "/embed", b"x" * 77), Caller("search"), 1.5)
            await asyncio.sleep(0)
    watchdog.stop()

    [alarm] = watchdog.alarms()
    assert alarm.startswith("the event loop of the test was held for ")
    assert "POST /embed, 77 bytes, of the key 'search', in hold" in alarm
    assert watchdog.held_s > 0.2


async def test_a_thread_that_holds_the_gil_is_named_with_what_it_parses(caplog: pytest.LogCaptureFixture) -> None:
    """And with its processor time, by which the suite fails on daemons whose loops were held."""
    watchdog = LoopWatchdog("the test")
    body = b"[" + b"1.2345678901234567e-300," * 1_000_000 + b"1]"  # 0.7 s, whatever garbage collection does

    def parse(kind: type, body: bytes) -> None:
        until = time.monotonic() + 60
        while not any("Request, " in alarm for alarm in watchdog.alarms()) and time.monotonic() < until:
            json.loads(body)

    await asyncio.get_running_loop().run_in_executor(None, parse, Request, body)
    watchdog.stop()

    assert f"Request, {len(body)} bytes, in " in watchdog.alarms()[0]
    line = next(record for record in reversed(caplog.records) if record.message == "event loop held")
    assert 0.2 <= line.__dict__["processor_seconds"] <= line.__dict__["seconds"]


async def test_a_loop_that_waits_is_not_held() -> None:
    watchdog = LoopWatchdog("the test")
    checked = asyncio.get_running_loop().run_in_executor(None, watchdog._check)
    await checked
    watchdog.stop()

    assert (watchdog.held, watchdog.alarms()) == (0, [])
