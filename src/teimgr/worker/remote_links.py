"""The worker's link server for other hosts: frames over TCP with mutual TLS, after a proof of incarnation.

A peer has a certificate of the fleet and begins with HELLO (`wire/remote_frames.py`). Nodes may send calls and a
replica's self-test; only the daemon may watch and control a worker. Sockets are never passed to other hosts.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from contextlib import suppress
from typing import Any

from teimgr.errors import Forbidden, InvalidInput, Unauthenticated, Unavailable
from teimgr.http.connection_gate import Phase, Ticket
from teimgr.wire.fleet_tls import FleetIdentity, FleetListener, Peer, peer_of
from teimgr.wire.frames import FrameType, Header, Method, Received, pack_error
from teimgr.wire.remote_frames import set_tcp_limits
from teimgr.worker.link_server import LinkCall, LinkConnection, LinkServer
from teimgr.worker.remote_tenants import RemoteMeter

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
_HELLO_LIMIT_S = 5.0
_SILENCE_LIMIT_S = 15.0
"""A client asks for a sign of life after every two seconds of silence; one that does not is gone."""
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
    """A link from another host. It accepts only HELLO until that is answered, and closes when the certificate expires
    or is revoked.
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
        self._meter = RemoteMeter(self.send)

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
        self._meter.close()

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
        elif header.type == FrameType.TENANT:
            self._meter.received(header, payload)
        elif header.type == FrameType.REQUEST and not self._may_send(header.method):
            error = Forbidden(f"a node may not send method {header.method} to a worker of another host")
            self._fail(header, error)
        else:
            super().frame_received(header, payload)

    def _call(self, header: Header, payload: Received) -> LinkCall:
        call = super()._call(header, payload)
        if call.context is not None:
            call.context.charge_by(self._meter)
        return call

    def _may_send(self, method: int) -> bool:
        if method == Method.SHARE_PORTS:  # descriptors cannot leave the host
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
            is_reading = transport.is_reading()  # paused while the client does not read; TCP's own limit then applies
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
