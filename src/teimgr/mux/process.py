"""The mux process, `python -m teimgr.mux.process <config.json> [beside]`: gRPC for clients, framed links to workers.

Its directory comes from the daemon over the control socket. It outlives the daemon and serves the last snapshot until
the next daemon connects or the orphan grace has passed. Exit status: 0 after a stop, 2 for a bad config, 4 if it
cannot listen on the gRPC port or a socket.

A Unix socket for clients is bound under a temporary name and moved to the configured path once it is served, so that a
successor takes over the path while its predecessor drains.
"""

from __future__ import annotations

import asyncio
import glob
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import uvloop

from teimgr.config.mux import DRAIN_S, MuxConfig
from teimgr.config.sections import allows
from teimgr.errors import InvalidConfig, TeimgrError, Unavailable
from teimgr.http.acceptor import Acceptor
from teimgr.http.auth.policy import Policy, PolicyInForce
from teimgr.http.auth.tls_files import Pems, TlsFiles, TlsWatch
from teimgr.http.connection_gate import BACKLOG, ConnectionGate, Ticket
from teimgr.http.http1 import ListenerState
from teimgr.http.http2.connection import Connection, MaxAge
from teimgr.http.server import bind
from teimgr.http.unix_listener import UnixListener, bind_unix, remove_stale
from teimgr.mux.control import DaemonLoads, Message, MuxControl
from teimgr.mux.forwarding import CallCounters
from teimgr.mux.handlers import MuxHandlers
from teimgr.mux.health import MuxHealth
from teimgr.mux.leases import LeasedMeters
from teimgr.observability import logs
from teimgr.observability.loop_watchdog import LoopWatchdog
from teimgr.observability.memory import MemoryReturn, collect_garbage_rarely, resident_bytes
from teimgr.observability.telemetry import open_telemetry
from teimgr.spec import RouteEntry, RoutingSnapshot, known
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.grpc_core.rpc import SERVICES
from teimgr.wire.routing.links import LinkLimits
from teimgr.wire.routing.on_demand import ReturningWorkers
from teimgr.wire.routing.router import Router
from teimgr.wire.tenants.table import FILE as TENANTS_FILE
from teimgr.worker.tenant_meter import EntryMeters

_log = logging.getLogger("teimgr.mux")
BESIDE = "beside"
"""Second argument of a mux that shares the port with the mux that it will replace."""
_EXIT_BAD_CONFIG = 2
_EXIT_CANNOT_LISTEN = 4


# After the last call, clients have this long to close their connections before the server closes them.
_CLOSE_S = 1.0


