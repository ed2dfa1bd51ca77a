"""The head of an HTTP request on an HTTP/2 stream: its validation (RFC 9113, section 8.3), and ASGI's form of it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools

from teimgr.http2.header_decoder import Headers

_PSEUDO = (b":method", b":scheme", b":authority", b":path")
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?:[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)?")
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,31}")
_TARGET = re.compile(rb"/[\x21-\x7e]*|\*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_SHOWN_BYTES = 64


class InvalidHead(Exception):
    """The head of a request is malformed; the message has the field."""


class RequestHead(NamedTuple):
    """A request's head; `fields` begin with the Host header and have no pseudo-headers."""

    method: bytes
    target: bytes
    fields: list[tuple[bytes, bytes]]
    length: int | None
    """The value of Content-Length, in bytes."""

    @property
    def expects_continue(self) -> bool:
        return any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.fields)

    def location(self) -> dict[str, Any]:
        """The fields of an ASGI scope that are parsed from the target, as uvicorn parses them.

        Raises:
            InvalidHead: the target is no URL.
        """
        try:
            url = httptools.parse_url(self.target)
        except httptools.HttpParserError:
            raise InvalidHead(f":path is no path: {_shown(self.target)}") from None
        raw = url.path or b""
        path = raw.decode("ascii")
        return {
            "path": unquote(path) if "%" in path else path,
            "raw_path": raw,
            "query_string": url.query or b"",
        }


def read_head(headers: Headers) -> RequestHead:
    """The head of a request from the headers of its stream. Several Cookie fields become one.

    Raises:
        InvalidHead: it is malformed.
    """
    pseudo: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    singles: dict[bytes, bytes] = {}  # Host and Content-Length
    cookies: list[bytes] = []
    for name, value in headers:
        if _VALUE.fullmatch(value) is None:
            raise InvalidHead(f"the value of {_shown(name)} has a character that no header may have")
        if name.startswith(b":"):
            if fields or cookies or name not in _PSEUDO or name in pseudo:
                raise InvalidHead(f"{_shown(name)} is unknown, repeated or behind other headers")
            pseudo[name] = value
            continue
        if _NAME.fullmatch(name) is None:
            raise InvalidHead(f"{_shown(name)} is no name of a header; names are in lower case")
        if name in _OF_CONNECTIONS or (name == b"te" and value.lower() != b"trailers"):
            raise InvalidHead(f"{_shown(name)} is a header of connections, which HTTP/2 has not")
        if name in (b"host", b"content-length"):
            if name in singles:
                raise InvalidHead(f"{_shown(name)} is repeated")
            singles[name] = value
        if name == b"cookie":
            cookies.append(value)
        else:
            fields.append((name, value))
    if cookies:
        fields.append((b"cookie", b"; ".join(cookies)))
    method, target = pseudo.get(b":method", b""), pseudo.get(b":path", b"")
    if _METHOD.fullmatch(method) is None or method == b"CONNECT":
        raise InvalidHead(f":method is not served: {_shown(method)}")
    if pseudo.get(b":scheme") not in (b"http", b"https"):
        raise InvalidHead(":scheme is neither http nor https")
    if _TARGET.fullmatch(target) is None:
        raise InvalidHead(f":path is no path: {_shown(target)}")
    length = singles.get(b"content-length")
    if length is not None and _LENGTH.fullmatch(length) is None:
        raise InvalidHead("content-length is no number of bytes")
    fields = _with_host(pseudo.get(b":authority"), singles.get(b"host"), fields)
    return RequestHead(method, target, fields, None if length is None else int(length))


def _with_host(
    authority: bytes | None, host: bytes | None, fields: list[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    if authority is None and host is None:
        raise InvalidHead("there is neither :authority nor host")
    if authority is None:
        return fields
    if b"@" in authority or (host is not None and host.lower() != authority.lower()):
        raise InvalidHead(":authority has a user's name, or is not what host has")
    return fields if host is not None else [(b"host", authority), *fields]


def _shown(value: bytes) -> str:
    return ascii(value[:_SHOWN_BYTES].decode("latin-1"))
