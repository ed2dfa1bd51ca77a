"""Accepts the connections of a fleet's nodes: mutual TLS, with the certificates of the moment, and bounds."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from teimgr.errors import TeimgrError, Unavailable
from teimgr.fleet_tls import HANDSHAKE_LIMIT_S, FleetIdentity

log = logging.getLogger(__name__)

_MAX_HANDSHAKES = 64
_ACCEPT_PAUSE_S = 0.5


class FleetListener:
    """Accepts connections on `listener`, which listens already, and makes a protocol for each; `address` is where.

    `protocol` gets the client's address. Its connections have proved a certificate of the fleet; whose, it asks
    `fleet_tls.peer_of`. With `most` it counts itself in `connections`, and no more than that are accepted. `noun` is
    what logs and refusals call a connection.

    Connections are accepted here and not by the loop's server, whose context could not be replaced, and which would not
    bound the handshakes that are under way.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: FleetIdentity,
        protocol: Callable[[str], asyncio.BaseProtocol],
        most: int | None = None,
        noun: str = "connection",
    ) -> None:
        self.connections = 0
        self.identity = identity
        self._listener = listener
        self._listener.setblocking(False)
        self._protocol = protocol
        self._most = most
        self._noun = noun
        name, port = listener.getsockname()[:2]
        self.address = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        self._slots = asyncio.Semaphore(_MAX_HANDSHAKES)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept(), name=f"{self._noun}s of other hosts")

    async def close(self) -> None:
        """Stop accepting, and close the socket; the connections stay."""
        tasks = [*self._handshakes, *([self._accepting] if self._accepting else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._listener.close()

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._slots.acquire()
            try:
                sock, peer = await loop.sock_accept(self._listener)
            except OSError as error:  # no descriptors are left, or the client left at once
                self._slots.release()
                log.warning("a %s from another host was not accepted", self._noun, extra={"reason": str(error)})
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            task = asyncio.create_task(self._shake_hands(sock, str(peer[0])))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, sock: socket.socket, client: str) -> None:
        try:
            if self._most is not None and self.connections >= self._most:
                raise Unavailable(f"there are {self._most} {self._noun}s from other hosts")
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: self._protocol(client),
                sock,
                ssl=self.identity.server_context(),
                ssl_handshake_timeout=HANDSHAKE_LIMIT_S,
            )
        except (OSError, TeimgrError) as error:
            sock.close()
            self.log_refusal(client, error)
        finally:
            self._slots.release()

    def log_refusal(self, client: str, error: Exception) -> None:
        """Log why the connection of a client was refused, with the reason of the TLS library where it has one."""
        reason = getattr(error, "verify_message", "") or str(error) or "no handshake in time"
        kind = "certificate" if isinstance(error, ssl.SSLError) else type(error).__name__
        details = {"client": client, "kind": kind, "reason": reason}
        log.warning("a %s from another host was refused", self._noun, extra=details)
