"""The gate before all routes: who asks, and may he? Refusals are told in the words of what was asked."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from teimgr.access import PolicyInForce
from teimgr.errors import Forbidden, TeimgrError, Unauthenticated
from teimgr.front.answers import error_response
from teimgr.front.callers import CALLER, caller_of_request
from teimgr.front.rights import Rights, dialect_of
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class Gate:
    """Lets a request in whose caller the policy knows and who has the right that its route asks for."""

    def __init__(self, app: ASGIApp, policy: PolicyInForce, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._policy = policy
        self._rights = Rights(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its caller in the scope, or refuse it."""
        policy = self._policy.now
        if scope["type"] != "http" or policy.is_open:
            return await self._app(scope, receive, send)
        found = self._rights.of(scope["method"], scope["path"], policy)
        if not found.need.is_public:
            try:
                scope[CALLER] = caller = caller_of_request(policy, scope)
                found.check(caller)
            except (Unauthenticated, Forbidden) as error:
                return await _refused(error, found.template)(scope, receive, send)
        return await self._app(scope, receive, send)


def _refused(error: TeimgrError, template: str | None) -> Response:
    dialect = dialect_of(template)
    if dialect is None:
        response = error_response(error)
        if isinstance(error, Unauthenticated):
            response.headers.update(_CHALLENGE)
        return response
    if dialect in (TEI, TEI_OPENAI) and isinstance(error, Unauthenticated):
        return Response(status_code=401)  # TEI has no body for it
    reply = failure(dialect, error)
    return Response(bytes(reply.body), reply.status, dict(reply.headers))
