"""A bound on the parameters of a query: the framework parses all of them on the event loop, for every route."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from teimgr.api.rest.error_answers import error_response
from teimgr.errors import ValidationError

# Each takes some 5 µs, and a request's target has room for 30,000. No route has a use for this many.
MAX_PARAMETERS = 1000


def has_too_many(query: bytes) -> bool:
    """Whether a query has more than `MAX_PARAMETERS` parameters."""
    return query.count(b"&") >= MAX_PARAMETERS


class LimitQuery:
    """Refuses requests whose query has more than `MAX_PARAMETERS` parameters, before anything parses it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and has_too_many(scope["query_string"]):
            error = ValidationError(f"Invalid URL: its query has more than {MAX_PARAMETERS} parameters")
            return await error_response(error)(scope, receive, send)
        return await self._app(scope, receive, send)
