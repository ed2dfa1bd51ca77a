"""A request of Starlette as one without a transport, and a client that may hang up while it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from teimgr.errors import Cancelled
from teimgr.listening import read_limited
from teimgr.wire.error_bodies import TEI
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.tei.fields import BodyRefused, expect_json


async def read(request: Request, limit_bytes: int) -> HttpRequest:
    """The request with its whole body.

    Raises:
        BodyRefused: it is not said to be JSON, or is over the limit (413).
        ClientDisconnect: the client went away while it sent.
    """
    content_type = request.headers.get("content-type", "")
    expect_json(content_type)
    body = await read_limited(request.stream(), limit_bytes)
    if body is None:
        raise BodyRefused(413, "Failed to buffer the request body: length limit exceeded")
    headers = {"content-type": content_type}
    return HttpRequest(TEI, request.method, request.url.path, headers=headers, body=body)


def response(reply: HttpReply) -> Response:
    """A reply as Starlette sends it."""
    return Response(reply.body, reply.status, dict(reply.headers))


async def unless_hung_up(answering: Coroutine[Any, Any, HttpReply], request: Request) -> HttpReply:
    """The reply, unless the client of `request` hangs up first: then what it asked for is given up.

    Raises:
        Cancelled: nobody will read the answer.
        TeimgrError: as `answering` does.
    """
    answered = asyncio.ensure_future(answering)
    hung_up = asyncio.ensure_future(_hung_up(request))
    either: set[asyncio.Future[Any]] = {answered, hung_up}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise Cancelled("the client hung up")
    finally:
        for one in either:
            one.cancel()


async def _hung_up(request: Request) -> None:
    """Return when the client of a request whose body was read is gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
