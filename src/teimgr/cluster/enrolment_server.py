"""The daemon's port for nodes that join the fleet or renew their certificate: JSON lines over TLS 1.3.

A connection has one request and one answer:

    {"op": "authorities"}            → {"authorities": PEM}
    {"op": "join", "token", "node", "request", "versions", "clock"}
                                     → {"certificate": PEM, "authorities": PEM, "ray_token"}
    {"op": "enter", "request", "versions", "clock"}
                                     → the same; the client's certificate names the node
    {"op": "renew", "request"}       → {"certificate": PEM, "authorities": PEM}, in the same way
    any of them                      → {"error": {"code": number, "message": …}}

`request` is a signing request (CSR) as PEM, `versions` an object as `messages.Versions`, `clock` the node's time in
seconds since the epoch. The first one is asked before the joining node trusts anything: it compares the answer with the
fingerprint in its token, and sends the token on a second connection, which it verifies by that authority. A node that
has a certificate already enters with it. Other versions than the daemon's, and a clock too late for its certificates,
are refused before a token counts as used; a renewal does not ask for them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from teimgr.cluster.authority import MAX_REQUEST_BYTES, FleetAuthority
from teimgr.cluster.enrolment import Enrolment, JoinToken
from teimgr.cluster.messages import Versions
from teimgr.errors import (
    Forbidden,
    Internal,
    InvalidConfig,
    InvalidInput,
    StateNotSaved,
    StorageFull,
    TeimgrError,
    Unauthenticated,
)
from teimgr.files import NO_ROOM
from teimgr.http.acceptor import Acceptor, GatedStream
from teimgr.http.connection_gate import LIMITS, ConnectionGate, Phase, PhaseLimit, Ticket
from teimgr.http.server import bind
from teimgr.spec import known
from teimgr.wire.fleet_tls import (
    CLOCKS_APART_S,
    DAEMON,
    FleetIdentity,
    FleetName,
    peer_of,
    write_identity,
    write_removed,
)
from teimgr.wire.json_messages import read_line, write_line

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 4 * MAX_REQUEST_BYTES
_REQUEST_LIMIT_S = 10.0
# The port's connections, and those among them of clients without a certificate, in each phase up to their request: as a
# further one displaces the oldest, silent ones stop neither joins nor the renewals of nodes, which have places left.
_MAX_CONNECTIONS = 256
_UNPROVED = {"connections": 64, "per_address": 32}
_LIMITS = {
    Phase.SILENT: PhaseLimit(LIMITS[Phase.SILENT].seconds, **_UNPROVED),
    Phase.HANDSHAKE: PhaseLimit(LIMITS[Phase.HANDSHAKE].seconds, **_UNPROVED),
    Phase.HEAD: PhaseLimit(_REQUEST_LIMIT_S, **_UNPROVED),
}
_MAINTENANCE_S = 3600.0
_LATEST = 2**40
"""Upper limit of a valid time in epoch seconds."""

Message = dict[str, Any]
ResultT = TypeVar("ResultT")


class EnrolmentServer:
    """The port, and the certificates of the daemon (`identity`) and of its host, the node `node` (`node_identity`).

    `folder` has the authority, the enrolment and these certificates; nodes need the same `versions`, and get what
    `ray_token` reads.

    Raises:
        InvalidConfig: a file in the folder cannot be used.
    """

    def __init__(self, folder: Path, node: str, versions: Versions, ray_token: Callable[[], str]) -> None:
        self._folder = folder
        self._reserved = node
        self._read()
        self.identity = FleetIdentity(folder / "daemon", node)
        self.node_identity = FleetIdentity(folder / "node", node)
        self._versions = versions
        self._ray_token = ray_token
        self.address = ("", 0)
        self._listener: socket.socket | None = None
        self._acceptor: Acceptor | None = None
        self._context: ssl.SSLContext | None = None
        self._maintenance: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._changes = ThreadPoolExecutor(1, "enrolment")  # one thread: changes are serial and do not block the loop
        self._is_published = False
        self.renew_own()
        self._publish_removed()

    def _read(self) -> None:
        self.authority = FleetAuthority(self._folder / "ca")
        self.enrolment = Enrolment(self._folder / "enrolment.json", reserved=self._reserved)

    def renew_own(self) -> None:
        """Give the daemon and its host new certificates, and the present authorities."""
        for identity, name in ((self.identity, DAEMON), (self.node_identity, FleetName(self.node_identity.node))):
            key, certificate = self.authority.issue_own(name)
            write_identity(identity.folder, key, certificate, self.authority.authorities())

    async def join_token(self, node: str | None, life_s: float) -> str:
        """A join token that pins this fleet's authority. Raises as `Enrolment.create_token`, and as `_recorded`."""
        return str(await self._recorded(self.enrolment.create_token, self.authority.fingerprint, node, life_s))

    def is_member(self, node: str) -> bool:
        """True if the node has joined and was not removed; the daemon's own is one."""
        return node == self.identity.node or self.enrolment.has(node)

    async def remove_host(self, name: str) -> bool:
        """Revoke the certificates of a node; False if it is not in the fleet. Raises as `_recorded`."""
        return await self._recorded(self._remove, name)

    def _remove(self, name: str) -> bool:
        if not self.enrolment.remove(name) and (self._is_published or name not in self.enrolment.removed):
            return False
        self._publish_removed()
        log.warning("a node was removed from the fleet", extra={"node": name})
        return True

    def _redeem(self, token: JoinToken, node: str) -> None:
        self.enrolment.redeem(token, node)
        self._publish_removed()

    def _publish_removed(self) -> None:
        self._is_published = False
        for identity in (self.identity, self.node_identity):
            write_removed(identity.folder, self.enrolment.removed)
        self._is_published = True

    async def _recorded(self, change: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Make a change of the enrolment, which is on the disk then.

        Raises:
            StorageFull, StateNotSaved: the disk refused, and nothing has changed: it may be tried again.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._changes, partial(change, *arguments))
        except OSError as error:
            kind = StorageFull if error.errno in NO_ROOM else StateNotSaved
            raise kind(f"the enrolment cannot be recorded: {error}") from error

    async def start(self, host: str, port: int) -> None:
        """Listen, and renew the daemon's certificate at intervals.

        Raises:
            PortConflict: the port is taken.
            InvalidConfig: a file in the folder cannot be used.
        """
        self._read()  # again: the previous daemon may have written since
        self._publish_removed()
        self._listener = bind(host, port, "cluster.enrolment_port")
        self.address = self._listener.getsockname()[:2]
        self._maintenance = asyncio.create_task(self._maintain(), name="renewal of the daemon's certificate")
        self._listener.listen()
        self._context = self._new_context()
        gate = ConnectionGate(_MAX_CONNECTIONS, _LIMITS)
        self._acceptor = Acceptor(self._listener, gate, self._stream, lambda: self._context)
        self._acceptor.start()

    async def close(self) -> None:
        """Stop listening and end open connections."""
        if self._maintenance is not None:
            self._maintenance.cancel()
            await asyncio.wait({self._maintenance})
        if self._acceptor is not None and self._listener is not None:
            self._acceptor.close()
            await self._acceptor.wait_closed()
            self._listener.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await asyncio.to_thread(self._changes.shutdown)

    def _new_context(self) -> ssl.SSLContext:
        """Of the present certificates; clients may have none yet."""
        context = self.identity.context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        return context

    async def _maintain(self) -> None:
        """Renew the authority's and the daemon's certificate; new connections use them at once."""
        while True:
            await asyncio.sleep(_MAINTENANCE_S)
            try:
                self.authority.maintain()
                self.renew_own()
                self._context = self._new_context()
                await self._recorded(self._publish_removed)
            except Exception:  # retried at the next interval
                log.exception("the daemon's certificate in the fleet was not renewed")

    def _stream(self, ticket: Ticket) -> asyncio.BaseProtocol:
        return GatedStream(ticket, partial(self._connected, ticket), MAX_LINE_BYTES)

    async def _connected(self, ticket: Ticket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if writer.get_extra_info("peercert"):
                ticket.enter(Phase.ANSWER)
            async with asyncio.timeout(_REQUEST_LIMIT_S):
                write_line(writer, **await self._answer(reader, writer))
                await writer.drain()
        except (OSError, TimeoutError) as error:
            log.warning("a client of the enrolment port was dropped", extra={"reason": str(error) or "too slow"})
        finally:
            self._connections.discard(task)
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Message:
        about: Message = {"client": str(writer.get_extra_info("peername"))}
        try:
            message = await read_line(reader) or {}
            about |= {"op": message.get("op"), "node": message.get("node")}
            return await self._process(message, writer.get_extra_info("ssl_object"))
        except ValueError as error:
            failure: TeimgrError = InvalidInput(f"enrolment request: {error}")
        except TeimgrError as error:
            failure = error
        except OSError as error:
            failure = Internal(f"the enrolment cannot be recorded: {error}")
        log.warning("enrolment refused", extra={**about, "code": failure.code.name, "reason": failure.message})
        return {"error": {"code": int(failure.code), "message": failure.message}}

    async def _process(self, message: Message, ssl_object: Any) -> Message:
        authorities = {"authorities": self.authority.authorities().decode()}
        if (op := message.get("op")) == "authorities":
            return authorities
        if op not in ("join", "enter", "renew"):
            raise ValueError("op: one of authorities, join, enter, renew")
        if op != "renew":
            _check_clock(message.get("clock"))
        request = _text(message, "request").encode()
        self.authority.key_of(request)  # checked first, so that a refused request uses no token
        node = self._proven(message, ssl_object)
        ray = {}
        if op != "renew":  # only hosts that may join learn the daemon's versions
            self._check(message.get("versions"))
            ray = {"ray_token": self._ray_token()}
        if op == "join":
            await self._recorded(self._redeem, JoinToken.parse(_text(message, "token")), node)
            log.info("a node joined the fleet", extra={"node": node})
        else:
            await self._recorded(self.enrolment.renew, node, peer_of(ssl_object).issued_at)
        certificate = self.authority.issue(request, FleetName(node))
        return {"certificate": certificate.decode(), **authorities, **ray}

    def _proven(self, message: Message, ssl_object: Any) -> str:
        """The node that a join token or the certificate of the connection stands for.

        Raises:
            ValidationError, Unauthenticated, Forbidden: neither does.
        """
        if message["op"] == "join":
            node = _text(message, "node")
            self.enrolment.check(JoinToken.parse(_text(message, "token")), node)
            return node
        peer = peer_of(ssl_object)
        if peer.name.is_daemon:
            raise Unauthenticated("the certificate names no node")
        if not self.enrolment.has(peer.name.node):
            raise Forbidden(f"Node '{peer.name.node}' is not in the fleet")
        return peer.name.node

    def _check(self, versions: Any) -> None:
        try:
            found = Versions(**known(Versions, versions))
        except TypeError as error:
            raise InvalidInput(f"enrolment request: versions: {error}; is it another version of teimgr?") from error
        if different := self._versions.differences(found):
            raise InvalidConfig(f"versions differ from the daemon's: {different}; install the same on this host")


def _check_clock(there: Any) -> None:
    """Refuse a host whose clock is so late that the daemon's certificates are not valid yet."""
    if type(there) not in (int, float) or not 0 <= there < _LATEST:
        raise ValueError("clock: a time in seconds since the epoch is expected")
    if (late_s := time.time() - there) > CLOCKS_APART_S:
        raise InvalidConfig(
            f"this host's clock is {late_s:.0f} s behind the daemon's, at most {CLOCKS_APART_S:.0f} s are allowed: "
            "set it"
        )


def _text(message: Message, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key}: a text is expected")
    return value
