"""Forwarding of an instance's port over real TLS: the head's end, and hosts whose "workers" are servers of the test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.daemon_process import free_ports
from tests.support.fleet import local_launcher
from tests.support.fleet_nodes import HOST, FleetNodes
from tests.support.polling import eventually

from teimgr.cluster.host_link import HostAddress, HostServices
from teimgr.cluster.host_models import HostModels
from teimgr.cluster.host_service import HostListener, HostService
from teimgr.cluster.port_forwarding import PortForwarding
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.observability.log_source import LocalLogs
from teimgr.spec import RouteEntry, State, WorkerEndpoint, WorkerSpec
from teimgr.wire.routing.router import Directory

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
NAME = "a"


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Everything back, and the end after the end."""
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.close()


class RemoteHost:
    """A host `name` with a service, and one worker whose port is served by `handler` until `stop_worker`."""

    def __init__(self, name: str, nodes: FleetNodes, folder: Path, handler: Handler) -> None:
        self.name = name
        self.incarnation = f"{name}-1"
        self.connections = 0
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        models = HostModels(lambda: 1 << 30, folder / "cache")
        service = HostService(LocalLogs(folder, name), models, self._port_of)
        self.listener = HostListener(service, nodes.identity(name), HOST)
        self.address = self.listener.address
        """Where the head reaches it; a test may put a network in between."""

    @property
    def open_connections(self) -> int:
        """Of the worker."""
        return len(self._tasks)

    async def start(self) -> None:
        await self.start_worker()
        self.listener.start()

    async def start_worker(self) -> None:
        self._server = await asyncio.start_server(self._serve, HOST, 0)
        self._port = int(self._server.sockets[0].getsockname()[1])

    async def stop_worker(self) -> None:
        """End it and its connections; the service goes on."""
        if self._server is not None:
            self._server.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        await self.listener.close()
        await self.stop_worker()

    def _port_of(self, incarnation: str) -> tuple[str, int] | None:
        return (HOST, self._port) if incarnation == self.incarnation else None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            await self._handler(reader, writer)
        except (OSError, asyncio.CancelledError):  # the client is gone, or the worker is stopped
            pass
        finally:
            self._tasks.discard(task)
            if not writer.is_closing():
                writer.transport.abort()


class Forwarding:
    """The head, which is host `one`, and others, with an instance on some of them."""

    def __init__(self, folder: Path, nodes: FleetNodes, hosts: dict[str, RemoteHost]) -> None:
        self.hosts = hosts
        self.directory = Directory()
        self.local: LocalLauncher = local_launcher(folder)
        self.known = HostServices()
        """Those that the head knows of."""
        self.known.set({name: HostAddress(name, each.address) for name, each in hosts.items()})
        (self.port,) = free_ports(1)
        self.nodes = nodes
        self.writers: list[asyncio.StreamWriter] = []
        spec = WorkerSpec(name=NAME, model_id="m", port=self.port)
        self.head = PortForwarding(
            self.directory,
            "one",
            nodes.identity(""),
            self.local,
            HOST,
            lambda incarnation: spec,
            self.known,
        )

    def move(self, name: str, address: str) -> None:
        """The head finds this host at another address from now on."""
        self.known.set({**self.known.now, name: HostAddress(name, address)})

    def route(self, *names: str, state: State = State.RUNNING) -> None:
        """Publish replicas on these hosts; `one` is the head."""
        endpoints = [
            WorkerEndpoint("/none", self.hosts[name].incarnation if name in self.hosts else "one-1", name, f"{HOST}:1")
            for name in names
        ]
        self.directory.publish(RouteEntry(NAME, "m", state, endpoints=tuple(endpoints)))

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection of a client, closed at the end of the test."""
        reader, writer = await asyncio.open_connection(HOST, self.port)
        self.writers.append(writer)
        return reader, writer

    async def close(self) -> None:
        await self.head.close()
        for writer in self.writers:
            writer.transport.abort()
        for host in self.hosts.values():
            await host.close()

    async def listening(self) -> None:
        """Return once something listens on the port."""
        await eventually(self._is_listening)

    async def refusing(self) -> None:
        """Return once nothing does."""
        await eventually(lambda: not self._is_listening())

    def _is_listening(self) -> bool:
        rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return any(row[3] == "0A" and int(row[1][-4:], 16) == self.port for row in rows)


@asynccontextmanager
async def forwarding(folder: Path, *names: str, handler: Handler = echo) -> AsyncIterator[Forwarding]:
    """The hosts `names`, started, and the head, which forwards from then on."""
    nodes = FleetNodes(folder / "ca")
    hosts = {name: RemoteHost(name, nodes, folder, handler) for name in names}
    for host in hosts.values():
        await host.start()
    made = Forwarding(folder, nodes, hosts)
    made.head.start()
    try:
        yield made
    finally:
        await made.close()