class GrpcServer:
    """Serves connections of bound sockets from `start` to `stop`; `protocol` makes the protocol of each.

    With a `context` every connection is TLS. `gate` counts the connections.
    """

    def __init__(
        self,
        protocol: Callable[[ListenerState, Ticket], Connection],
        context: ssl.SSLContext | None = None,
        gate: ConnectionGate | None = None,
    ) -> None:
        self._state = ListenerState()
        self._protocol = lambda ticket: protocol(self._state, ticket)
        self.context = context
        self._gate = gate or ConnectionGate()
        self._sockets: list[socket.socket] = []
        self._acceptors: list[Acceptor] = []

    def add(self, sock: socket.socket) -> None:
        """Listen on a bound socket; until `start` its clients wait in the backlog."""
        sock.setblocking(False)
        sock.listen(BACKLOG)
        self._sockets.append(sock)

    async def start(self) -> None:
        """Accept connections."""
        for sock in self._sockets:
            acceptor = Acceptor(sock, self._gate, self._protocol, lambda: self.context)
            self._acceptors.append(acceptor)
            acceptor.start()

    def secure(self, context: ssl.SSLContext) -> None:
        """Use `context` for new connections; open ones keep theirs."""
        self.context = context

    async def stop(self, grace_s: float | None) -> None:
        """Stop accepting, answer the calls in flight within `grace_s` (None: answer none), and close.

        Clients make later calls on other connections. A call that was sent already is refused unprocessed, so the
        client retries it.
        """
        self._close_listeners()
        self._state.leave()
        if grace_s is not None:
            await self._drain(grace_s)
        self._state.end()
        for task in tuple(self._state.tasks):
            task.cancel()
        for connection in self._connections():
            connection.shutdown()
        if grace_s is not None:
            await self._closed()
        for acceptor in self._acceptors:
            await acceptor.wait_closed()
        for connection in self._connections():
            connection.transport.abort()

    async def _drain(self, grace_s: float) -> None:
        """Wait until all calls are answered and the clients have closed, or until the grace is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + grace_s
        for connection in self._connections():
            connection.leave()
        # Repeated: a connection that finishes its handshake now may have sent calls before it got GOAWAY.
        while (tasks := set(self._state.tasks)) and (left_s := deadline - loop.time()) > 0:
            await asyncio.wait(tasks, timeout=left_s)
        await self._closed()

    async def _closed(self) -> None:
        if closed := [connection.closed for connection in self._connections()]:
            await asyncio.wait(closed, timeout=_CLOSE_S)

    def _close_listeners(self) -> None:
        for acceptor in self._acceptors:
            acceptor.close()
        for sock in self._sockets:
            sock.close()
        self._sockets = []

    def _connections(self) -> tuple[Connection, ...]:
        return cast(tuple[Connection, ...], tuple(self._state.connections))


def tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the TLS context of a gRPC listener, with HTTP/2 alone in ALPN; raises InvalidConfig as
    `TlsFiles.context`."""
    context = files.context()
    context.set_alpn_protocols(["h2"])
    return context


def tls_context_of(pems: Pems) -> ssl.SSLContext:
    """Like `tls_context`, for certificates that are in memory."""
    with _in_memory(pems.cert) as cert, _in_memory(pems.key) as key, _in_memory(pems.ca or b"") as ca:
        return tls_context(TlsFiles(cert, key, ca if pems.ca is not None else None))


@contextmanager
def _in_memory(content: bytes) -> Iterator[Path]:
    """Make a file in memory, for functions of OpenSSL that only take paths."""
    descriptor = os.memfd_create("pem", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, content)
        yield Path(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)


