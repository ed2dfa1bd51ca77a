"""HTTP connection to a daemon's REST port: JSON calls, server-sent events, failures as `TeimgrError`."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.client_exceptions import UnixClientConnectorError
from yarl import URL

from teimgr.client.connection_causes import reason_of
from teimgr.client.http_replies import (
    EventParser,
    JsonObject,
    Query,
    Reply,
    RestChannel,
    ServerSentEvent,
    error_from_reply,
)
from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import DeadlineExceeded, Internal, Unreachable, ValidationError
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import CODE_KEY

_CONNECT_S = 10.0


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

    def __init__(
        self, address: ServerAddress, tls: Tls, api_key: str | None = None, expect_fingerprint: str | None = None
    ) -> None:
        self._address = address
        self._tls = tls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        if expect_fingerprint is not None:
            self._headers[EXPECT_KEY] = expect_fingerprint
        self._session: aiohttp.ClientSession | None = None

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
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def events(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        last_event_id: str | None = None,
    ) -> AsyncGenerator[ServerSentEvent]:
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        async with self._request(method, path, body, query, headers) as reply:
            if reply.status >= 400:
                raise error_from_reply(reply.status, await reply.read(), reply.headers.get(CODE_KEY))
            parser = EventParser()
            async for chunk in reply.content.iter_any():
                for event in parser.feed(chunk):
                    yield event

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _exchange(
        self, method: str, path: str, body: JsonObject | None, query: Query | None, timeout_s: float | None
    ) -> Reply:
        try:
            async with asyncio.timeout(timeout_s), self._request(method, path, body, query) as reply:
                return Reply(reply.status, await reply.read(), reply.headers.get(CODE_KEY))
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {path}: no reply within {timeout_s:g} s") from error

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        body: JsonObject | None,
        query: Query | None,
        headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._session is None:
            raise Internal("the client is not open: use it in a `with` block")
        try:
            payload = None if body is None else aiohttp.JsonPayload(body)
        except (TypeError, ValueError) as error:
            raise ValidationError(str(error)) from error
        url = URL(self._address.http_base + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=payload, params=query, headers=headers, server_hostname=self._tls.server_name
            ) as reply:
                yield reply
        except aiohttp.ClientError as error:
            of_tls = getattr(error, "certificate_error", None)  # aiohttp's own sentence repeats the address
            raise Unreachable(self._address.url, reason_of(of_tls or error)) from error
