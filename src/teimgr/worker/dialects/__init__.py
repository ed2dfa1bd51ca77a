"""HTTP dialects: a module each, with its request classes, handlers and table of routes.

`ROUTES` maps every dialect to its table; `handle_http` answers a frame of `Method.HTTP` from it. A new dialect needs a
module here, a line in `ROUTES`, its name and error body in `wire/error_bodies.py`, its paths in `gateway/gateway.py`,
and its requests in `openapi.py`.
"""

from __future__ import annotations

from collections.abc import Mapping

from teimgr.errors import Code, InvalidInput, TeimgrError, error_from_code
from teimgr.wire.error_bodies import COHERE, INFINITY, JINA, OPENAI, SIE, TEI, TEI_OPENAI, VLLM
from teimgr.wire.http_frames import HttpRequest, pack_reply, read_request
from teimgr.worker.calls import CallReply, MethodCall
from teimgr.worker.dialects import cohere, infinity, openai, sie, tei, vllm
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.http_inference import BadRequest, HttpInference, RouteTable

ROUTES: Mapping[str, RouteTable] = {
    TEI: tei.ROUTES,
    TEI_OPENAI: tei.ROUTES,
    OPENAI: openai.ROUTES,
    COHERE: cohere.ROUTES,
    JINA: cohere.JINA_ROUTES,
    VLLM: vllm.ROUTES,
    INFINITY: infinity.ROUTES,
    SIE: sie.ROUTES,
}


def handle_http(dispatcher: Dispatcher, call: MethodCall) -> None:
    """Answer a forwarded HTTP request with the reply of its dialect's route.

    A TeimgrError goes back as an error, whose body the gateway writes (`wire/error_bodies.py`).
    """
    try:
        request = read_request(call.payload)
    except ValueError as error:
        raise InvalidInput(f"malformed HTTP frame: {error}") from error
    dispatcher.run(call, _answer(HttpInference(dispatcher, call.lane, call.deadline), call, request))


async def _answer(inference: HttpInference, call: MethodCall, request: HttpRequest) -> None:
    try:
        handle = ROUTES.get(request.dialect, {}).get((request.method, request.path))
        if handle is None:
            raise error_from_code(Code.UNIMPLEMENTED, f"{request.method} {request.path} is no route of a worker")
        try:
            reply = await handle(inference, request)
        except BadRequest as error:
            reply = error.reply(request.dialect)
        call.reply(CallReply(pack_reply(reply)))
    except TeimgrError as error:
        call.fail(error)
    except Exception as error:
        call.fail(masked(error))
