"""The routes of an instance's port: the tables say which, the methods how each shape of them is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from teimgr.docs_page import HEADERS, page
from teimgr.errors import Code, TeimgrError, Unavailable
from teimgr.requests import unless_hung_up
from teimgr.wire.error_bodies import TEI, TEI_OPENAI, failure
from teimgr.wire.http_frames import HttpRequest
from teimgr.wire.status import STATUS
from teimgr.worker.desk import Desk, masked
from teimgr.worker.exchange import Exchange, Terms
from teimgr.worker.instance_port.exchange import read, response
from teimgr.worker.tei.answers import to_json
from teimgr.worker.tei.fields import BodyRefused
from teimgr.worker.tei.openapi import document
from teimgr.worker.tei.routes import OPENAI, Route, facts, json_reply, refused

Endpoint = Callable[[Request], Awaitable[Response]]

_HEALTH_TIMEOUT_S = 5.0
_TEXT = "text/plain; charset=utf-8"


class Routes:
    """What each route answers; `post` makes an endpoint of one of TEI's."""

    def __init__(self, desk: Desk, exchange: Exchange) -> None:
        self._desk = desk
        self._exchange = exchange

    async def health(self, request: Request) -> Response:
        """200 with an empty body once the known text went through the device."""
        try:
            await asyncio.to_thread(self._desk.engine.prove, _HEALTH_TIMEOUT_S)
        except Unavailable:
            return response(failure(TEI, Unavailable("unhealthy")))
        return Response()

    async def info(self, request: Request) -> Response:
        """The model and the limits."""
        return response(await facts(self._exchange, HttpRequest(TEI, "GET", "/info"), Terms()))

    async def metrics(self, request: Request) -> Response:
        """The `te_*` metrics."""
        return Response(self._desk.metrics.render(), media_type=_TEXT)

    async def openapi(self, request: Request) -> Response:
        """The OpenAPI document."""
        return response(json_reply(to_json(document())))

    async def docs(self, request: Request) -> Response:
        """The same for readers."""
        return HTMLResponse(page(document(), "/api-doc/openapi.json"), headers=HEADERS)

    def post(self, path: str, route: Route) -> Endpoint:
        """`route`, and for each way in which it may fail the response that says so."""
        dialect = TEI_OPENAI if path in OPENAI else TEI

        async def endpoint(request: Request) -> Response:
            try:
                asked = await read(request, self._desk.spec.payload_limit_bytes)
                return response(await unless_hung_up(route(self._exchange, asked, Terms()), request.receive))
            except TeimgrError as error:
                return response(failure(dialect, error))
            except BodyRefused as error:
                return response(refused(error))
            except ClientDisconnect:  # it still sent its body; uvicorn throws the answer away
                return Response(status_code=STATUS[Code.CANCELLED].http)
            except Exception as error:
                return response(failure(dialect, masked(error)))

        return endpoint
