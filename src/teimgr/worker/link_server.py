"""The worker's link server: framed connections for calls, control commands and watches of its state.

Other hosts use TCP with mutual TLS. A peer has a certificate of the fleet and begins with HELLO
(`wire/remote_frames.py`), by which the worker proves its incarnation. Nodes may send calls and self-tests; only the
daemon may watch and control a worker. Sockets are never passed to other hosts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from teimgr.errors import Cancelled, Forbidden, InvalidInput, TeimgrError, Unauthenticated, Unavailable
from teimgr.http.connection_gate import Phase, Ticket
from teimgr.observability.request_context import RequestContext
from teimgr.wire.fleet_tls import FleetIdentity, FleetListener, Peer, peer_of
from teimgr.wire.frames import (
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    Method,
    Received,
    pack_error,
    pack_header,
    retry_after_ms,
)
from teimgr.wire.remote_frames import set_tcp_limits
from teimgr.worker.calls import CallReply, MethodCall
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.methods import handle
from teimgr.worker.remote_tenants import RemoteMeter

log = logging.getLogger(__name__)

# Limit on the bytes of a frame in addition to its message.
_FRAME_SLACK_BYTES = 64 * 1024
# Time limit of a control command without a deadline.
_CONTROL_LIMIT_S = 5.0

Control = Callable[[bytes, float], Awaitable[bytes]]


class LinkServer:
    """The link connections of one worker, the watchers among them, and its control commands.

    `controls` maps a control method to its handler, which gets JSON bytes and a limit in seconds, and returns JSON
    bytes. `ports` are the sockets that are shared with other workers of the instance: listening sockets by port number,
    and the ends of the connection queue as -1 and -2.
    """

    def __init__(self, dispatcher: Dispatcher, controls: dict[Method, Control]) -> None:
        self.dispatcher = dispatcher
        self.controls = controls
        self.max_frame_bytes = dispatcher.spec.max_message_bytes + _FRAME_SLACK_BYTES
        self.open: set[LinkConnection] = set()
        self.ports: dict[int, socket.socket] = {}
        self.has_shared_ports = False
        self.watched = asyncio.Event()
        self.unwatched = asyncio.Event()
        self.unwatched.set()
        self._none_open = asyncio.Event()
        self._watchers: dict[LinkConnection, int] = {}
        self._announcement = b"{}"

    def share(self, ports: Mapping[int, socket.socket]) -> None:
        """Add sockets of which other workers of the instance get copies when they ask."""
        self.ports |= ports

    def protocol(self) -> LinkConnection:
        return LinkConnection(self)

    @property
    def is_watched(self) -> bool:
        return bool(self._watchers)

    @property
    def has_callers(self) -> bool:
        """True if a connection has sent calls, not just control commands or watches."""
        return any(link.is_callers for link in self.open)

    def announce(self, facts: dict[str, Any]) -> None:
        """Send the worker's state to every watcher, and to later watchers when they connect."""
        self._announcement = json.dumps(facts).encode()
        for link, id in self._watchers.items():
            link.send(FrameType.REPLY, Method.WATCH, id, self._announcement)

    def watch(self, link: LinkConnection, id: int) -> None:
        self._watchers[link] = id
        self.watched.set()
        self.unwatched.clear()
        link.send(FrameType.REPLY, Method.WATCH, id, self._announcement)

    def remove(self, link: LinkConnection) -> None:
        self.open.discard(link)
        if not self.open:
            self._none_open.set()
        if self._watchers.pop(link, None) is not None and not self._watchers:
            self.watched.clear()
            self.unwatched.set()

    async def close(self, limit_s: float) -> None:
        """Close every connection once its queued frames are sent, or after `limit_s`."""
        self._none_open.clear()
        for link in tuple(self.open):
            link.close()
        if not self.open:
            return
        try:
            async with asyncio.timeout(limit_s):
                await self._none_open.wait()
        except TimeoutError:
            log.warning("%d links closed before their peers read all replies", len(self.open))


