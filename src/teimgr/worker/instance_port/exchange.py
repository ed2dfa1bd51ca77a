"""A request of Starlette as one without a transport, and the reply as one of Starlette's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from teimgr.requests import read_limited
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
