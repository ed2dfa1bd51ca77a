"""The mux process: `python -m teimgr.mux.process <config.json>`.

gRPC for clients on one port, snapshots from the daemon on a unix socket, framed links to the workers. It outlives the
daemon and serves the last snapshot until the next daemon comes, or the orphan grace is over. Exit status: 0 after a
stop, 2 for a bad config, 4 when the gRPC port or the control socket cannot be had.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import uvloop

from teimgr.auth.policy import Policy, PolicyInForce
from teimgr.config.mux import MuxConfig
from teimgr.directory import RoutingSnapshot
from teimgr.errors import InvalidConfig, TeimgrError, Unavailable
from teimgr.grpc_core.rpc_table import SERVICES
from teimgr.mux.control import MuxControl
from teimgr.mux.counters import CallCounters
from teimgr.mux.handlers import MuxHandlers
from teimgr.mux.services import FleetHealth, reflection_handlers
from teimgr.mux.tls import GrpcCertificates
from teimgr.observability import logs
from teimgr.observability.metrics import resident_bytes
from teimgr.observability.telemetry import Telemetry
from teimgr.routing.links import LinkLimits
from teimgr.routing.router import Router

_log = logging.getLogger("teimgr.mux")
_DRAIN_S = 10.0
_EXIT_BAD_CONFIG = 2
_EXIT_CANNOT_LISTEN = 4


class Mux:
    """One process's worth of serving. `run` is its whole life."""

    def __init__(self, config: MuxConfig) -> None:
        self._config = config
        self._router = Router(LinkLimits(max_message_bytes=config.max_message_bytes))
        self._counters = CallCounters()
        self._policy = PolicyInForce(Policy())
        self._telemetry = Telemetry.open(config.otel)
        self._health = FleetHealth(self._policy, *SERVICES)
        self._certificates = None if config.tls is None else GrpcCertificates(config.tls.files())
        self._woken = asyncio.Event()  # there is a directory, or no need of one any more
        self._stopping = asyncio.Event()
        self._forced = asyncio.Event()
        self._grace_s = _DRAIN_S
        self._began_s = time.monotonic()
        self._server = self._build_server()
        self._port = 0
        self._control = MuxControl(
            Path(config.control_socket),
            config.orphan_grace_s,
            on_policy=self._policy.swap,
            on_snapshot=self._take,
            on_stop=self._stop,
            on_orphaned=self._orphaned,
            stats=self._stats,
        )

    async def run(self) -> None:
        """Bind the port, serve from the first snapshot on until told to stop, then drain.

        Raises:
            Unavailable: the port or the control socket cannot be had.
        """
        self._port = self._listen()
        self._capture_signals()
        await self._open_control()
        watching = asyncio.create_task(self._certificates.watch.run()) if self._certificates else None
        _log.info("mux waits for its first snapshot", extra={"host": self._config.host, "port": self._port})
        await self._woken.wait()
        if not self._stopping.is_set():
            # Connections made since the port was bound lie in its backlog, and their calls are answered now: without
            # a directory every instance would be unknown, and clients believe that.
            await self._server.start()
            _log.info("mux serves", extra={"host": self._config.host, "port": self._port})
        await self._stopping.wait()
        if watching is not None:
            watching.cancel()
        await self._shut_down()

    async def _shut_down(self) -> None:
        # A successor may have the control socket at once; clients asking for health are sent elsewhere.
        await self._control.close()
        self._health.stop()
        # No new calls; those in flight get the grace, unless somebody insists.
        draining = asyncio.create_task(self._server.stop(self._grace_s))
        insisted = asyncio.create_task(self._forced.wait())
        await asyncio.wait((draining, insisted), return_when=asyncio.FIRST_COMPLETED)
        insisted.cancel()
        if not draining.done():
            await self._server.stop(None)
        await draining
        await self._router.close()
        await asyncio.to_thread(self._telemetry.close)
        _log.info("mux stopped")

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
        address = f"{host}:{self._config.port}"
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

    async def _open_control(self) -> None:
        try:
            await self._control.open()
        except OSError as error:
            await self._server.stop(None)
            raise Unavailable(f"cannot listen on {self._config.control_socket}: {error}") from error

    def _capture_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)

    def _signalled(self) -> None:
        if self._stopping.is_set():
            self._forced.set()
        self._stop(_DRAIN_S)

    def _stop(self, grace_s: float) -> None:
        if not self._stopping.is_set():
            self._grace_s = grace_s
            self._stopping.set()
            self._woken.set()

    def _orphaned(self) -> None:
        _log.warning("no daemon for %g s: stopping", self._config.orphan_grace_s)
        self._stop(_DRAIN_S)

    def _take(self, snapshot: RoutingSnapshot) -> None:
        self._router.update(snapshot)
        self._health.update(snapshot)
        self._woken.set()

    def _stats(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "alarm": self._certificates.watch.alarm if self._certificates else None,
            "config_hash": self._config.hash,
            "port": self._port,
            "uptime_s": round(time.monotonic() - self._began_s, 3),
            "instances": len(self._router.snapshot.entries),
            "resident_bytes": resident_bytes(),
            "links": self._router.link_stats(),
            **self._counters.to_dict(),
        }


def server_options(config: MuxConfig) -> tuple[tuple[str, int], ...]:
    """Channel arguments of the gRPC server."""
    return (
        ("grpc.max_receive_message_length", config.max_message_bytes),
        # Answers are measured before they are sent, with a better sentence.
        ("grpc.max_send_message_length", -1),
        # On by default, it would let a second mux share the port by mistake.
        ("grpc.so_reuseport", int(config.reuse_port)),
        # Clients of tei-manager may ping as often as they like, calls or not.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
        # Messages come as they are: identity alone, as on tei-manager's port and the instances'.
        ("grpc.compression_enabled_algorithms_bitset", 1),
    )


async def serve(config: MuxConfig) -> None:
    """One mux, from the first listener to the last."""
    mux = Mux(config)
    # What is here now stays: keep it out of every later collection.
    gc.freeze()
    await mux.run()


def main(arguments: list[str]) -> int:
    """Run a mux until it is told to stop; the exit status."""
    try:
        config = MuxConfig.read(Path(arguments[1]))
    except (IndexError, OSError, InvalidConfig) as error:
        print(f"usage: python -m teimgr.mux.process <config.json>: {error}", file=sys.stderr)
        return _EXIT_BAD_CONFIG
    logs.setup(config.log_level, config.log_format, sys.stderr)
    try:
        uvloop.run(serve(config))
    except TeimgrError as error:
        _log.error("mux cannot serve: %s", error.message)
        return _EXIT_CANNOT_LISTEN
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
