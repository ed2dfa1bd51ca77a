"""Logs of another host over mutual TLS: slices, lines as they come, who may read, and what breaks off."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.support.cluster import HOST, FleetNodes, TcpProxy

from teimgr.cluster import host_service
from teimgr.cluster.host_link import HostAddress, connect
from teimgr.cluster.host_models import HostModels
from teimgr.cluster.host_service import HostListener, HostService, RemoteLogs
from teimgr.errors import Forbidden, InvalidInput, InvalidInstanceName, Unavailable
from teimgr.observability.log_files import Gap
from teimgr.observability.log_source import Batch, LocalLogs, LogFilter

LIMIT_S = 20.0
ALL = LogFilter()


@dataclass
class Served:
    """A host `two` that serves the logs in its folder, and the daemon's view of it."""

    nodes: FleetNodes
    folder: Path
    address: str

    def logs(self, by: str = "", name: str = "two", address: str = "") -> RemoteLogs:
        return RemoteLogs(HostAddress(name, address or self.address), self.nodes.identity(by))

    def write(self, *lines: str) -> None:
        with (self.folder / "a.log").open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Served]:
    nodes, logs = FleetNodes(folder / "ca"), folder / "logs"
    logs.mkdir()
    listener = HostListener(
        HostService(LocalLogs(logs, "two"), HostModels(lambda: 1 << 30, folder / "cache")), nodes.identity("two"), HOST
    )
    listener.start()
    try:
        yield Served(nodes, logs, listener.address)
    finally:
        await listener.close()


async def test_a_slice_and_then_what_comes(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, asyncio.timeout(LIMIT_S):
        served.write(*(f"line {number}" for number in range(1000)))
        log = await served.logs().open("a", ALL, follow=True)
        assert log is not None
        assert log.total == 1000
        past = [item async for batch in log.past(100, 1000) for item in batch]
        assert past == [f"line {number}" for number in range(100, 1000)]
        async with aclosing(log.live()) as live:
            served.write("new \ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"))
            found: Batch = []
            while not found:
                found = await anext(live)
            assert found == ["new \U0001f600"]
        await log.close()


async def test_filters_apply_there(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        served.write('{"level": "info", "message": "no"}', '{"level": "error", "message": "yes"}', "of it")
        log = await served.logs().open("a", LogFilter.of("error", None), follow=False)
        assert log is not None
        assert [item async for batch in log.past(0, log.total) for item in batch] == [
            '{"level": "error", "message": "yes"}',
            "of it",
        ]


async def test_a_host_without_the_log(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        assert await served.logs().open("b", ALL, follow=False) is None


async def test_the_daemon_alone_reads_logs_and_names_are_no_paths(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        served.write("secret")
        with pytest.raises(Forbidden, match="for the daemon alone"):
            await served.logs(by="three").open("a", ALL, follow=False)
        with pytest.raises(InvalidInstanceName):
            await served.logs().open("../logs/a", ALL, follow=False)


async def test_another_host_at_the_address_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        with pytest.raises(Unavailable, match="spiffe://teimgr/node/two"):
            await served.logs(name="three").open("a", ALL, follow=False)
        stranger = RemoteLogs(HostAddress("two", served.address), FleetNodes(tmp_path / "other").identity(""))
        with pytest.raises(Unavailable, match="no connection"):
            await stranger.open("a", ALL, follow=False)


async def test_what_is_no_request_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as served:
        for request in ({"op": "nothing"}, {"op": "log", "name": "a"}):
            link = await connect(HostAddress("two", served.address), served.nodes.identity(""))
            await link.send(**request)
            with pytest.raises(InvalidInput):
                await link.receive()
            await link.close()


async def test_a_follower_of_a_host_that_was_cut_off_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_service, "SILENCE_LIMIT_S", 3.0)
    async with serving(tmp_path) as served, TcpProxy(served.address) as network, asyncio.timeout(LIMIT_S):
        served.write("before")
        log = await served.logs(address=network.address).open("a", ALL, follow=True)
        assert log is not None
        assert [item async for batch in log.past(0, 1) for item in batch] == ["before"]
        async with aclosing(log.live()) as live:
            assert await anext(live) == []  # a sign of life
            network.freeze()
            with pytest.raises(Unavailable, match="no answer for 3 s"):
                await _drained(live)
        await log.close()


async def _drained(live: AsyncGenerator[Batch]) -> None:
    async for _ in live:
        pass


async def test_lines_that_were_lost_stay_marked(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, asyncio.timeout(LIMIT_S):
        served.write("one")
        log = await served.logs().open("a", ALL, follow=True)
        assert log is not None
        assert [item async for batch in log.past(0, 1) for item in batch] == ["one"]
        (served.folder / "new").write_text("of another file, longer than the one before\n")
        (served.folder / "new").replace(served.folder / "a.log")  # rotated away, and no file is left of it
        async with aclosing(log.live()) as live:
            found: Batch = []
            while len(found) < 2:
                found += await anext(live)
        assert found == [Gap(), "of another file, longer than the one before"]
        await log.close()
