"""Mutual TLS between the nodes of a fleet: identity files, SSL contexts, names in certificates, a listener.

A certificate has its holder's name as a URI (SPIFFE, `spiffe://teimgr/…`), since nodes are known by name and their
addresses change:

    spiffe://teimgr/node/NAME   a node: its agent, muxes and workers
    spiffe://teimgr/daemon      the daemon, which alone may give workers control commands

All processes of a node share one certificate: they run as one user and could read each other's keys. The fleet CA signs
nothing else, so a valid chain proves that the peer belongs to the fleet. Only the standard library is needed to use
certificates; `cluster/authority.py` makes them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from teimgr.errors import InvalidConfig, Unauthenticated, ValidationError
from teimgr.files import write_atomically
from teimgr.http.acceptor import Acceptor, MakeProtocol
from teimgr.http.connection_gate import ConnectionGate

log = logging.getLogger(__name__)

IDENTITY_FILE = "identity.pem"
"""Private key and certificate of a node in one file, so that a renewal replaces both at once."""
AUTHORITIES_FILE = "ca.pem"
"""The certificates of the trusted fleet CAs: two while one replaces the other."""
REMOVED_FILE = "removed.json"
"""Nodes with revoked certificates: by name, revokes those issued before a time in seconds since the epoch."""
CLOCKS_APART_S = 3600.0
"""Backdate `not_before` by this much to tolerate clock skew."""
HANDSHAKE_LIMIT_S = 5.0
MAX_NODE_NAME = 63

_TRUST_DOMAIN = "spiffe://teimgr/"
_NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")

Stamp = tuple[tuple[int, int, int], ...]


def check_node_name(name: str) -> str:
    """Return the name if it is valid: like a host's, in lower case, of at most 63 characters.

    Raises:
        ValidationError: it is not valid.
    """
    if len(name) > MAX_NODE_NAME or not _NODE_NAME.fullmatch(name):
        raise ValidationError(
            f"node: {name[:MAX_NODE_NAME]!r} is not up to {MAX_NODE_NAME} of a-z 0-9 . - that begins and ends "
            "with a letter or digit"
        )
    return name


class FleetName(NamedTuple):
    """The holder of a certificate: the daemon, for which `node` is empty, or a node."""

    node: str = ""

    @property
    def is_daemon(self) -> bool:
        return not self.node

    @property
    def uri(self) -> str:
        return f"{_TRUST_DOMAIN}node/{self.node}" if self.node else f"{_TRUST_DOMAIN}daemon"

    @classmethod
    def parse(cls, uri: str) -> FleetName | None:
        """Return the name in a URI of a certificate; None if the URI does not hold one."""
        kind, _, node = uri.removeprefix(_TRUST_DOMAIN).partition("/")
        if uri.startswith(_TRUST_DOMAIN) and kind == "daemon" and not node:
            return cls()
        if (
            uri.startswith(_TRUST_DOMAIN)
            and kind == "node"
            and len(node) <= MAX_NODE_NAME
            and _NODE_NAME.fullmatch(node)
        ):
            return cls(node)
        return None


DAEMON = FleetName()


class Peer(NamedTuple):
    """The other end of a connection, whose chain was verified; its certificate is valid for `valid_s` seconds more, and
    was issued at `issued_at`, in seconds since the epoch.
    """

    name: FleetName
    valid_s: float
    issued_at: float


def peer_of(ssl_object: Any) -> Peer:
    """Return the peer of an established connection, by its certificate.

    Raises:
        Unauthenticated: the certificate is missing, or does not hold exactly one name of the fleet.
    """
    certificate: dict[str, Any] = (ssl_object.getpeercert() if ssl_object is not None else None) or {}
    uris = [value for kind, value in certificate.get("subjectAltName", ()) if kind == "URI"]
    names = [name for name in map(FleetName.parse, uris) if name is not None]
    if len(names) != 1:
        raise Unauthenticated("the peer's certificate does not name one node of the fleet")
    begun, ends = (ssl.cert_time_to_seconds(certificate[key]) for key in ("notBefore", "notAfter"))
    return Peer(names[0], ends - time.time(), begun + CLOCKS_APART_S)


class FleetIdentity:
    """The certificate of a node (or of the daemon) in `folder`, and contexts made of it.

    The files are read again when they change, so connections made after a renewal use the new ones. A changed file gets
    a new context, because a live one cannot drop an authority. If the files cannot be used, the error is logged and the
    former contexts stay in use.
    """

    def __init__(self, folder: Path, node: str = "") -> None:
        self.folder = folder
        self.node = node
        self._stamp: Stamp | None = None
        self._contexts: tuple[ssl.SSLContext, ssl.SSLContext] | None = None
        self._removed: tuple[Stamp | None, Mapping[str, float]] = (None, {})

    def client_context(self) -> ssl.SSLContext:
        """Return a context for connections to other nodes, whose name the caller checks by `peer_of`. Raises like
        `server_context`."""
        return self._current()[0]

    def server_context(self) -> ssl.SSLContext:
        """Return a context for connections from other nodes, which must present a certificate of the fleet.

        Raises:
            InvalidConfig: the files cannot be used, and no earlier ones were.
        """
        return self._current()[1]

    def check(self, peer: Peer) -> None:
        """Check that the certificate of a peer was not revoked, by the file's present content.

        Raises:
            Unauthenticated: it was revoked.
        """
        path = self.folder / REMOVED_FILE
        stamp, removed = self._removed
        if (now := _stamp_of(path)) != stamp:
            try:
                removed = json.loads(path.read_bytes()) if now else {}
            except (OSError, ValueError) as error:
                log.error("removed nodes cannot be read, the former ones stay", extra={"reason": str(error)})
            self._removed = now, removed
        if peer.issued_at < removed.get(peer.name.node, 0.0):
            raise Unauthenticated(f"node '{peer.name.node}' was removed from the fleet")

    def _current(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        stamp = self._read_stamp()
        if self._contexts is None or stamp != self._stamp:
            try:
                self._contexts = self.context(ssl.PROTOCOL_TLS_CLIENT), self.context(ssl.PROTOCOL_TLS_SERVER)
            except (OSError, ValueError) as error:
                if self._contexts is None:
                    raise InvalidConfig(f"the node's identity in {self.folder} cannot be used: {error}") from error
                if stamp != self._stamp:
                    log.error("renewed identity cannot be used, the former one stays", extra={"reason": str(error)})
            self._stamp = stamp
        return self._contexts

    def _read_stamp(self) -> Stamp | None:
        """Return a value that changes when a file is replaced; None if one is missing."""
        return _stamp_of(self.folder / IDENTITY_FILE, self.folder / AUTHORITIES_FILE)

    def context(self, protocol: Any) -> ssl.SSLContext:
        """Make a new context of the present files, which only the caller uses. Raises OSError and ValueError."""
        context = new_context(protocol)
        context.load_cert_chain(self.folder / IDENTITY_FILE)
        context.load_verify_locations(self.folder / AUTHORITIES_FILE)
        return context


def _stamp_of(*paths: Path) -> Stamp | None:
    try:
        found = [path.stat() for path in paths]
    except OSError:
        return None
    return tuple((each.st_mtime_ns, each.st_size, each.st_ino) for each in found)


def new_context(protocol: Any) -> ssl.SSLContext:
    """Make a context of TLS 1.3 that demands a certificate of its peer, without authorities or its own certificate.

    Host names are not checked: certificates name nodes. Sessions are not resumed: each connection proves the
    certificate again.
    """
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0
    return context


def write_identity(folder: Path, key: bytes, certificate: bytes, authorities: bytes) -> None:
    """Replace the files of an identity, given as PEM; authorities first, because the certificate may be of a new one.

    Raises:
        OSError: they cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(folder / AUTHORITIES_FILE, authorities, mode=0o600, durable=True)
    write_atomically(folder / IDENTITY_FILE, key + certificate, mode=0o600, durable=True)


