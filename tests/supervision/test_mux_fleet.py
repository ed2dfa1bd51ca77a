"""Real muxes: adopted by the next daemon, ended when they are not wanted any more."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest

from teimgr.config.settings import Settings
from teimgr.directory import Directory
from teimgr.errors import PortConflict
from teimgr.launch.process_handle import ProcessHandle, look_up
from teimgr.observability.metrics import DaemonMetrics
from teimgr.supervision.muxes import Muxes, MuxRunFile

LIMIT_S = 60.0


class Counted(DaemonMetrics):
    """Metrics that know which muxes gave figures."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: dict[str, asyncio.Event] = {f"mux-{number}": asyncio.Event() for number in range(3)}

    def mux_stats(self, mux: str, figures: object) -> None:
        super().mux_stats(mux, figures)  # type: ignore[arg-type]
        self.heard[mux].set()


crashed: list[Muxes] = []


@pytest.fixture(autouse=True)
def reaped() -> Iterator[None]:
    """What a crashed daemon started is still this process's child."""
    yield
    for supervisor in [supervisor for muxes in crashed for supervisor in muxes._supervisors]:
        assert supervisor._process is not None
        child = supervisor._process._child
        assert child is not None
        child.kill()
        child.wait(LIMIT_S)
    crashed.clear()


async def fed(settings: Settings, stop: bool) -> list[int]:
    """The process numbers of the muxes of a daemon that has fed them all once, and then crashes or stops."""
    metrics = Counted()
    muxes = Muxes(settings, Directory(), metrics)
    if not stop:
        crashed.append(muxes)
    async with asyncio.timeout(LIMIT_S), muxes.running():
        for number in range(settings.mux_processes if settings.grpc_enabled else 0):
            await metrics.heard[f"mux-{number}"].wait()
        found = pids(settings)
        assert muxes.alarms() == []
    if stop:
        await muxes.stop(0)
    return found


def pids(settings: Settings) -> list[int]:
    """Of those that live and have a run file."""
    files = [MuxRunFile.read(path) for path in sorted(settings.run_dir.glob("mux-*.run"))]
    return [found.pid for found in files if found and look_up(found.pid) == found.process]


async def test_the_next_daemon_adopts_them_and_a_stop_ends_them(settings: Settings) -> None:
    settings = replace(settings, mux_processes=2)

    first = await fed(settings, stop=False)
    second = await fed(settings, stop=True)

    assert len(first) == 2
    assert second == first
    assert pids(settings) == []


async def test_one_that_died_is_started_beside_those_that_listen(settings: Settings) -> None:
    settings = replace(settings, mux_processes=2)
    first = await fed(settings, stop=False)
    found = MuxRunFile.read(settings.run_dir / "mux-1.run")
    assert found is not None
    process = ProcessHandle.adopt(found)
    assert process is not None
    process.send_signal(signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        await process.wait()

    second = await fed(settings, stop=True)

    assert second[0] == first[0]
    assert second[1] != first[1]


@pytest.mark.parametrize("wanted", [{"mux_processes": 2}, {"mux_processes": 1}, {"grpc_enabled": False}])
async def test_those_that_are_too_many_are_ended(settings: Settings, wanted: dict[str, int]) -> None:
    first = await fed(replace(settings, mux_processes=3), stop=False)
    fewer = replace(settings, **wanted)  # type: ignore[arg-type]

    second = await fed(fewer, stop=True)

    assert len(first) == 3
    assert len(second) == (fewer.mux_processes if fewer.grpc_enabled else 0)
    assert pids(settings) == []


@pytest.mark.clause("M3.1-port-taken")
async def test_a_stranger_on_the_port_is_said_at_once(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", settings.grpc_port)), pytest.raises(PortConflict):
        async with Muxes(settings, Directory(), DaemonMetrics()).running():
            pass
