"""Inference on port 9000 without ASGI: what the middleware does for a request that came whole, in one step."""

from __future__ import annotations

import time
from functools import partial

from teimgr.auth.policy import ANONYMOUS, Caller, PolicyInForce, authenticate_request
from teimgr.errors import Forbidden, Unauthenticated
from teimgr.gateway.gateway import Gateway
from teimgr.gateway.routes import DialectPath, paths
from teimgr.http_direct import Answer, DirectReply, DirectRequest
from teimgr.observability.request_context import CURRENT, REQUEST_ID
from teimgr.rest.middleware import INFERENCE, Observe

# The routes without parameters, by the target of a request.
_PATHS = {path.path.encode(): path for path in paths() if path.method == "POST" and "{" not in path.path}


class DirectInference:
    """Answers requests to a route of inference that no web page sent, of callers who have its right.

    All other requests go on to the application, which alone refuses: a check that were missing here could neither
    refuse a request wrongly nor grant a right.
    """

    def __init__(self, gateway: Gateway, observe: Observe, policy: PolicyInForce) -> None:
        self._gateway = gateway
        self._observe = observe
        self._policy = policy

    def __call__(self, request: DirectRequest) -> Answer | None:
        path, policy = _PATHS.get(request.target), self._policy.now
        if path is None or request.is_of_page:
            return None
        caller = ANONYMOUS
        if not policy.is_open:
            try:
                caller = authenticate_request(policy, request.scope)
                caller.require(INFERENCE.rights)
            except (Unauthenticated, Forbidden):
                return None
        return partial(self._answer, path, request, caller)

    async def _answer(self, path: DialectPath, request: DirectRequest, caller: Caller) -> DirectReply:
        status, began = 500, time.perf_counter()
        context = self._observe.begin(path.method, request.headers)
        CURRENT.set(context)
        try:
            reply = await self._gateway.answer(path, request.headers, request.body, caller)
            status = reply.status
        finally:
            self._observe.end(context, path.method, path.path, status, began)
        return DirectReply(status, {**reply.headers, REQUEST_ID: context.request_id}, reply.body)
