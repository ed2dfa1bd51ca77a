"""One HTTP connection pool to the daemon's REST side: JSON in and out, failures as `TeimgrError`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from teimgr.client.failures import from_http
from teimgr.client.tls import Endpoint, Tls
from teimgr.errors import DeadlineExceeded, Internal, Unavailable, ValidationError


class Rest:
    """Opened and closed by its owner, inside a running event loop."""

    def __init__(self, endpoint: Endpoint, tls: Tls, api_key: str | None = None) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        context = self._tls.ssl_context() if self._endpoint.secure else True
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context), headers=self._headers)

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, int] | None = None,
        timeout_s: float,
    ) -> Any:
        """The parsed JSON of the reply, None for an empty one. `path` needs no quoting.

        Raises:
            ValidationError: `body` has something in it that JSON has not.
            TeimgrError: what the daemon answered.
            Unavailable: nobody answers there, or TLS failed.
            DeadlineExceeded: no whole reply within `timeout_s`.
        """
        status, reply = await self._exchange(method, path, _json(body), query, timeout_s)
        if status >= 400:
            raise from_http(status, reply)
        return _parse(reply, path) if reply else None

    async def succeeds(self, path: str, *, timeout_s: float) -> bool:
        """Whether GET answers 200 rather than 503.

        Raises:
            TeimgrError: any other answer.
        """
        status, reply = await self._exchange("GET", path, None, None, timeout_s)
        if status not in (200, 503):
            raise from_http(status, reply)
        return status == 200

    async def _exchange(
        self,
        method: str,
        path: str,
        body: aiohttp.Payload | None,
        query: Mapping[str, int] | None,
        timeout_s: float,
    ) -> tuple[int, bytes]:
        if self._session is None:
            raise Internal("the client is not open: use it in a `with` block")
        url = self._endpoint.url + path
        try:
            async with asyncio.timeout(timeout_s):
                request = self._session.request(
                    method, url, data=body, params=query, server_hostname=self._tls.server_name
                )
                async with request as reply:
                    return reply.status, await reply.read()
        except TimeoutError as error:
            raise DeadlineExceeded(f"{method} {path}: no reply within {timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise Unavailable(f"{self._endpoint.url}: {error}") from error


def _json(body: Mapping[str, Any] | None) -> aiohttp.Payload | None:
    try:
        return None if body is None else aiohttp.JsonPayload(body)
    except (TypeError, ValueError) as error:
        raise ValidationError(str(error)) from error


def _parse(reply: bytes, path: str) -> Any:
    try:
        return orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise Internal(f"{path}: the reply is no JSON: {error}") from error
