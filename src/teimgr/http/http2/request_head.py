"""The head of a request on an HTTP/2 stream, HTTP or gRPC: its validation (RFC 9113, section 8.3), and ASGI's form of
it; validation of trailers.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools

from teimgr.http.bodies import SINGLE_HEADERS, is_host
from teimgr.http.http2.headers import Headers

_REQUIRED = (b":method", b":scheme", b":path")
# Kinds of fields.
_PLAIN, _PSEUDO, _SINGLE, _COOKIE = _KINDS = ("plain", "pseudo-header", "not repeated", "cookie")
_OF_CONNECTIONS = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9a-z]+")
_VALUE = re.compile(rb"(?:[^\x00-\x20\x7f](?:[^\x00-\x08\x0a-\x1f\x7f]*[^\x00-\x20\x7f])?)?")
_METHOD = re.compile(rb"[A-Z][A-Z-]{0,31}")
_TARGET = re.compile(rb"/[\x21-\x7e]*|\*")
_LENGTH = re.compile(rb"[0-9]{1,18}")
_SHOWN_BYTES = 64
# Fields that are checked once: most calls repeat theirs. One has at most 16 KiB.
_REMEMBERED_FIELDS = 256


class InvalidHead(Exception):
    """The head of a request is malformed; the message has the field."""


class RequestHead(NamedTuple):
    """A request's head; `fields` begin with the Host header and have no pseudo-headers."""

    method: bytes
    target: bytes
    fields: Headers
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
            raise InvalidHead(f":path is not a path: {_shown(self.target)}") from None
        raw = url.path or b""
        path = raw.decode("ascii")
        return {"path": unquote(path) if "%" in path else path, "raw_path": raw, "query_string": url.query or b""}


def read_head(headers: Headers) -> RequestHead:
    """The head of a request from the headers of its stream. Several Cookie fields become one.

    Raises:
        InvalidHead: it is malformed.
    """
    pseudo: dict[bytes, bytes] = {}
    fields: list[tuple[bytes, bytes]] = []
    singles: dict[bytes, bytes] = {}
    cookies: list[bytes] = []
    for field in headers:
        kind = _kind(field)
        if kind is _PLAIN:
            fields.append(field)
        elif kind is _PSEUDO:
            if fields or cookies or field[0] in pseudo:
                raise InvalidHead(f"{_shown(field[0])} is repeated or behind other headers")
            pseudo[field[0]] = field[1]
        elif kind is _COOKIE:
            cookies.append(field[1])
        elif kind is _SINGLE:
            if field[0] in singles:
                raise InvalidHead(f"{_shown(field[0])} is repeated")
            singles[field[0]] = field[1]
            fields.append(field)
        else:
            raise InvalidHead(kind)
    if cookies:
        fields.append((b"cookie", b"; ".join(cookies)))
    if missing := [name.decode() for name in _REQUIRED if name not in pseudo]:
        raise InvalidHead(f"there is no {missing[0]}")
    length = singles.get(b"content-length")
    fields = _with_host(pseudo.get(b":authority"), singles.get(b"host"), fields)
    return RequestHead(pseudo[b":method"], pseudo[b":path"], tuple(fields), None if length is None else int(length))


def check_trailers(trailers: Headers) -> None:
    """Raises InvalidHead: a field is malformed, or a pseudo-header (RFC 9113, section 8.1)."""
    for field in trailers:
        kind = _kind(field)
        if kind is _PSEUDO:
            raise InvalidHead(f"{_shown(field[0])} in the trailers")
        if kind not in _KINDS:
            raise InvalidHead(kind)


@lru_cache(_REMEMBERED_FIELDS)
def _kind(field: tuple[bytes, bytes]) -> str:
    """The kind of a field, one of `_KINDS`; of one that is malformed what is wrong with it."""
    name, value = field
    if _VALUE.fullmatch(value) is None:
        return f"the value of {_shown(name)} has a character that no header may have"
    if name.startswith(b":"):
        return _problem_of_pseudo(name, value) or _PSEUDO
    if _NAME.fullmatch(name) is None:
        return f"{_shown(name)} is not a header's name; names are in lower case"
    if name in _OF_CONNECTIONS or (name == b"te" and value.lower() != b"trailers"):
        return f"{_shown(name)} belongs to HTTP/1.1 connections; HTTP/2 has no such header"
    if name == b"content-length" and _LENGTH.fullmatch(value) is None:
        return "content-length is not a number of bytes"
    if name == b"cookie":
        return _COOKIE
    if name == b"host" and not is_host(value):
        return f"host is not a host: {_shown(value)}"
    return _SINGLE if name in SINGLE_HEADERS else _PLAIN


def _problem_of_pseudo(name: bytes, value: bytes) -> str:
    match name:
        case b":method" if _METHOD.fullmatch(value) is None or value == b"CONNECT":
            return f":method is not served: {_shown(value)}"
        case b":scheme" if value not in (b"http", b"https"):
            return ":scheme is neither http nor https"
        case b":path" if _TARGET.fullmatch(value) is None:
            return f":path is not a path: {_shown(value)}"
        case b":authority" if not is_host(value):
            return f":authority is not a host: {_shown(value)}"
        case b":method" | b":scheme" | b":path" | b":authority":
            return ""
    return f"{_shown(name)} is not a pseudo-header of requests"


def _with_host(
    authority: bytes | None, host: bytes | None, fields: list[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    if authority is None and host is None:
        raise InvalidHead("there is neither :authority nor host")
    if authority is None:
        return fields
    if host is not None and host.lower() != authority.lower():
        raise InvalidHead(":authority and host differ")
    return fields if host is not None else [(b"host", authority), *fields]


def _shown(value: bytes) -> str:
    return ascii(value[:_SHOWN_BYTES].decode("latin-1"))
