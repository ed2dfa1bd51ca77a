"""The origin of what comes in over HTTP: from the client's headers, for the logs; the request id is echoed."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from teimgr.origin import REQUEST_ID, Origin, working_for


class Origins:
    """Serve each request as one of its origin."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origin = Origin.of({key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]})

        async def echoing(message: Message) -> None:
            if message["type"] == "http.response.start":
                echoed = (REQUEST_ID.encode(), origin.request_id.encode())
                message = {**message, "headers": [*message.get("headers", ()), echoed]}
            await send(message)

        with working_for(origin):
            await self._app(scope, receive, echoing)
