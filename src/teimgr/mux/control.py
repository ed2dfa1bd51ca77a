"""The control link of a mux: JSON lines from daemons on a Unix socket, and on mutual TLS if the mux is on another host.

    {"policy": {…}}            replace the access policy; no reply
    {"tls": {"cert", "key", "ca"}}   replace the certificates of the gRPC port, PEM; no reply
    {"snapshot": [entry, …]}   replace the directory; no reply
    {"changes": [[name, entry or null], …]}   change it, null for deleted instances; no reply
    {"ack": true}              replied by the same
    {"stats": true}            replied by one line of counters
    {"ready": call}            a model that was asked for is loaded, and its routes are confirmed; no reply
    {"refused": [call, code, text, retry_after_s or null]}   it is not; no reply
    {"terms": [[tenant, weight, priority, has_quota, is_shadow], …]}   to a mux of another host; no reply
    {"leased": [number, decisions, tokens]}     answers `lease`; no reply
    {"stop": grace_s}          drain within `grace_s` seconds and exit; no reply

Lines are processed in order, so a reply confirms those before it. A stopping mux sends `{"stopping": grace_s}`
unprompted, and answers until its calls are finished.

It also sends, unprompted, `{"load": [call, instance, timeout_s or null], "tenant": number}` for a call of a key that
waits for an on-demand model, and `{"left": call}` when that call has ended. A daemon gets these lines after it has
sent a snapshot.

A mux of another host (`mux/leases.py`) also sends to a daemon that has sent `terms`:

    {"lease": [number, tenant, needs, wanted]}   decide on calls of `needs` tokens, and lease about `wanted` for others.
        Each decision is null, true for a call that only `shadow` lets pass, or [code, text, retry_after_s or null]
    {"settled": [[number, place, computed], …]}  the call at that place of a request has ended, or the lease, whose
        place follows that of the last call; `computed` are its tokens that were computed
    {"used": [[tenant, instance, model, counts], …]}   to be added to the use of keys, by `Counter`

A connection from another host must present the daemon's certificate and first prove which incarnation it expects,
since another process may have the port by now:

    {"hello": incarnation}     replied by the same, or by {"error": reason} and the end of the connection
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teimgr.errors import DeadlineExceeded, TeimgrError, Unavailable, error_from_code
from teimgr.http.acceptor import GatedStream
from teimgr.http.connection_gate import Phase, Ticket
from teimgr.observability.request_context import current_tenant
from teimgr.wire.fleet_tls import FleetIdentity, FleetListener, peer_of
from teimgr.wire.json_messages import MAX_MUX_LINE_BYTES, read_line, write_line
from teimgr.wire.remote_frames import set_tcp_limits
from teimgr.wire.routing.on_demand import WaitingCalls, answer_call

log = logging.getLogger("teimgr.mux")

_MAX_REMOTE = 16
_HELLO_LIMIT_S = 5.0
_SILENCE_LIMIT_S = 30.0
"""The daemon asks every few seconds; the connection of a host that has failed stays open without a message."""

NEXT_DAEMON_S = 30.0
"""Once the last daemon has disconnected, calls that wait for a model wait this long for the next one."""

Message = dict[str, Any]


class MuxControl:
    """Server of the control link, for any number of daemons.

    `process` gets each message and the daemon that sent it, and returns the reply. `on_orphaned` is called after
    `orphan_grace_s` seconds without a daemon, `on_lost` when a daemon has disconnected.
    """

    def __init__(
        self,
        path: Path,
        orphan_grace_s: float,
        process: Callable[[Message, asyncio.StreamWriter], Message | None],
        on_orphaned: Callable[[], None],
        on_lost: Callable[[asyncio.StreamWriter], None],
    ) -> None:
        self._path = path
        self._orphan_grace_s = orphan_grace_s
        self._process = process
        self._on_orphaned = on_orphaned
        self._on_lost = on_lost
        self._server: asyncio.Server | None = None
        self._remote: FleetListener | None = None
        self._daemons: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._inode = 0
        self._has_left = False

    async def open(self) -> None:
        """Listen; a socket file left by a dead process is replaced. Raises OSError."""
        self._server = await asyncio.start_unix_server(self._connected, self._path, limit=MAX_MUX_LINE_BYTES)
        self._path.chmod(0o600)
        self._inode = self._path.stat().st_ino
        self._start_orphan_timer()

    def open_to_other_hosts(self, listener: socket.socket, identity: FleetIdentity, incarnation: str) -> None:
        """Also accept the daemon's connections on a listening TCP socket."""

        def protocol(ticket: Ticket) -> asyncio.BaseProtocol:
            def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                self._keep(asyncio.create_task(self._serve_remote(ticket, reader, writer, incarnation)), writer)

            return GatedStream(ticket, connected, MAX_MUX_LINE_BYTES)

        self._remote = FleetListener(listener, identity, protocol, _MAX_REMOTE)
        self._remote.start()

    def leave(self, message: Message) -> None:
        """Stop listening, remove the socket file, and send `message` to the daemons that are connected."""
        self._has_left = True
        self._stop_orphan_timer()
        if self._server is not None:
            self._server.close()
        if self._path.exists() and self._path.stat().st_ino == self._inode:  # a successor may have replaced it
            self._path.unlink()
        for writer in self._daemons.values():
            write_line(writer, **message)

    async def close(self) -> None:
        """Close the connections, after `leave`."""
        if self._remote is not None:
            await self._remote.close()
        for task in self._daemons:
            task.cancel()
        if self._daemons:
            await asyncio.wait(self._daemons)

    def _start_orphan_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._stop_orphan_timer()
        self._orphan_timer = loop.call_later(self._orphan_grace_s, self._on_orphaned)

    def _stop_orphan_timer(self) -> None:
        if self._orphan_timer is not None:
            self._orphan_timer.cancel()

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._keep(asyncio.create_task(self._serve(reader, writer)), writer)

    def _keep(self, task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
        self._stop_orphan_timer()
        self._daemons[task] = writer
        task.add_done_callback(self._closed)

    def _closed(self, task: asyncio.Task[None]) -> None:
        self._on_lost(self._daemons.pop(task))
        if not self._daemons and not self._has_left:
            self._start_orphan_timer()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("control connection failed", exc_info=error)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (message := await read_line(reader)) is not None:
                await self._take(message, writer)
        except (ConnectionError, ValueError) as error:
            log.warning("control connection dropped: %s", error)
        finally:
            writer.close()

    async def _take(self, message: Message, writer: asyncio.StreamWriter) -> None:
        if (reply := self._process(message, writer)) is not None:
            write_line(writer, **reply)
            await writer.drain()

    async def _serve_remote(
        self, ticket: Ticket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incarnation: str
    ) -> None:
        """Serve the daemon of another host while it sends messages and its certificate is valid."""
        try:
            set_tcp_limits(writer.transport)
            valid_s = await self._greeted(reader, writer, incarnation)
            ticket.enter(Phase.ANSWER)
            async with asyncio.timeout(valid_s):
                while (message := await self._next(reader)) is not None:
                    await self._take(message, writer)
        except TimeoutError:
            log.warning("control connection dropped: its certificate has expired, or no message arrived in time")
        except (OSError, ValueError, TeimgrError) as error:
            log.warning("control connection dropped: %s", error)
            write_line(writer, error=str(error))
        finally:
            writer.close()

    async def _greeted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, incarnation: str) -> float:
        """Check the greeting and return for how many seconds the connection may be used.

        Raises:
            TimeoutError, OSError: the greeting did not arrive.
            ValueError: the peer is not the daemon, or expects another process.
        """
        peer = peer_of(writer.get_extra_info("ssl_object"))
        if not peer.name.is_daemon:
            raise ValueError(f"{peer.name.uri} may not control a mux")
        async with asyncio.timeout(_HELLO_LIMIT_S):
            first = await read_line(reader) or {}
        if first.get("hello") != incarnation:
            raise ValueError("it expects another process")
        write_line(writer, hello=incarnation)
        return max(0.0, peer.valid_s)

    async def _next(self, reader: asyncio.StreamReader) -> Message | None:
        async with asyncio.timeout(_SILENCE_LIMIT_S):
            return await read_line(reader)


