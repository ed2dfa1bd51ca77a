"""What stands before the routes: cross-origin answers on every response, and the instance's key."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PUBLIC = {"/health", "/ping", "/metrics", "/docs"}
_PUBLIC_FOLDERS = ("/docs/", "/api-doc/")
_VARY = "origin, access-control-request-method, access-control-request-headers"


class Cors:
    """Tells browsers which pages may read the answers: those of `origins`, or of all where there is none or a `*`.

    GET and POST, and `content-type` as the only header, so that a page cannot send a key. A preflight is answered
    here, before any key is asked for.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._any = not origins or "*" in origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        allowed = self._allowed(Headers(scope=scope).get("origin"))

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(allowed)
            await send(message)

        if scope["method"] == "OPTIONS":
            methods = {"access-control-allow-methods": "GET,POST", "access-control-allow-headers": "content-type"}
            await Response(headers=methods)(scope, receive, send_with_origin)
        else:
            await self._app(scope, receive, send_with_origin)

    def _allowed(self, origin: str | None) -> dict[str, str]:
        if self._any:
            return {"vary": _VARY, "access-control-allow-origin": "*"}
        if origin in self._origins:
            assert origin is not None
            return {"vary": _VARY, "access-control-allow-origin": origin}
        return {"vary": _VARY}


class ApiKey:
    """Lets a request through that says `Authorization: Bearer` and the key; 401 without a body otherwise.

    What tells of the server and not of its model is public.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or _is_public(scope) or self._is_right(scope):
            await self._app(scope, receive, send)
        else:
            await Response(status_code=401)(scope, receive, send)

    def _is_right(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        return hmac.compare_digest(given, self._expected)  # in a time that tells nothing of the key


def _is_public(scope: Scope) -> bool:
    path = scope["path"]
    if path == "/":
        return scope["method"] in ("GET", "HEAD")
    return path in _PUBLIC or path.startswith(_PUBLIC_FOLDERS)
