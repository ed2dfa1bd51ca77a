"""Fixtures: a mux process for the whole run, and per test a control connection, workers and a client."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from tests.support.frame_worker import FrameWorker, Script, lengths
from tests.support.mux_process import Control, MuxProcess, client

StartWorker = Callable[..., Awaitable[FrameWorker]]
_serial = count()


@pytest.fixture(scope="session")
def mux() -> Iterator[MuxProcess]:
    """One mux process that all tests share; each pushes its own directory."""
    process = MuxProcess()
    yield process
    process.close()
    ours = [line for line in process.log if "grpc._cython" not in line]  # it complains of a client that left mid-status
    assert [line for line in ours if '"level": "error"' in line or '"level": "critical"' in line] == []


@pytest.fixture
async def control(mux: MuxProcess) -> AsyncIterator[Control]:
    """The daemon's connection to the shared mux."""
    connection = await Control.connect(mux)
    await connection.push()
    yield connection
    await connection.close()


@pytest.fixture
async def start_worker() -> AsyncIterator[StartWorker]:
    """Start scripted workers; each call gives a new one under a fresh incarnation."""
    folder = Path(tempfile.mkdtemp(prefix="t"))
    workers: list[FrameWorker] = []

    async def start(script: Script = lengths) -> FrameWorker:
        serial = next(_serial)
        worker = FrameWorker(folder / f"{serial}.sock", f"incarnation-{serial}", script)
        await worker.listen()
        workers.append(worker)
        return worker

    yield start
    for worker in workers:
        worker.drop()
    shutil.rmtree(folder)


@pytest.fixture
async def channel(mux: MuxProcess, control: Control) -> AsyncIterator[grpc.aio.Channel]:
    """A client's channel to the shared mux."""
    async with client(await control.stats()) as channel:
        yield channel


@pytest.fixture
def start_mux() -> Iterator[Callable[..., MuxProcess]]:
    """Start mux processes with a config of their own."""
    with contextlib.ExitStack() as stack:

        def start(**overrides: Any) -> MuxProcess:
            process = MuxProcess(**overrides)
            stack.callback(process.close)
            return process

        yield start
