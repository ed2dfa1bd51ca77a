"""HTTP requests and responses between gateway and worker, as payloads of `Method.HTTP` frames.

Both are a head, which is a little-endian length of 4 bytes and that many bytes of a JSON object, and the raw body:

    request   {"dialect", "method", "path", "query", "headers"}   path and query are decoded, without the instance
    response  {"status", "headers"}

Names of headers are lower case.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import orjson

_LENGTH = struct.Struct("<I")
MAX_HEAD_BYTES = 64 * 1024

Buffer = bytes | bytearray | memoryview


class HeadTooLong(ValueError):
    """The head is longer than `MAX_HEAD_BYTES`."""


class HttpRequest(NamedTuple):
    """A client's request in `dialect`."""

    dialect: str
    method: str
    path: str
    query: str = ""
    headers: Mapping[str, str] = {}
    body: Buffer = b""


class HttpReply(NamedTuple):
    """The response; the content type is among the headers."""

    status: int
    headers: Mapping[str, str]
    body: Buffer


def request_head(request: HttpRequest) -> bytes:
    """The payload up to the body; raises HeadTooLong."""
    return _head({name: value for name, value in request._asdict().items() if name != "body"})


def read_request(payload: Buffer) -> HttpRequest:
    """Parse a request; the body is a view of `payload`; raises ValueError: the payload is malformed."""
    head, body = _split(payload)
    try:
        dialect, method, path = (_text(head[name]) for name in ("dialect", "method", "path"))
        return HttpRequest(dialect, method, path, _text(head["query"]), _headers(head), body)
    except KeyError as error:
        raise ValueError(f"the head of an HTTP request lacks {error}") from error


def pack_reply(reply: HttpReply) -> bytes:
    """A reply as a payload; raises HeadTooLong."""
    return b"".join((_head({"status": reply.status, "headers": reply.headers}), reply.body))


def read_reply(payload: Buffer) -> HttpReply:
    """Parse a reply; the body is a view of `payload`; raises ValueError: the payload is malformed."""
    head, body = _split(payload)
    status = head.get("status")
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise ValueError("the head of an HTTP reply has no status")
    return HttpReply(status, _headers(head), body)


def _head(values: Mapping[str, object]) -> bytes:
    text = orjson.dumps(values)
    if len(text) > MAX_HEAD_BYTES:
        raise HeadTooLong(f"a head of {len(text)} bytes is over the limit of {MAX_HEAD_BYTES}")
    return _LENGTH.pack(len(text)) + text


def _split(payload: Buffer) -> tuple[dict[str, object], memoryview]:
    view = memoryview(payload)
    if len(view) < _LENGTH.size:
        raise ValueError("no room for the length of a head")
    (length,) = _LENGTH.unpack_from(view)
    end = _LENGTH.size + length
    if length > MAX_HEAD_BYTES or end > len(view):
        raise ValueError(f"a head of {length} bytes in a payload of {len(view)}")
    head = orjson.loads(view[_LENGTH.size : end])
    if not isinstance(head, dict):
        raise ValueError("the head is no JSON object")  # noqa: TRY004
    return head, view[end:]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text expected in a head, not {value!r}")  # noqa: TRY004  a payload is wrong, not a call
    return value


def _headers(head: Mapping[str, object]) -> dict[str, str]:
    found = head.get("headers")
    if not isinstance(found, dict):
        raise ValueError("headers expected in a head")  # noqa: TRY004
    return {_text(name): _text(value) for name, value in found.items()}