def write_removed(folder: Path, removed: Mapping[str, float]) -> None:
    """Replace the list of revoked nodes next to an identity, unless it is unchanged.

    Raises:
        OSError: it cannot be written.
    """
    path, content = folder / REMOVED_FILE, json.dumps(dict(removed), sort_keys=True).encode()
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content, mode=0o600, durable=True)


# A burst of refusals that is logged, then one per pause: anybody who reaches the port can cause refusals.
_LOGGED = 10
_LOG_PAUSE_S = 1.0


class FleetListener:
    """Accepts connections on `listener`, which listens already at `address`, and makes a protocol for each.

    Each connection has proved a certificate of the fleet; its protocol gets the peer's name by `fleet_tls.peer_of`. At
    most `most` connections are open at a time, by default as many as a port may have. `noun` names a connection in
    logs.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: FleetIdentity,
        protocol: MakeProtocol,
        most: int | None = None,
        noun: str = "connection",
    ) -> None:
        self.identity = identity
        self.gate = ConnectionGate(most)
        self._listener = listener
        self._noun = noun
        name, port = listener.getsockname()[:2]
        self.address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        self._acceptor = Acceptor(listener, self.gate, protocol, identity.server_context, self.log_refusal)
        self._may_log = float(_LOGGED)
        self._logged_at = 0.0
        self._unlogged = 0

    def start(self) -> None:
        self._acceptor.start()

    async def close(self) -> None:
        """Stop accepting, and close the socket; the connections stay."""
        self._acceptor.close()
        await self._acceptor.wait_closed()
        self._listener.close()

    def log_refusal(self, client: str, error: Exception) -> None:
        """Log why the connection of a client was refused, with the reason of the TLS library if there is one."""
        now = asyncio.get_running_loop().time()
        self._may_log = min(_LOGGED, self._may_log + (now - self._logged_at) / _LOG_PAUSE_S)
        self._logged_at = now
        if self._may_log < 1:
            self._unlogged += 1
            return
        self._may_log -= 1
        reason = getattr(error, "verify_message", "") or str(error) or "no handshake in time"
        kind = "certificate" if isinstance(error, ssl.SSLError) else type(error).__name__
        details = {"client": client, "kind": kind, "reason": reason, "unlogged": self._unlogged}
        self._unlogged = 0
        log.warning("a %s from another host was refused", self._noun, extra=details)
