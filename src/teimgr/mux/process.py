"""The mux process, `python -m teimgr.mux.process <config.json>`: gRPC for clients, framed links to workers.

Its directory comes from the daemon by the control socket. It outlives the daemon and serves the last snapshot until
the next daemon connects or the orphan grace is over. Exit status: 0 after a stop, 2 for a bad config, 4 when it cannot
listen on the gRPC port or a socket.

A Unix socket for clients is bound under a name of this process and moved to the configured path once it is served: gRPC
removes the file at the name that it binds, before it binds and when it stops, and a successor takes the path while its
predecessor drains.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import glob
import json
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc.aio
import uvloop

from teimgr.auth.policy import Policy, PolicyInForce
from teimgr.auth.tls_files import Pems, TlsFiles, TlsWatch
from teimgr.config.mux import MuxConfig
from teimgr.errors import InvalidConfig, TeimgrError, Unavailable
from teimgr.fleet_tls import FleetIdentity
from teimgr.grpc_core.rpc_table import SERVICES
from teimgr.mux.certificates import GrpcCertificates
from teimgr.mux.control import Message, MuxControl
from teimgr.mux.forwarding import CallCounters
from teimgr.mux.handlers import MuxHandlers, MuxHealth, reflection_handlers
from teimgr.observability import logs
from teimgr.observability.memory import max_connections, resident_bytes
from teimgr.observability.telemetry import open_telemetry
from teimgr.routing.links import LinkLimits
from teimgr.routing.router import Router
from teimgr.spec import RouteEntry, RoutingSnapshot
from teimgr.unix_listener import SocketFile, publish, remove_stale

# TLS and the preface of HTTP/2; a connection that is silent so long is closed.
_HANDSHAKE_LIMIT_MS = 20_000

_log = logging.getLogger("teimgr.mux")
_DRAIN_S = 10.0
_EXIT_BAD_CONFIG = 2
_EXIT_CANNOT_LISTEN = 4


class Mux:
    """The server of one process; `run` is its lifetime."""

    def __init__(self, config: MuxConfig) -> None:
        self._config = config
        self._identity = FleetIdentity(Path(config.identity_dir), config.node) if config.identity_dir else None
        self._router = Router(LinkLimits(max_message_bytes=config.max_message_bytes), self._identity)
        self._counters = CallCounters(self._router.instances)
        self._policy = PolicyInForce(Policy())
        self._telemetry = open_telemetry(config.otel)
        self._health = MuxHealth(self._policy, *SERVICES)
        self._certificates = None if config.tls is None else GrpcCertificates(config.tls.pems())
        self._watch = None if config.tls is None else TlsWatch(config.tls, self._take_files)
        self._may_listen = asyncio.Event()  # set by certificates that the daemon sends, or by a stop
        self._woken = asyncio.Event()  # set by the first snapshot, or by a stop
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._grace_s = _DRAIN_S
        self._began_s = time.monotonic()
        self._server = self._build_server()
        self._port = 0
        self._socket_file: SocketFile | None = None
        self._control = MuxControl(
            Path(config.control_socket),
            config.orphan_grace_s,
            self._process,
            self._on_orphaned,
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
            self._port = self._listen()
            self._socket_file = self._listen_on_socket()
        if not self._config.tls_from_daemon:
            await self._open_control()
        watching = asyncio.create_task(self._watch.run()) if self._watch else None
        _log.info("mux waits for its first snapshot", extra={"host": self._config.host, "port": self._port})
        await self._woken.wait()
        if not self._stopping.is_set():
            # Until now clients wait in the listen backlog: without a directory every call would fail as not found.
            await self._server.start()
            if self._socket_file is not None:
                await self._publish(self._socket_file)
            _log.info("mux serves", extra={"host": self._config.host, "port": self._port})
        await self._stopping.wait()
        if watching is not None:
            watching.cancel()
        # Announced to the daemon and to load balancers; a successor can have port and control socket from now on.
        self._control.leave({"stopping": self._grace_s})
        self._health.stop()
        if self._socket_file is not None:
            self._socket_file.remove()
        # No new calls; those in flight get the grace, until a second signal.
        draining = asyncio.create_task(self._server.stop(self._grace_s))
        forced = asyncio.create_task(self._forced.wait())
        await asyncio.wait((draining, forced), return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if not draining.done():
            await self._server.stop(None)
        await draining
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
            await self._server.stop(None)
            raise Unavailable(f"cannot listen on {config.control_socket}: {error}") from error
        if config.control_fd >= 0 and self._identity is not None:
            listener = socket.socket(fileno=config.control_fd)
            self._control.open_to_other_hosts(listener, self._identity, config.incarnation)

    def _build_server(self) -> Any:
        server = grpc.aio.server(options=server_options(self._config))
        handlers = MuxHandlers(
            self._router,
            self._counters,
            request_timeout_s=self._config.request_timeout_s,
            window=self._config.max_parallel_streams,
            policy=self._policy,
            telemetry=self._telemetry,
        )
        server.add_generic_rpc_handlers(
            (*handlers.generic_handlers(), self._health.generic_handler(), *reflection_handlers())
        )
        return server

    def _listen(self) -> int:
        host = f"[{self._config.host}]" if ":" in self._config.host else self._config.host
        return self._add_port(f"{host}:{self._config.port}")

    def _listen_on_socket(self) -> SocketFile | None:
        """Bind the Unix socket for clients under a name of this process; None where none is configured."""
        if not self._config.socket:
            return None
        path = Path(self._config.socket)
        for left in path.parent.glob(f"{glob.escape(path.name)}.*"):
            if left.suffix[1:].isdecimal():
                remove_stale(left)  # of a mux that was killed before it served
        bound = path.with_name(f"{path.name}.{os.getpid()}")
        umask = os.umask(0o777 & ~self._config.socket_mode)  # gRPC binds and listens in one step
        try:
            self._add_port(f"unix:{quote(os.fsencode(bound))}")
        finally:
            os.umask(umask)
        return SocketFile(bound)

    async def _publish(self, bound: SocketFile) -> None:
        """Move the file of the socket to the configured path, so that new connections come to this process.

        Raises:
            Unavailable: it cannot be moved.
        """
        try:
            self._socket_file = publish(bound.path, Path(self._config.socket))
        except OSError as error:
            bound.remove()
            await self._server.stop(None)
            raise Unavailable(f"cannot listen on {self._config.socket}: {error}") from error

    def _add_port(self, address: str) -> int:
        try:
            if self._certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, self._certificates.credentials())
        except RuntimeError as error:
            raise Unavailable(f"cannot listen on {address}: {error}") from error
        if not port:
            raise Unavailable(f"cannot listen on {address}")
        return int(port)

    def _on_signal(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stop(_DRAIN_S)

    def _stop(self, grace_s: float) -> None:
        if not self._stopping.is_set():
            self._grace_s = grace_s
            self._stopping.set()
            self._woken.set()
            self._may_listen.set()

    def _on_orphaned(self) -> None:
        _log.warning("no daemon for %g s: stopping", self._config.orphan_grace_s)
        self._stop(_DRAIN_S)

    def _process(self, message: Message) -> Message | None:
        if "policy" in message:  # before a snapshot, which lets the server start
            self._policy.swap(Policy.from_json(json.dumps(message["policy"])))
        if "tls" in message:
            self._take_certificates(message["tls"])
        if "snapshot" in message:
            snapshot = RoutingSnapshot.from_json(json.dumps(message["snapshot"]))
            names = {entry.name for entry in snapshot.entries}
            self._change((name, None) for name in [*self._router.instances] if name not in names)
            self._router.update(snapshot)  # also the order
            self._change((entry.name, entry) for entry in snapshot.entries)
            self._woken.set()
        if "changes" in message:
            self._change((name, RouteEntry.from_dict(entry) if entry else None) for name, entry in message["changes"])
        if "stop" in message:
            self._stop(float(message["stop"]))
        if message.get("stats"):
            return self._stats()
        return {"ack": True} if message.get("ack") else None

    def _take_certificates(self, texts: dict[str, str | None]) -> None:
        """Certificates from the daemon, which has validated them."""
        pems = Pems(**{name: text and text.encode() for name, text in texts.items()})  # type: ignore[arg-type]
        if self._certificates is None:
            self._certificates = GrpcCertificates(pems)
        else:
            self._certificates.take(pems)
        self._may_listen.set()

    async def _take_files(self, files: TlsFiles) -> None:
        """Raises InvalidConfig: they cannot be used."""
        assert self._certificates is not None
        self._certificates.take(files.pems())

    def _change(self, changes: Iterable[tuple[str, RouteEntry | None]]) -> None:
        for name, entry in changes:
            self._router.apply(name, entry)
            self._health.apply(name, entry)
            if entry is None:
                self._counters.drop(name)
        self._health.notify()

    def _stats(self) -> Message:
        return {
            "pid": os.getpid(),
            "alarm": self._watch.alarm if self._watch else None,
            "config_hash": self._config.hash,
            "port": self._port,
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            "instances": len(self._router.snapshot.entries),
            "resident_bytes": resident_bytes(),
            "links": self._router.link_stats(),
            **self._counters.to_dict(),
        }


def server_options(config: MuxConfig) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # As on the instance ports: each call takes some kilobytes before its first message.
        ("grpc.max_concurrent_streams", 1024),
        # Replies are checked by the links, with a better error text.
        ("grpc.max_send_message_length", -1),
        # On by default, which would let a second mux share the port by mistake.
        ("grpc.so_reuseport", int(config.reuse_port)),
        # Clients of tei-manager may ping as often as they like, calls or not.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # Of each listener.
        ("grpc.max_allowed_incoming_connections", max_connections() // (2 if config.socket else 1)),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_LIMIT_MS),
        # Identity only, as on tei-manager's port and the instance ports.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    )


async def serve(config: MuxConfig) -> None:
    mux = Mux(config)
    gc.freeze()  # everything allocated so far lives as long as the process: exclude it from garbage collection
    await mux.run()


def main(arguments: list[str]) -> int:
    try:
        config = MuxConfig.read(Path(arguments[1]))
    except (IndexError, OSError, InvalidConfig) as error:
        print(f"usage: python -m teimgr.mux.process <config.json>: {error}", file=sys.stderr)
        return _EXIT_BAD_CONFIG
    logs.setup(config.log_level, config.log_format, sys.stderr)
    faulthandler.enable()
    logs.write_stacks_on_signal()
    try:
        uvloop.run(serve(config))
    except TeimgrError as error:
        _log.error("mux cannot serve: %s", error.message)
        return _EXIT_CANNOT_LISTEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
