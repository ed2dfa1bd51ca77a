"""A process of another host by its actor, over a bridge in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from teimgr.cluster.actor_process import ActorProcess
from teimgr.cluster.bridge import ActorAbsent, ActorLost, AnswerLate, Bridge, BridgeLost, RayRefused
from teimgr.cluster.messages import HeldWorker
from teimgr.control.launch.process_handle import WorkMeter


class MemoryBridge:
    """Answers with `activity`, an error or seconds of the process; the process does not end."""

    def __init__(self) -> None:
        self.activity: list[float | Exception] = []

    async def call(self, op: str, *, name: str, method: str = "", arguments: Any = (), limit_s: Any = None) -> Any:
        if method != "activity_s":
            await asyncio.Event().wait()
        found = self.activity.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
async def bridge() -> MemoryBridge:
    return MemoryBridge()


@pytest.fixture
async def process(bridge: MemoryBridge) -> AsyncIterator[ActorProcess]:
    facts = {"spec": "{}", "incarnation": "0123456789ab", "pid": 1, "start_time": 0, "started_at": 0.0}
    held = HeldWorker(**facts, socket="/socket", run_dir="/run", log_path="/log")  # type: ignore[arg-type]
    made = ActorProcess(cast(Bridge, bridge), "a/0", "other", held)
    yield made
    await made.release()


async def test_its_host_tells_whether_it_works(bridge: MemoryBridge, process: ActorProcess) -> None:
    bridge.activity = [10.0, 4_000.0, 4_000.0]
    async with WorkMeter(process) as meter:
        assert await meter.has_worked()
        assert not await meter.has_worked()


@pytest.mark.parametrize(
    "error", [ActorLost("x"), ActorAbsent("x"), AnswerLate("x"), BridgeLost("x"), RayRefused("no such method")]
)
async def test_without_an_answer_of_its_host_nothing_tells_that_it_works(
    bridge: MemoryBridge, process: ActorProcess, error: Exception
) -> None:
    bridge.activity = [10.0, error]
    async with WorkMeter(process) as meter:
        assert not await meter.has_worked()
