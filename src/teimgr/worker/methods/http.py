"""What a worker does with a frame of `Method.HTTP`: finds the route of its dialect, and lets it answer."""

from __future__ import annotations

from collections.abc import Mapping

from teimgr.errors import Code, InvalidInput, TeimgrError, error_from_code
from teimgr.wire import error_bodies
from teimgr.wire.error_bodies import refusal
from teimgr.wire.frames import Method
from teimgr.wire.http_frames import HttpReply, HttpRequest, pack_reply, read_request
from teimgr.worker.calls import CallReply, Handler, MethodCall
from teimgr.worker.dialects import cohere, infinity, openai, sie, tei, vllm
from teimgr.worker.dialects.tei import refused
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http.bodies import BodyRefused
from teimgr.worker.http.common import Refused
from teimgr.worker.http.inference import CallOptions, HttpHandler, HttpInference

_TEI = {("POST", path): route for path, route in tei.POST.items()} | {
    ("GET", path): route for path, route in tei.GET.items()
}

ROUTES: Mapping[str, Mapping[tuple[str, str], HttpHandler]] = {
    error_bodies.TEI: _TEI,
    error_bodies.TEI_OPENAI: _TEI,
    error_bodies.OPENAI: openai.ROUTES,
    error_bodies.COHERE: cohere.ROUTES,
    error_bodies.JINA: cohere.JINA_ROUTES,
    error_bodies.VLLM: vllm.ROUTES,
    error_bodies.INFINITY: infinity.ROUTES,
    error_bodies.SIE: sie.ROUTES,
}


class DialectCalls:
    """`handlers` is the table. A failure goes back as an error: whoever speaks HTTP says it in the dialect's words."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._exchange = HttpInference(dispatcher)
        self.handlers: dict[int, Handler] = {Method.HTTP: self._http}

    def _http(self, call: MethodCall) -> None:
        try:
            request = read_request(call.payload)
        except ValueError as error:
            raise InvalidInput(f"malformed HTTP frame: {error}") from error
        self._dispatcher.attend(call, self._answer(call, request))

    async def _answer(self, call: MethodCall, request: HttpRequest) -> None:
        try:
            reply = await self._route(request, CallOptions(call.lane, call.deadline))
            call.reply(CallReply(pack_reply(reply)))
        except TeimgrError as error:
            call.fail(error)
        except Exception as error:
            call.fail(masked(error))

    async def _route(self, request: HttpRequest, terms: CallOptions) -> HttpReply:
        route = ROUTES.get(request.dialect, {}).get((request.method, request.path))
        if route is None:
            raise error_from_code(Code.UNIMPLEMENTED, f"{request.method} {request.path} is no route of a worker")
        try:
            return await route(self._exchange, request, terms)
        except BodyRefused as error:
            return refused(error)
        except Refused as error:
            return refusal(request.dialect, error.status, error.message, error.param)
