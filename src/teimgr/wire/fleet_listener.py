"""Accepts the connections of a fleet's nodes: mutual TLS, with the certificates of the moment, and bounds."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl

from teimgr.http.acceptor import Acceptor, MakeProtocol
from teimgr.http.connection_gate import ConnectionGate
from teimgr.wire.fleet_tls import FleetIdentity

log = logging.getLogger(__name__)

# Refusals that are logged at once, and the time after which one more is: anybody can cause them.
_LOGGED = 10
_LOG_PAUSE_S = 1.0


class FleetListener:
    """Accepts connections on `listener`, which listens already, and makes a protocol for each; `address` is where.

    The connections of protocols have proved a certificate of the fleet; whose, they ask `fleet_tls.peer_of`. There are
    `most` at a time, by default as many as a port may have. `noun` is what logs call a connection.
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
        """Log why the connection of a client was refused, with the reason of the TLS library where it has one."""
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
