"""TLS of the REST listener: what uvicorn is told, and whom a connection certifies.

The handshake verifies that a client's certificate chains to the authority; which of those are let in is judged per
request (`gate.py`), so that a refused caller reads why.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from typing import Any

from teimgr.auth.callers import CERTIFICATE, certificate_from_tls
from teimgr.auth.tls_files import TlsFiles, TlsWatch
from teimgr.http_server import AsgiApp, HttpProtocol, Listener, serving


class CertifiedProtocol(HttpProtocol):
    """HTTP/1.1 that tells the application whom the TLS connection certifies: a `Certified` in the request's scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Read the certificate, once for all requests."""
        super().connection_made(transport)
        self._certified = certificate_from_tls(transport.get_extra_info("peercert") or {})

    def on_message_begin(self) -> None:
        """Start a request's scope with it."""
        super().on_message_begin()
        self.scope[CERTIFICATE] = self._certified  # type: ignore[literal-required]


def uvicorn_options(context: ssl.SSLContext | None) -> dict[str, Any]:
    """Keyword arguments of `uvicorn.Config` for a listener with this context; none without."""
    if context is None:
        return {}
    return {"http": CertifiedProtocol, "ssl_context_factory": lambda config, default: context}


class RestTls:
    """The TLS of the REST listener, renewed when its files change; without files the listener speaks none.

    Raises:
        InvalidConfig: the files cannot be used.
    """

    def __init__(self, files: TlsFiles | None) -> None:
        self._context = files.context() if files else None
        self._files = files
        self._watch: TlsWatch | None = None

    def alarms(self) -> list[str]:
        """That the files have become useless, where they have."""
        return [self._watch.alarm] if self._watch and self._watch.alarm else []

    @contextlib.asynccontextmanager
    async def serving(self, app: AsgiApp, sock: socket.socket) -> AsyncIterator[Listener]:
        """As `listening.serving`, with the certificates."""
        async with serving(app, sock, **uvicorn_options(self._context)) as listener:
            if self._files is None:
                yield listener
                return

            async def renew(files: TlsFiles) -> None:
                await listener.secure(files.context())

            self._watch = TlsWatch(self._files, renew)
            watching = asyncio.create_task(self._watch.run())
            try:
                yield listener
            finally:
                watching.cancel()