@dataclass(slots=True)
class _Waiting:
    """A call that waits for its model; `ends` is its deadline on the loop's clock, None without one."""

    instance: str
    ends: float | None
    tenant: int
    answer: asyncio.Future[None]
    asked: frozenset[asyncio.StreamWriter] = frozenset()  # without those that have disconnected


class DaemonLoads:
    """Calls that wait for an on-demand model. Every daemon that has sent a snapshot is asked to load it.

    A daemon answers with `ready` once this mux has the routes to the model, or with `refused`; the first answer counts.
    Each new daemon is asked when it sends its snapshot, since the link of a dead one can stay open for long. After the
    last daemon has disconnected, calls wait `NEXT_DAEMON_S` for the next one, but not after `leave`.
    """

    def __init__(self, processes: int = 1) -> None:
        self._limits = WaitingCalls("models to be loaded", processes)
        self._daemons: frozenset[asyncio.StreamWriter] = frozenset()
        self._waiting: dict[int, _Waiting] = {}
        self._numbers = itertools.count(1)
        self._giving_up: asyncio.TimerHandle | None = None  # runs while no daemon is connected
        self._has_left = False

    @asynccontextmanager
    async def loaded(self, instance: str, timeout_s: float | None, size_bytes: int = 0) -> AsyncIterator[None]:
        """Context in which the model is loaded; entering it waits for the load.

        Raises:
            Overloaded: too many calls wait.
            DeadlineExceeded: `timeout_s` has passed.
            Unavailable: no daemon was connected, or the last one disconnected and no other connected in time.
            TeimgrError: the daemon refused.
        """
        call = next(self._numbers)
        try:
            with self._limits.one(instance, size_bytes):
                await self._answered(call, instance, timeout_s)
            yield
        finally:
            self._over(call)

    async def _answered(self, call: int, instance: str, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        ends = None if timeout_s is None else loop.time() + timeout_s
        waiting = self._waiting[call] = _Waiting(instance, ends, current_tenant(), loop.create_future())
        try:
            self._ask(call, waiting)
            if not self._daemons and self._giving_up is None:
                raise Unavailable(f"Instance '{instance}' is not loaded, and no daemon is connected to load it")
            async with asyncio.timeout(timeout_s) as limit:
                await waiting.answer
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded from None
        finally:
            del waiting  # avoids a reference cycle (answer, error, this frame) that keeps the caller's payload

    def _ask(self, call: int, waiting: _Waiting) -> None:
        """Ask the daemons that were not asked yet. One asked twice would keep the model loaded: one `left` follows."""
        left_s = None if waiting.ends is None else max(0.0, waiting.ends - asyncio.get_running_loop().time())
        for daemon in self._daemons - waiting.asked:
            write_line(daemon, load=[call, waiting.instance, left_s], tenant=waiting.tenant)
        waiting.asked = self._daemons

    def _over(self, call: int) -> None:
        if (waiting := self._waiting.pop(call, None)) is not None:
            for daemon in waiting.asked:
                write_line(daemon, left=call)

    def take(self, message: Message, daemon: asyncio.StreamWriter) -> None:
        """Handle `ready` or `refused`. Once a daemon has sent a `snapshot`, it is asked for loads."""
        if "snapshot" in message:
            self._found(daemon)
        if "ready" in message:
            self._answer(message["ready"], None)
        if "refused" in message:
            call, code, text, retry_after_s, *_ = message["refused"]
            error = error_from_code(code, text)
            error.try_after_load(retry_after_s)
            self._answer(call, error)

    def lost(self, daemon: asyncio.StreamWriter) -> None:
        """Handle a closed link; no-op if it was not a daemon's."""
        if daemon not in self._daemons:
            return
        self._daemons -= {daemon}
        for waiting in self._waiting.values():
            waiting.asked -= {daemon}
        self._wait_for_next()

    def leave(self) -> None:
        """Stop waiting for further daemons: once the last one has disconnected, calls fail at once."""
        self._has_left = True
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        if self._daemons:
            return
        if self._has_left:
            self._give_up()
        elif self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(NEXT_DAEMON_S, self._give_up)

    def _found(self, daemon: asyncio.StreamWriter) -> None:
        self._daemons |= {daemon}
        self._stop_giving_up()
        for call, waiting in self._waiting.items():
            if not waiting.answer.done():
                self._ask(call, waiting)

    def _stop_giving_up(self) -> None:
        if self._giving_up is not None:
            self._giving_up.cancel()
        self._giving_up = None

    def _give_up(self) -> None:
        self._stop_giving_up()
        for call in self._waiting:
            self._answer(call, Unavailable("the daemon that loads models has ended"))

    def _answer(self, call: int, error: TeimgrError | None) -> None:
        if (waiting := self._waiting.get(call)) is not None:
            answer_call(waiting.answer, error)