class Mux:
    """The server of one process; `run` is its lifetime. It may share the port with the mux that it will replace."""

    def __init__(self, config: MuxConfig, *, is_beside: bool = False) -> None:
        self._config = config
        self._is_beside = is_beside
        self._identity = FleetIdentity(Path(config.identity_dir), config.node) if config.identity_dir else None
        limits = LinkLimits(max_message_bytes=config.max_message_bytes)
        # A mux on another host cannot map the table of the tenants, so it leases quotas.
        self._leases = LeasedMeters() if config.control_fd >= 0 else None
        table = EntryMeters(Path(config.run_dir) / TENANTS_FILE) if self._identity else None
        meters = self._leases or table
        self._router = Router(limits, self._identity, partial(allows, config.on_demand_models), meters)
        self._counters = CallCounters(self._router.instances)
        self._policy = PolicyInForce(Policy())
        self._telemetry = open_telemetry(config.otel)
        self._health = MuxHealth(*SERVICES)
        self._watch = None if config.tls is None else TlsWatch(config.tls, self._take_files)
        self._may_listen = asyncio.Event()  # set by certificates that the daemon sends, or by a stop
        self._woken = asyncio.Event()  # set by the first snapshot, or by a stop
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._grace_s = DRAIN_S
        self._began_s = time.monotonic()
        self._watchdog: LoopWatchdog | None = None
        self._loads = DaemonLoads(config.processes)
        self._server = self._build_server()
        self._port = 0
        self._unix: UnixListener | None = None
        self._control = MuxControl(
            Path(config.control_socket),
            config.orphan_grace_s,
            self._process,
            self._on_orphaned,
            self._lost,
        )

    async def run(self) -> None:
        """Bind the port, serve from the first snapshot until a stop, then drain.

        Raises:
            Unavailable: cannot listen on the port, the socket for clients or the control socket.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        if self._config.tls_from_daemon:
            await self._open_control()
            await self._may_listen.wait()
        if not self._stopping.is_set():
            self._listen()
        if not self._config.tls_from_daemon:
            await self._open_control()
        self._watchdog = LoopWatchdog(f"mux {os.getpid()}")
        watching = asyncio.create_task(self._watch.run()) if self._watch else None
        _log.info("mux waits for its first snapshot", extra={"host": self._config.host, "port": self._port})
        await self._woken.wait()
        if not self._stopping.is_set():
            # Clients wait in the listen backlog until now, since without a directory every call would get NOT_FOUND.
            await self._server.start()
            if self._unix is not None:
                self._publish(self._unix)
            _log.info("mux serves", extra={"host": self._config.host, "port": self._port})
        await self._stopping.wait()
        if watching is not None:
            watching.cancel()
        if self._leases is not None:
            self._leases.report()
        # A successor may take the port and the control socket from now on.
        self._control.leave({"stopping": self._grace_s})
        self._loads.leave()
        self._health.stop()
        if self._unix is not None:
            self._unix.file.remove()
        # A second signal ends the grace of the calls in flight.
        draining = asyncio.create_task(self._server.stop(self._grace_s))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not draining.done():
            await self._server.stop(None)
        await draining
        if self._leases is not None:
            self._leases.report()
        await self._control.close()
        await self._router.close()
        await asyncio.to_thread(self._telemetry.close)
        _log.info("mux stopped")

    async def _open_control(self) -> None:
        """Raises Unavailable."""
        config = self._config
        try:
            await self._control.open()
        except OSError as error:
            raise Unavailable(f"cannot listen on {config.control_socket}: {error}") from error
        if config.control_fd >= 0 and self._identity is not None:
            listener = socket.socket(fileno=config.control_fd)
            self._control.open_to_other_hosts(listener, self._identity, config.incarnation)

    def _build_server(self) -> GrpcServer:
        age_s = self._config.max_connection_age_s
        handlers = MuxHandlers(
            self._router,
            self._counters,
            request_timeout_s=self._config.request_timeout_s,
            window=self._config.max_parallel_streams,
            processes=self._config.processes,
            policy=self._policy,
            health=self._health,
            telemetry=self._telemetry,
            loads=ReturningWorkers(self._router, self._loads, self._config.worker_wait_s, self._config.processes),
            max_age=MaxAge(age_s, self._config.connection_grace_s) if age_s else None,
            charges=lambda: self._leases is None or self._leases.is_on,
        )
        context = None if self._config.tls is None else tls_context(self._config.tls)
        return GrpcServer(handlers.protocol, context)

    def _listen(self) -> None:
        """Listen on the port and, if configured, on the Unix socket; raises Unavailable."""
        config = self._config
        try:
            sock = bind(config.host, config.port, is_shared=config.processes > 1 or self._is_beside)
            # Lets a successor listen before this process leaves, but no process of another user.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._server.add(sock)
            self._port = sock.getsockname()[1]
        except (TeimgrError, OSError) as error:
            raise Unavailable(f"cannot listen on {config.host}:{config.port}: {error}") from error
        if config.socket:
            path = Path(config.socket)
            for left in path.parent.glob(f"{glob.escape(path.name)}.*"):
                if left.suffix[1:].isdecimal():
                    remove_stale(left)  # left by a mux that was killed before it served
            try:
                self._unix = bind_unix(path.with_name(f"{path.name}.{os.getpid()}"), config.socket_mode, "grpc_socket")
            except TeimgrError as error:
                raise Unavailable(str(error)) from error
            self._server.add(self._unix.sock)

    def _publish(self, unix: UnixListener) -> None:
        """Move the socket's file to the configured path, so that new connections come to this process.

        Raises:
            Unavailable: it cannot be moved.
        """
        try:
            unix.publish(Path(self._config.socket))
        except OSError as error:
            unix.file.remove()
            raise Unavailable(f"cannot listen on {self._config.socket}: {error}") from error

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stop(DRAIN_S)

    def _stop(self, grace_s: float) -> None:
        if self._stopping.is_set():  # the shorter grace applies
            asyncio.get_running_loop().call_later(grace_s, self._forced.set)
            return
        self._grace_s = grace_s
        self._stopping.set()
        self._woken.set()
        self._may_listen.set()

    def _on_orphaned(self) -> None:
        _log.warning("no daemon for %g s: stopping", self._config.orphan_grace_s)
        self._stop(DRAIN_S)

    def _process(self, message: Message, daemon: asyncio.StreamWriter) -> Message | None:
        if "policy" in message:  # applied before the snapshot, with which the server starts
            self._policy.swap(Policy.from_json(json.dumps(message["policy"])))
        if "tls" in message:
            self._take_certificates(message["tls"])
        if "snapshot" in message:
            snapshot = RoutingSnapshot.from_values(message["snapshot"])
            names = {entry.name for entry in snapshot.entries}
            self._change((name, None) for name in [*self._router.instances] if name not in names)
            self._router.update(snapshot)  # also the order
            self._change((entry.name, entry) for entry in snapshot.entries)
            self._woken.set()
        if "changes" in message:
            self._change((name, RouteEntry.from_dict(entry) if entry else None) for name, entry in message["changes"])
        if self._leases is not None:
            self._leases.take(message, daemon)
        self._loads.take(message, daemon)
        if "stop" in message:
            self._stop(float(message["stop"]))
        if message.get("stats"):
            return self._stats()
        return {"ack": True} if message.get("ack") else None

    def _lost(self, daemon: asyncio.StreamWriter) -> None:
        self._loads.lost(daemon)
        if self._leases is not None:
            self._leases.lost(daemon)

    def _take_certificates(self, texts: dict[str, str | None]) -> None:
        """Use certificates that the daemon has sent and validated."""
        pems = Pems(**{name: text and text.encode() for name, text in known(Pems, texts).items()})
        self._server.secure(tls_context_of(pems))
        self._may_listen.set()

    async def _take_files(self, files: TlsFiles) -> None:
        """Load the certificates. Raises InvalidConfig if they cannot be used."""
        self._server.secure(tls_context(files))

    def _change(self, changes: Iterable[tuple[str, RouteEntry | None]]) -> None:
        for name, entry in changes:
            self._router.apply(name, entry)
            self._health.apply(name, entry)
            if entry is None:
                self._counters.drop(name)
        self._health.notify()

    def _stats(self) -> Message:
        watchdog = self._watchdog
        return {
            "pid": os.getpid(),
            "alarm": (self._watch and self._watch.alarm) or next(iter(watchdog.alarms() if watchdog else ()), None),
            "loop_held": watchdog.held if watchdog else 0,
            "config_hash": self._config.hash,
            "port": self._port,
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            "instances": len(self._router.snapshot.entries),
            "resident_bytes": resident_bytes(),
            "links": self._router.link_stats(),
            **self._counters.to_dict(),
        }


async def serve(config: MuxConfig, *, is_beside: bool = False) -> None:
    mux = Mux(config, is_beside=is_beside)
    collect_garbage_rarely()
    MemoryReturn()
    await mux.run()


def main(arguments: list[str]) -> int:
    try:
        config = MuxConfig.read(Path(arguments[1]))
    except (IndexError, OSError, InvalidConfig) as error:
        print(f"usage: python -m teimgr.mux.process <config.json>: {error}", file=sys.stderr)
        return _EXIT_BAD_CONFIG
    logs.setup(config.log_level, config.log_format, sys.stderr)
    logs.write_stacks(sys.stderr)
    try:
        uvloop.run(serve(config, is_beside=BESIDE in arguments[2:]))
    except TeimgrError as error:
        _log.error("mux cannot serve: %s", error.message)
        return _EXIT_CANNOT_LISTEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
