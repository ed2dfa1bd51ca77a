"""TLS of the REST listener: uvicorn's options, the client certificate in the scope, and renewal of the files.

The handshake verifies that a client's certificate chains to the authority; the allow-lists are applied per request
(`middleware.Authentication`), so that a rejected client gets a reason.
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


class TlsHttpProtocol(HttpProtocol):
    """HTTP/1.1 over TLS that puts the client certificate's names into the scope of each request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._certificate = certificate_from_tls(transport.get_extra_info("peercert") or {})

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CERTIFICATE] = self._certificate  # type: ignore[literal-required]


def uvicorn_options(context: ssl.SSLContext | None) -> dict[str, Any]:
    """Keyword arguments of `uvicorn.Config` for a listener with this context; none without."""
    if context is None:
        return {}
    return {"http": TlsHttpProtocol, "ssl_context_factory": lambda config, default: context}


class RestTls:
    """TLS of the REST listener, renewed when its files change; off without files.

    Raises:
        InvalidConfig: the files cannot be used.
    """

    def __init__(self, files: TlsFiles | None) -> None:
        self._context = files.context() if files else None
        self._files = files
        self._watch: TlsWatch | None = None

    def alarms(self) -> list[str]:
        """One alarm while changed files are unusable."""
        return [self._watch.alarm] if self._watch and self._watch.alarm else []

    @contextlib.asynccontextmanager
    async def serving(self, app: AsgiApp, sock: socket.socket) -> AsyncIterator[Listener]:
        """As `http_server.serving`, with these certificates."""
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
