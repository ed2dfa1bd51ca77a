"""The way in for inference: each request to one of its routes, of any size and caller, over HTTP/1.1 and HTTP/2.

It does not pass the application: the protocol of the connection asks `Inference` about the head of each request, and
has it answer its own. The application has control routes, files and the page.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from urllib.parse import unquote

import httptools

from teimgr.api.gateway.gateway import Gateway
from teimgr.api.gateway.routes import InferenceCall, paths
from teimgr.api.rest.access import INFERENCE, Access, MatchedRoute
from teimgr.api.rest.middleware import Observe, TrustedProxies, has_too_many, path_fault, refused
from teimgr.errors import Code, Forbidden, Unauthenticated, ValidationError
from teimgr.http.connection_gate import sender_of
from teimgr.http.direct import Answer, DirectReply, DirectRequest
from teimgr.http.turns import TURNS_OF
from teimgr.observability.request_context import CURRENT, REQUEST_ID
from teimgr.wire.status import STATUS

_BY_TEMPLATE = {path.path: path for path in paths()}
_POST = "POST"
# Of a response to a web page, as those of the application.
_CORS = {"access-control-allow-origin": "*", "access-control-expose-headers": "*", "vary": "Origin"}


class Inference:
    """Answers the requests of inference; `access` decides who may make them, and `gateway` has a worker answer them."""

    def __init__(self, gateway: Gateway, observe: Observe, access: Access, proxies: TrustedProxies) -> None:
        self._gateway = gateway
        self._observe = observe
        self._access = access
        self._proxies = proxies
        route = MatchedRoute(INFERENCE)
        self._known: dict[bytes, Answer] = {
            path.path.encode(): partial(self._answer, InferenceCall(path), route)
            for path in paths()
            if "{" not in path.path
        }

    def __call__(self, method: bytes, target: bytes) -> Answer | None:
        if method != b"POST":
            return None
        return self._known.get(target) or self._parsed(target)

    def _parsed(self, target: bytes) -> Answer | None:
        """Like `__call__`, for a target that names an instance or a model, or has a query; None for an invalid one."""
        try:
            url = httptools.parse_url(target)
        except httptools.HttpParserError:
            return None
        raw, query = url.path or b"", url.query or b""
        if path_fault(raw) is not None or has_too_many(query):
            return None
        route = self._access.route(_POST, unquote(raw.decode("ascii")))
        path = _BY_TEMPLATE.get(route.template or "")
        if path is None:
            return None
        return partial(self._answer, InferenceCall(path, route.named, query.decode("latin-1")), route)

    async def _answer(self, call: InferenceCall, route: MatchedRoute, request: DirectRequest) -> DirectReply:
        status, began = 500, time.perf_counter()
        context = self._observe.begin(_POST, request.headers)
        CURRENT.set(context)
        try:
            try:
                if self._proxies.concerns(request.headers):
                    await self._proxies.read(request.scope)
                caller = self._access.check(request.scope, request.headers, route)
            except (Unauthenticated, Forbidden, ValidationError) as error:
                reply = refused(call.path.dialect, error)
            else:
                context.belongs_to(caller.tenant)
                TURNS_OF.set(caller.name or sender_of(request.scope))
                reply = await self._gateway.answer(call, request, caller)
            status = reply.status
        except asyncio.CancelledError:
            status = STATUS[Code.CANCELLED].http
            raise
        finally:
            self._observe.end(context, _POST, call.path.path, status, began)
        headers = {**reply.headers, REQUEST_ID: context.request_id}
        if b"origin" in request.headers:
            headers |= _CORS
        return DirectReply(status, headers, reply.body, self._gateway.reply_budget)
