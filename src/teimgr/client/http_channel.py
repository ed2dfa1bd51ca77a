"""HTTP connection to a daemon's REST port: JSON calls, server-sent events, failures as `TeimgrError`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from yarl import URL

from teimgr.client.http_replies import EventParser, JsonObject, Query, ServerSentEvent, error_from_reply, json_of
from teimgr.client.server_address import ServerAddress, Tls
from teimgr.errors import DeadlineExceeded, Internal, Unreachable, ValidationError

_CONNECT_S = 10.0


class HttpChannel:
    """Opened and closed by its owner, inside a running event loop."""

    def __init__(self, address: ServerAddress, tls: Tls, api_key: str | None = None) -> None:
        self._address = address
        self._tls = tls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the session; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        context = self._tls.ssl_context() if self._address.secure else True
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        timeout_s: float | None,
    ) -> Any:
        """The parsed JSON of the reply, None for an empty one. `path` is already percent-encoded.

        Raises:
            ValidationError: `body` cannot be encoded as JSON.
            TeimgrError: the daemon's error reply.
            Unreachable: no connection, or TLS failed.
            DeadlineExceeded: no complete reply within `timeout_s`; None waits without a limit.
        """
        status, reply = await self._exchange(method, path, body, query, timeout_s)
        return json_of(path, status, reply)

    async def text(self, path: str, *, timeout_s: float) -> str:
        """The text of the reply to a GET.

        Raises:
            TeimgrError: as `call`.
        """
        status, reply = await self._exchange("GET", path, None, None, timeout_s)
        if status >= 400:
            raise error_from_reply(status, reply)
        return reply.decode()

    async def succeeds(self, path: str, *, timeout_s: float) -> bool:
        """Whether GET answers 200 rather than 503.

        Raises:
            TeimgrError: any other answer.
        """
        status, reply = await self._exchange("GET", path, None, None, timeout_s)
        if status not in (200, 503):
            raise error_from_reply(status, reply)
        return status == 200

    async def events(
        self,
        method: str,
        path: str,
        *,
        body: JsonObject | None = None,
        query: Query | None = None,
        last_event_id: str | None = None,
    ) -> AsyncGenerator[ServerSentEvent]:
        """The server-sent events of a reply until the server ends it; comments (keep-alives) are skipped.

        Raises:
            ValidationError: `body` cannot be encoded as JSON.
            TeimgrError: the daemon's error reply.
            Unreachable: no connection, or it was lost.
        """
        headers = {"Accept": "text/event-stream"}
        if last_event_id is not None:
            headers["Last-Event-ID"] = last_event_id
        async with self._request(method, path, body, query, headers) as reply:
            if reply.status >= 400:
                raise error_from_reply(reply.status, await reply.read())
            parser = EventParser()
            async for chunk in reply.content.iter_any():
                for event in parser.feed(chunk):
                    yield event

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def _exchange(
        self, method: str, path: str, body: JsonObject | None, query: Query | None, timeout_s: float | None
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(timeout_s), self._request(method, path, body, query) as reply:
                return reply.status, await reply.read()
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
        url = URL(self._address.url + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=payload, params=query, headers=headers, server_hostname=self._tls.server_name
            ) as reply:
                yield reply
        except aiohttp.ClientError as error:
            raise Unreachable(self._address.url, str(error)) from error