class LinkConnection(FrameProtocol):
    """One accepted link connection: its open calls, and flow control in both directions."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__(server.max_frame_bytes)
        self.is_callers = False
        self._server = server
        self._unanswered: dict[int, LinkCall] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._meter: RemoteMeter | None = None  # set once the other end charges and counts its calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self._transport is not None
        self._transport.set_write_buffer_limits(high=self._server.max_frame_bytes)
        self._server.open.add(self)

    def pause_writing(self) -> None:
        """Backpressure: stop reading requests while the peer does not read its replies."""
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.type == FrameType.CANCEL:
            self._cancel(header.id)
        elif header.type != FrameType.REQUEST:
            self._noted(header, payload)
        elif header.method == Method.WATCH:
            self._server.watch(self, header.id)
        elif header.method == Method.SHARE_PORTS:
            self._share_ports(header)
        elif header.method in self._server.controls:
            task = asyncio.get_running_loop().create_task(self._run_control(header, payload))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self.is_callers = True
            call = self._call(header, payload)
            self._server.dispatcher.turns.call(call.turns_of, partial(self._handle, call))

    def link_lost(self, error: Exception | None) -> None:
        self._server.remove(self)
        for id in tuple(self._unanswered):
            self._cancel(id)
        for task in tuple(self._tasks):
            task.cancel()
        if self._meter is not None:
            self._meter.close()

    def _call(self, header: Header, payload: Received) -> LinkCall:
        call = LinkCall(self, self._unanswered, header, payload)
        if self._meter is not None and call.context is not None:
            call.context.charge_by(self._meter)
        return call

    def _noted(self, header: Header, payload: Received) -> None:
        if header.type != FrameType.TENANT:
            log.warning("a peer sent a frame of type %d, which only workers send", header.type)
            return
        if self._meter is None:
            self._meter = RemoteMeter(self.send)
        self._meter.received(header, payload)

    def _handle(self, call: LinkCall) -> None:
        if call.header.id in self._unanswered:  # not cancelled before its turn
            handle(self._server.dispatcher, call)

    def _cancel(self, id: int) -> None:
        call = self._unanswered.pop(id, None)
        if call is not None:
            self._server.dispatcher.cancel(call)

    def _share_ports(self, header: Header) -> None:
        """Send the listening sockets over the connection's own socket, since an asyncio transport cannot send
        descriptors.

        The request is the first on its connection, so it overtakes no queued frame.
        """
        assert self._transport is not None
        numbers = json.dumps([*self._server.ports]).encode()
        frame = pack_header(len(numbers), FrameType.REPLY, header.method, header.id) + numbers
        descriptors = [port.fileno() for port in self._server.ports.values()]
        self._server.has_shared_ports |= bool(descriptors)
        with socket.socket(fileno=os.dup(self._transport.get_extra_info("socket").fileno())) as own:
            socket.send_fds(own, [frame], descriptors)

    async def _run_control(self, header: Header, payload: Received) -> None:
        try:
            limit_s = header.deadline_ms / 1000 or _CONTROL_LIMIT_S
            reply = await self._server.controls[Method(header.method)](bytes(payload), limit_s)
        except asyncio.CancelledError:
            self._fail(header, Cancelled("the worker is stopping"))
            raise
        except (ValueError, KeyError, TypeError) as error:
            self._fail(header, InvalidInput(f"malformed control message: {error}"))
        except TeimgrError as error:
            self._fail(header, error)
        except Exception as error:
            self._fail(header, masked(error))
        else:
            self.send(FrameType.REPLY, header.method, header.id, reply, flags=Flag.NONE)

    def _fail(self, header: Header, error: TeimgrError) -> None:
        self.send(FrameType.ERROR, header.method, header.id, pack_error(error))


class LinkCall(MethodCall):
    """A REQUEST frame, answered by one REPLY or ERROR frame.

    `unanswered` has the link's open calls by frame id; each call adds itself, and removes itself when answered.
    """

    __slots__ = ("header", "link", "unanswered")

    def __init__(self, link: FrameProtocol, unanswered: dict[int, LinkCall], header: Header, payload: Received) -> None:
        deadline = time.monotonic() + header.deadline_ms / 1000 if header.deadline_ms else None
        super().__init__(header.method, payload, header.flags, deadline)
        self.link = link
        self.header = header
        if header.context:
            self.context = RequestContext.unpack(header.context)
        self.turns_of = self.tenant or link
        self.unanswered = unanswered
        unanswered[header.id] = self

    def reply(self, reply: CallReply) -> None:
        head, flags = reply.head, Flag.NONE
        if reply.timings is not None:
            head, flags = reply.timings.pack() + head, Flag.TIMINGS
        self.unanswered.pop(self.header.id, None)
        stats = self.context.stats if self.context is not None else None
        context = b"" if stats is None else stats.pack()
        method, id = self.header.method, self.header.id
        self.link.send(FrameType.REPLY, method, id, reply.payload, flags=flags, context=context, before=head)

    def fail(self, error: TeimgrError) -> None:
        self.unanswered.pop(self.header.id, None)
        retry_ms = retry_after_ms(error)
        self.link.send(FrameType.ERROR, self.header.method, self.header.id, pack_error(error), deadline_ms=retry_ms)


MAX_CONNECTIONS = 4096
_HELLO_LIMIT_S = 5.0
_SILENCE_LIMIT_S = 15.0
"""Clients send a probe after two seconds of silence; a link without any for this long is closed."""
_TICK_S = 5.0
_CONTROL_FROM = Method.WATCH
_OPEN_TO_NODES = (Method.PROBE,)


class RemoteLinkListener(FleetListener):
    """Accepts links from other hosts on `listener`; `LinkServer.close` closes them."""

    def __init__(self, links: LinkServer, identity: FleetIdentity, incarnation: str, listener: socket.socket) -> None:
        super().__init__(
            listener, identity, lambda ticket: RemoteLinkConnection(self, ticket), MAX_CONNECTIONS, noun="link"
        )
        self.links = links
        self.incarnation = incarnation


class RemoteLinkConnection(LinkConnection):
    """A link from another host. It accepts only HELLO until it has answered that, and closes when the certificate
    expires or is revoked.
    """

    def __init__(self, listener: RemoteLinkListener, ticket: Ticket) -> None:
        super().__init__(listener.links)
        self._listener = listener
        self._ticket = ticket
        self._client = ticket.client
        self._greeted = False
        self._is_daemon = False
        self._valid_until = 0.0
        self._peer: Peer | None = None
        self._heard_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._ticket.enter(Phase.HEAD)
        if not self._ticket.hand_to(self):
            transport.abort()  # type: ignore[attr-defined]
            return
        self._heard_at = self._loop.time()
        self._next_tick(_HELLO_LIMIT_S)
        try:
            set_tcp_limits(transport)
            peer = self._peer = peer_of(transport.get_extra_info("ssl_object"))
            self._listener.identity.check(peer)
        except (Unauthenticated, OSError) as error:
            self._refuse(str(error))
            return
        self._is_daemon = peer.name.is_daemon
        self._client = f"{peer.name.uri} at {self._client}"
        self._valid_until = self._heard_at + peer.valid_s

    def connection_lost(self, exc: Exception | None) -> None:
        self._ticket.leave()
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def on_expired(self, phase: Phase) -> None:
        """Called by the gate; renews the ticket, since `_tick` enforces the time limits."""
        self._ticket.renew()

    def on_displaced(self) -> None:
        """Called by the gate."""
        self._refuse("the port has too many links")

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_at = self._loop.time()
        super().buffer_updated(nbytes)

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.type == FrameType.REQUEST and header.method == Method.HELLO:
            self._hello(header, payload)
        elif not self._greeted:
            self._refuse("it sent a frame before HELLO")
        elif header.type == FrameType.REQUEST and not self._may_send(header.method):
            error = Forbidden(f"a node may not send method {header.method} to a worker of another host")
            self._fail(header, error)
        else:
            super().frame_received(header, payload)

    def _may_send(self, method: int) -> bool:
        if method == Method.SHARE_PORTS:  # file descriptors cannot be sent to other hosts
            return False
        return self._is_daemon or method < _CONTROL_FROM or method in _OPEN_TO_NODES

    def _hello(self, header: Header, payload: Received) -> None:
        try:
            expected: Any = json.loads(bytes(payload))["incarnation"]
        except (ValueError, TypeError, KeyError) as error:
            self._fail(header, InvalidInput(f"malformed HELLO: {error!r}"))
            self.close()
            return
        if expected != self._listener.incarnation:
            self.send(
                FrameType.ERROR,
                header.method,
                header.id,
                pack_error(Unavailable(f"this worker is incarnation {self._listener.incarnation}, not {expected}")),
            )
            log.warning(
                "a link for another incarnation was refused",
                extra={"client": self._client, "expected": str(expected)[:64]},
            )
            self.close()
            return
        self._greeted = True
        self._ticket.enter(Phase.ANSWER)
        valid_s = max(0.0, self._valid_until - self._loop.time())
        answer = json.dumps({"incarnation": expected, "valid_s": valid_s}).encode()
        self.send(FrameType.REPLY, header.method, header.id, answer)
        self._next_tick(min(_TICK_S, valid_s))

    def _tick(self) -> None:
        """Close a link without HELLO, without frames for too long, or with a certificate that is no longer valid."""
        now, transport = self._loop.time(), self._transport
        if transport is None:
            return
        try:
            if self._peer is not None:
                self._listener.identity.check(self._peer)
        except Unauthenticated as error:
            self._refuse(error.message)
            return
        is_reading = True
        with suppress(AttributeError):
            is_reading = transport.is_reading()  # False while the client does not read; then TCP's user timeout applies
        if not self._greeted:
            self._refuse(f"no HELLO within {_HELLO_LIMIT_S:g} s")
        elif now >= self._valid_until:
            self._refuse("its certificate has expired")
        elif is_reading and now - self._heard_at > _SILENCE_LIMIT_S:
            self._refuse(f"it was silent for {now - self._heard_at:.0f} s")
        else:
            self._next_tick(min(_TICK_S, self._valid_until - now))

    def _next_tick(self, pause_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(max(0.01, pause_s), self._tick)

    def _refuse(self, reason: str) -> None:
        log.warning("a link from another host was closed", extra={"client": self._client, "reason": reason})
        if self._transport is not None:
            self._transport.abort()
