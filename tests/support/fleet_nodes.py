"""Nodes of a fleet for tests: real certificates, workers that listen for other hosts, and a network that fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path

from tests.support.worker_process import WorkerProcess

from teimgr.cluster.authority import CERTIFICATE_LIFE, FleetAuthority, utc_now
from teimgr.control.launch.control_link import identify
from teimgr.spec import WorkerEndpoint
from teimgr.wire.fleet_tls import FleetIdentity, FleetName, write_identity

HOST = "127.0.0.1"


class FleetNodes:
    """An authority in a folder of its own, and the identities that it gives to nodes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offset = timedelta()
        self._authority = FleetAuthority(folder / "ca", self._now)

    def identity(self, node: str, *, valid_s: float | None = None) -> FleetIdentity:
        """The identity of a node, "" for the daemon, whose certificate expires in `valid_s` seconds, if given."""
        self.renew(node, valid_s=valid_s)
        return FleetIdentity(self.folder(node), node)

    def renew(self, node: str, *, valid_s: float | None = None) -> None:
        self._offset = timedelta() if valid_s is None else timedelta(seconds=valid_s) - CERTIFICATE_LIFE
        key, certificate = self._authority.issue_own(FleetName(node))
        write_identity(self.folder(node), key, certificate, self._authority.authorities())

    def folder(self, node: str) -> Path:
        return self._folder / (node or "daemon")

    def _now(self) -> datetime:
        return utc_now() + self._offset


def worker_on(nodes: FleetNodes, node: str, model: Path, incarnation: str = "inc-1", **spec: object) -> WorkerProcess:
    """A worker of a node, which listens for other hosts too."""
    nodes.renew(node)
    own = {"host": node, "link_address": HOST, "identity_dir": str(nodes.folder(node))}
    return WorkerProcess(model, incarnation=incarnation, **own, **spec)


async def endpoint_of(worker: WorkerProcess) -> WorkerEndpoint:
    """The endpoint by the worker's own announcement."""
    status = await identify(Path(worker.socket), 30.0)
    assert status is not None
    assert status.address
    return WorkerEndpoint(worker.socket, status.incarnation, status.node, status.address)


@dataclass(eq=False)
class TcpProxy:
    """A network between a client and `target`, which can be cut. Use as a context manager."""

    target: str
    frozen: asyncio.Event = field(default_factory=asyncio.Event)
    answered_bytes: int = 0
    cut_after: int | None = None
    """Cut every connection after so many bytes of answers."""
    _server: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def address(self) -> str:
        assert self._server is not None
        return "{}:{}".format(*self._server.sockets[0].getsockname()[:2])

    @property
    def connections(self) -> int:
        return len(self._tasks)

    def freeze(self) -> None:
        """Pass nothing on any more, as a cable that is cut: neither end hears of it."""
        self.frozen.set()

    def heal(self) -> None:
        self.frozen.clear()

    def cut(self) -> None:
        """Break every connection."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def __aenter__(self) -> TcpProxy:
        self._server = await asyncio.start_server(self._connected, HOST, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            host, _, port = self.target.rpartition(":")
            there_reader, there = await asyncio.open_connection(host, int(port))
            self._writers.add(there)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass(reader, there, answers=False))
                    group.create_task(self._pass(there_reader, writer, answers=True))
            finally:
                self._writers.discard(there)
                there.transport.abort()
        except (OSError, ExceptionGroup):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool) -> None:
        while data := await reader.read(1 << 16):
            if self.frozen.is_set():
                continue
            if answers:
                self.answered_bytes += len(data)
                if self.cut_after is not None and self.answered_bytes > self.cut_after:
                    break
            writer.write(data)
            with suppress(OSError):
                await writer.drain()
        raise ConnectionResetError
