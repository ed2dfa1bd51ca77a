"""An agent whose host leaves the cluster, over its socket."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.polling import eventually

from teimgr.cluster.agent import Agent
from teimgr.cluster.messages import NodeFacts
from teimgr.control.launch.launcher import FoundWorkers, LocalLauncher
from teimgr.control.launch.process_handle import LaunchFailed
from teimgr.spec import WorkerSpec


class SlowLauncher:
    """Forks nothing until it may, and then fails."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()
        self.launched = 0

    async def find(self) -> FoundWorkers:
        return FoundWorkers([], [])

    async def launch(self, spec: WorkerSpec) -> Any:
        self.launched += 1
        await self.may_end.wait()
        raise LaunchFailed("it is only a test")


@pytest.fixture
async def launcher() -> SlowLauncher:
    return SlowLauncher()


@pytest.fixture
async def agent(launcher: SlowLauncher) -> AsyncIterator[Agent]:
    async def facts() -> NodeFacts:
        raise NotImplementedError

    with tempfile.TemporaryDirectory(prefix="t") as short:
        made = Agent(cast(LocalLauncher, launcher), Path(short), facts, "127.0.0.3", Path(short, "identity"))
        await made.start()
        yield made
        await made.close()


class Client:
    """A connection to the agent."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader

    async def answer(self) -> Any:
        return json.loads(await self._reader.readline())


Ask = Callable[..., Awaitable[Client]]


@pytest.fixture
async def ask(agent: Agent) -> AsyncIterator[Ask]:
    """Send a request to the agent on a connection of its own."""
    writers = []

    async def asking(**message: object) -> Client:
        reader, writer = await asyncio.open_unix_connection(str(agent.socket))
        writers.append(writer)
        writer.write(json.dumps(message).encode() + b"\n")
        return Client(reader)

    yield asking
    for each in writers:
        each.close()
        await each.wait_closed()


async def test_a_host_that_leaves_waits_for_a_worker_that_is_being_forked_and_takes_no_other(
    agent: Agent, launcher: SlowLauncher, ask: Ask
) -> None:
    """It reported that it had left, and took another one after that."""
    spec = WorkerSpec(name="a", model_id="m").to_json()
    launching = await ask(op="launch", spec=spec)
    await eventually(lambda: launcher.launched == 1)

    leaving = await ask(op="leave")
    assert await leaving.answer() == {"workers": 1}
    assert not await agent.emptied(0.01)
    for op in ("launch", "launch mux"):
        refused = await ask(op=op, spec=spec)
        assert "error" in await refused.answer()
    assert launcher.launched == 1

    launcher.may_end.set()
    assert "error" in await launching.answer()
    assert [await leaving.answer() for _ in range(2)] == [{"workers": 0}, {"left": True}]
    assert await agent.emptied(1)
