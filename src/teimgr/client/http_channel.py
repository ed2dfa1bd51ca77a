"""HTTP connection to a daemon's REST port: JSON calls, server-sent events, failures as `TeimgrError`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError
from yarl import URL

from teimgr.client.connection_causes import reason_of
from teimgr.client.http_replies import CONNECT_S, ReplyHead, Request, RestChannel
from teimgr.errors import DeadlineExceeded, Internal, Unreachable, ValidationError
from teimgr.wire.status import CODE_KEY


class UnixTlsConnector(aiohttp.UnixConnector):
    """Connections to a Unix socket, over TLS where a context is given; aiohttp's own connector has no TLS."""

    def __init__(self, path: str, context: ssl.SSLContext | None, server_name: str) -> None:
        super().__init__(path)
        self._tls: dict[str, Any] = {} if context is None else {"ssl": context, "server_hostname": server_name}

    async def _create_connection(self, req: Any, traces: Any, timeout: aiohttp.ClientTimeout) -> Any:
        try:
            async with asyncio.timeout(timeout.sock_connect):
                loop = asyncio.get_running_loop()
                _, protocol = await loop.create_unix_connection(self._factory, self.path, **self._tls)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {self.path}") from error
        except OSError as error:
            raise UnixClientConnectorError(self.path, req.connection_key, error) from error
        return protocol


class HttpChannel(RestChannel):
    """Opened and closed by its owner, inside a running event loop."""

    _session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the session; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        context = self._tls.ssl_context() if self._address.secure else None
        connector: aiohttp.BaseConnector
        if self._address.path:
            server_name = self._tls.server_name or self._address.host
            connector = UnixTlsConnector(self._address.path, context, server_name)
        else:
            connector = aiohttp.TCPConnector(ssl=context or True)
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    @asynccontextmanager
    async def _reply(self, request: Request) -> AsyncIterator[ReplyHead]:
        method, path, body, query, headers, timeout_s = request
        if self._session is None:
            raise Internal("the client is not open: use it in a `with` block")
        try:
            payload = None if body is None else aiohttp.JsonPayload(body)
        except (TypeError, ValueError) as error:
            raise ValidationError(str(error)) from error
        url = URL(self._address.http_base + path, encoded=True)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(
                    method, url, data=payload, params=query, headers=headers, server_hostname=self._tls.server_name
                ) as reply,
            ):
                yield ReplyHead(reply.status, reply.headers.get(CODE_KEY), reply.content.iter_any())
        except aiohttp.ClientError as error:
            of_tls = getattr(error, "certificate_error", None)  # aiohttp's own sentence repeats the address
            raise Unreachable(self._address.url, reason_of(of_tls or error)) from error
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {path}: no reply within {timeout_s:g} s") from error
