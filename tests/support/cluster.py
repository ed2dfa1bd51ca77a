"""Hosts of a cluster for tests: fleets with certificates, forwarded ports, nodes that run Ray, daemons as nodes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Self

import pytest
from tests.support.daemon_process import HEAD_ADDRESS, DaemonProcess, cluster_table, free_ports, kill_ray
from tests.support.fleet import LIMIT_S, ROOT, local_launcher
from tests.support.fork_server import SERVICE, nursery_service
from tests.support.polling import eventually
from tests.support.worker_process import WorkerProcess

from teimgr.client import Client
from teimgr.cluster.authority import CERTIFICATE_LIFE, FleetAuthority, utc_now
from teimgr.cluster.head import ClusterHead
from teimgr.cluster.host_link import HostAddress, HostServices
from teimgr.cluster.host_models import HostModels
from teimgr.cluster.host_service import HostListener, HostService
from teimgr.cluster.port_forwarding import PortForwarding
from teimgr.cluster.ray_launcher import RayLauncher
from teimgr.config.sections import ClusterSettings
from teimgr.config.settings import Settings
from teimgr.control.launch.control_link import identify
from teimgr.control.launch.launcher import LocalLauncher
from teimgr.control.placement.hosts import GpuInventory, Inventory, LeavingHosts
from teimgr.observability.log_source import LocalLogs
from teimgr.spec import RouteEntry, State, WorkerEndpoint, WorkerSpec
from teimgr.wire.fleet_tls import FleetIdentity, FleetName, write_identity
from teimgr.wire.routing.directory import Directory

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
        self.head = self.forwarder(self.local)

    def forwarder(self, local: LocalLauncher) -> PortForwarding:
        """The head's part of a daemon."""
        spec = WorkerSpec(name=NAME, model_id="m", port=self.port)
        identity = self.nodes.identity("")
        return PortForwarding(self.directory, "one", identity, local, HOST, lambda incarnation: spec, self.known)

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


NODE_ADDRESS = "127.0.0.3"
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


class OneHost:
    """The folder and the settings of a cluster of one host; `launcher` makes a daemon's part of it.

    `settings` are more of `[cluster]`.
    """

    def __init__(self, **settings: Any) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="t"))
        self._heads: list[ClusterHead] = []
        cluster = ClusterSettings(**cluster_table(HEAD_ADDRESS, "one", **settings))
        self.settings = Settings(state_file=self.folder / "state.toml", cluster=cluster)

    def launcher(self, placement_limit_s: float = 30.0) -> tuple[ClusterHead, RayLauncher]:
        local = local_launcher(self.folder)
        cards = GpuInventory({}, lambda: Inventory(reason="none in this test"))
        head = ClusterHead(self.settings, local, cards, LeavingHosts())
        self._heads.append(head)
        return head, RayLauncher(head, local, placement_limit_s)

    def close(self) -> None:
        kill_ray(self.settings.run_dir)
        for head in self._heads:  # the first one's child: a daemon would have ended before it
            handle = head._ray._handle if head._ray else None
            if handle is not None and handle._child is not None:
                handle._child.wait(LIMIT_S)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def one_host() -> Iterator[OneHost]:
    """One Ray for the tests of a module; its actors fork the scripted worker."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'src'}")
        host = OneHost()
        yield host
        host.close()


def create_near_and_far(client: Client, model: str, deadline_s: float) -> None:
    """Create an instance `near` on host one and `far` on host two, and wait until both run."""
    for name, host in (("near", "one"), ("far", "two")):
        client.create(name, model, node=host, dtype="float32")
        client.wait_until_running(name, deadline_s=deadline_s)


STOP_LIMIT_S = 60.0


class NodeProcess:
    """A host named `name` of the daemon's cluster, whose folder lies in the daemon's."""

    def __init__(self, daemon: DaemonProcess, name: str, address: str) -> None:
        self.state_dir = daemon.folder / name
        self.name = name
        cluster = daemon.settings["cluster"]
        self.arguments = ["--grace", "20", "--name", name, "--host-address", address]
        self.arguments += ["--enrolment-port", str(cluster["enrolment_port"])]
        self._head = cluster["address"]
        self._daemon = daemon
        self.program = "tests.support.fork_server"
        """Or `teimgr`, whose fork server is its own and is in its namespaces."""
        self.process: subprocess.Popen[bytes] | None = None
        self.within: Sequence[str] = ()
        """A command that runs the node's, such as one that enters a namespace."""
        self.environ: dict[str, str] = {}
        """More of its environment."""
        self.api_key: str | None = None
        """Of the daemon, where it requires one."""

    def join_instead(self, daemon: DaemonProcess) -> None:
        """Have the next `start` join the cluster of another daemon, with the certificate that it has."""
        cluster = daemon.settings["cluster"]
        self._daemon, self._head = daemon, cluster["address"]
        self.arguments[-1] = str(cluster["enrolment_port"])

    def start(self, *more: str) -> Self:
        """Launch it; the first time it joins with a token of the daemon, which must run."""
        self.state_dir.mkdir(exist_ok=True)
        if not (self.state_dir / "identity").exists():
            with self._daemon.client(api_key=self.api_key) as client:
                token = client.create_join_token()["token"]
            (self.state_dir / "join-token").write_text(token)
            more = ("--token-file", str(self.state_dir / "join-token"), *more)
        command = [sys.executable, "-m", self.program, "node", "join", self._head]
        command += ["--state-dir", str(self.state_dir)]
        with (self.state_dir / "node.log").open("ab") as output:
            self.process = subprocess.Popen(
                [*self.within, *command, *self.arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | {"HF_HUB_OFFLINE": "1", SERVICE: nursery_service()} | self.environ,
                start_new_session=True,
            )
        return self

    def kill(self) -> None:
        """SIGKILL the node's process alone; Ray and the workers go on."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def log(self) -> str:
        return (self.state_dir / "node.log").read_text()

    def close(self) -> None:
        """Stop it, and kill what is left of it."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self.kill()
        kill_ray(self.state_dir / "run")
