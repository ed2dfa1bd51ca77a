"""Client side of a link to a worker on another host: the same frames over TCP and mutual TLS.

Before any call the worker proves by HELLO that it is the expected incarnation, on a connection whose certificate names
the expected node. Its answer states how long it keeps the connection: at most until the client's certificate expires.

    HELLO   JSON {"incarnation": …} → JSON {"incarnation": …, "valid_s": …}, or an ERROR and the end of the link

The same request probes a silent link. If the peer does not answer, the link is closed after `SILENCE_LIMIT_S`, long
before TCP would time out.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from teimgr.errors import Unauthenticated
from teimgr.wire.fleet_tls import FleetIdentity, FleetName, Peer, peer_of
from teimgr.wire.frames import FrameProtocol, FrameType, Header, Method, Received, unpack_error

log = logging.getLogger(__name__)

PROBE_AFTER_S = 2.0
"""A link is probed after this long without received bytes."""
SILENCE_LIMIT_S = 5.0
"""A link is lost after this long without received bytes and without progress of its queued ones."""
USER_TIMEOUT_MS = 15_000
"""Bytes unacknowledged for this long break the connection; TCP alone would retry for a quarter of an hour."""
_TICK_S = 1.0
_HELLO_ID = 0  # calls count from 1


class RemoteAddress(NamedTuple):
    """Where a worker of another host listens, and which peer must answer there."""

    host: str
    port: int
    node: str
    incarnation: str

    @classmethod
    def parse(cls, address: str, node: str, incarnation: str) -> RemoteAddress:
        """Parse `host:port`, an IPv6 host in brackets.

        Raises:
            ValueError: it has no port.
        """
        host, _, port = address.rpartition(":")
        return cls(host.strip("[]"), int(port), node, incarnation)


class WrongPeer(ConnectionRefusedError):
    """The process that listens at the address is on another node, or is another incarnation of the worker."""


class RemoteFrames(FrameProtocol):
    """Mixin of a `FrameProtocol`, before it in the bases: HELLO, and probes while the link is silent.

    `valid_s` is the time from HELLO on for which the link may be used.
    """

    valid_s: float = 0.0
    ends_when_revoked = True
    """Whether the link is closed when the certificate of its peer is revoked."""
    _proof: tuple[FleetIdentity, Peer] | None = None
    _answer: asyncio.Future[bytes]
    _tick_timer: asyncio.TimerHandle
    _expected: str
    _heard_at: float = 0.0
    _waiting_before: int = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        set_tcp_limits(transport)
        self._heard_at = self._loop.time()
        self._answer = self._loop.create_future()
        self._tick_timer = self._loop.call_later(_TICK_S, self._tick)

    async def prove(self, address: RemoteAddress, identity: FleetIdentity) -> None:
        """Return once the peer has proved that it is the expected worker.

        Raises:
            WrongPeer: it is another one.
            OSError: the connection broke.
        """
        assert self._transport is not None
        self._expected = address.incarnation
        try:
            peer = peer_of(self._transport.get_extra_info("ssl_object"))
            identity.check(peer)
        except Unauthenticated as error:
            raise WrongPeer(error.message) from error
        if peer.name != FleetName(address.node):
            raise WrongPeer(f"the certificate is for {peer.name.uri}, not for node '{address.node}'")
        self._proof = identity, peer
        self._ask()
        values: dict[str, Any] = json.loads(await self._answer)
        self.valid_s = min(float(values["valid_s"]), peer.valid_s)

    def buffer_updated(self, nbytes: int) -> None:
        self._heard_at = self._loop.time()
        super().buffer_updated(nbytes)

    def frame_received(self, header: Header, payload: Received) -> None:
        """Process an answer to HELLO; pass other frames on to the link."""
        if header.id != _HELLO_ID or header.method != Method.HELLO:
            super().frame_received(header, payload)
        elif header.type == FrameType.REPLY and _incarnation_in(payload) == self._expected:
            if not self._answer.done():
                self._answer.set_result(bytes(payload))
        else:
            reason = unpack_error(payload).message if header.type == FrameType.ERROR else "it is another incarnation"
            self._give_up(WrongPeer(reason))

    def connection_lost(self, exc: Exception | None) -> None:
        self._tick_timer.cancel()
        if not self._answer.done():
            self._answer.set_exception(exc or ConnectionResetError("the connection was closed"))
            self._answer.exception()  # marks it retrieved: the caller may have been cancelled
        super().connection_lost(exc)

    def _ask(self) -> None:
        payload = json.dumps({"incarnation": self._expected}).encode()
        self.send(FrameType.REQUEST, Method.HELLO, _HELLO_ID, payload)

    def _tick(self) -> None:
        """Probe a silent link, and give up a dead one: bytes in either direction show that it lives."""
        if self._proof is not None and self.ends_when_revoked:
            identity, peer = self._proof
            try:
                identity.check(peer)
            except Unauthenticated as error:
                self._give_up(WrongPeer(error.message))
                return
        now, waiting = self._loop.time(), self.unsent_bytes
        if waiting < self._waiting_before:
            self._heard_at = now
        self._waiting_before = waiting
        silent_s = now - self._heard_at
        if silent_s > SILENCE_LIMIT_S:
            self._give_up(TimeoutError(f"silent for {silent_s:.1f} s"))
            return
        if silent_s >= PROBE_AFTER_S and self._answer.done():
            self._ask()
        self._tick_timer = self._loop.call_later(_TICK_S, self._tick)

    def _give_up(self, error: Exception) -> None:
        log.warning("link to another host closed", extra={"incarnation": self._expected, "reason": str(error)})
        if not self._answer.done():
            self._answer.set_exception(error)
            self._answer.exception()
        if self._transport is not None:
            self._transport.abort()


RemoteT = TypeVar("RemoteT", bound=RemoteFrames)


async def connect(factory: Callable[[], RemoteT], address: RemoteAddress, identity: FleetIdentity) -> RemoteT:
    """Return a connected link whose worker has proved its identity. The caller limits the time.

    Raises:
        WrongPeer: another node or another incarnation answers there.
        OSError: the connection failed, or a certificate is refused (ssl.SSLError).
        InvalidConfig: this node's own certificate cannot be used.
    """
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(factory, address.host, address.port, ssl=identity.client_context())
    try:
        await link.prove(address, identity)
    except BaseException:
        link.abort()
        raise
    return link


def set_tcp_limits(transport: asyncio.BaseTransport) -> None:
    """Make the kernel break a connection whose peer acknowledges nothing; unlike our probes, this needs no answer of
    the peer."""
    with suppress(OSError):  # already closed
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, USER_TIMEOUT_MS)


def _incarnation_in(payload: Received) -> str | None:
    try:
        values = json.loads(bytes(payload))
        return str(values["incarnation"])
    except (ValueError, TypeError, KeyError):
        return None
