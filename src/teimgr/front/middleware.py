"""What happens around every REST request, as plain ASGI."""

from __future__ import annotations

import time
from urllib.parse import unquote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.errors import InvalidInstanceName
from teimgr.front.answers import VERBS, error_response
from teimgr.metrics import Metrics


class Observe:
    """Count each request by route template and status, with its duration."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and note what came of it."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status, began = 500, time.perf_counter()

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            method = scope["method"] if scope["method"] in (*VERBS, "OPTIONS") else "other"
            # A template, or a label of its own: a caller must not be able to make new series.
            route = getattr(scope.get("route"), "path", "unmatched")
            self._metrics.rest_request(method, route, status, time.perf_counter() - began)


class HeadAsGet:
    """Route HEAD as GET; the server keeps the body back, for it knows the true method."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on as GET."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)
        as_get = dict(scope, method="GET")
        try:
            await self._app(as_get, receive, send)
        finally:
            scope["route"] = as_get.get("route")


class WholeNames:
    """Refuse an encoded path separator in an instance's name.

    Routing sees the decoded path, where `a%2Flogs` would be the log of `a`.
    """

    PREFIX = b"/instances/"

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        raw: bytes = scope.get("raw_path") or b""
        lowered = raw.lower()
        if not raw.startswith(self.PREFIX) or not (b"%2f" in lowered or b"%5c" in lowered):
            return await self._app(scope, receive, send)
        name = unquote(raw.removeprefix(self.PREFIX).partition(b"/")[0].decode("ascii", "replace"))
        refused = error_response(InvalidInstanceName(name, "it cannot contain path separators"))
        return await refused(scope, receive, send)
