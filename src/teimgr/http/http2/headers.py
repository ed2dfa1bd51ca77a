"""Headers of HTTP/2: header blocks in HPACK (RFC 7541), and the head of a request (RFC 9113, section 8.3).

The static table, Huffman decoding and the checks are those of the `hpack` library. The encoder uses no dynamic table,
so it needs no state and no search. Repeated blocks are cached.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

import httptools
from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

from teimgr.http.bodies import SINGLE_HEADERS, is_host

Headers = Sequence[tuple[bytes, bytes]]

MAX_HEADER_BYTES = 16_384
_STATIC: tuple[tuple[bytes, bytes], ...] = HeaderTable.STATIC_TABLE
_MAX_TABLE_BYTES = 4096
_FIELD_BYTES = 32  # overhead of a field (RFC 7541, 4.1)
# Limits of the cache: blocks, bytes per block, and fields per block, since one byte can encode a field.
_CACHED_BLOCKS = 32
_CACHED_BLOCK_BYTES = 1024
_CACHED_FIELDS = 64


class InvalidBlock(Exception):
    """A header block is malformed; the connection cannot continue without its table."""


class BlockTooLarge(InvalidBlock):
    """The headers of a block exceed `MAX_HEADER_BYTES`."""


class HeaderDecoder:
    """Decodes the header blocks of one connection in order.

    Blocks that do not change the table, which are most, are cached until the table changes.
    """

    def __init__(self) -> None:
        self._table: deque[tuple[bytes, bytes]] = deque()  # the newest first
        self._table_bytes = 0
        self._table_limit = _MAX_TABLE_BYTES
        self._changes = 0
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Return the fields of a block.

        Raises:
            BlockTooLarge: they exceed `MAX_HEADER_BYTES`, counted with 32 bytes more for each field.
            InvalidBlock: the block is malformed.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        before = self._changes
        try:
            headers = tuple(self._decode(block))
        except IndexError:
            raise InvalidBlock("header block truncated or with an invalid index") from None
        except HPACKError as error:
            raise InvalidBlock(str(error)) from error
        if before != self._changes:
            self._known.clear()
        elif len(block) <= _CACHED_BLOCK_BYTES and len(headers) <= _CACHED_FIELDS:
            if len(self._known) == _CACHED_BLOCKS:
                del self._known[next(iter(self._known))]
            self._known[block] = headers
        return headers

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Decode a block. Raises IndexError if it is cut off, else like `decode`."""
        fields: list[tuple[bytes, bytes]] = []
        at, end, size = 0, len(block), 0
        while at < end:
            first = block[at]
            if first >= 0x80:
                index, at = _integer(block, at, 0x7F)
                field = self._field(index)
            elif first & 0x60 == 0x20:
                if fields:
                    raise InvalidBlock("table size update after the first field")
                limit, at = _integer(block, at, 0x1F)
                self._resize(limit)
                continue
            else:
                index, at = _integer(block, at, 0x3F if first >= 0x40 else 0x0F)
                if index:
                    name = self._field(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                field = name, value
                if first >= 0x40:
                    self._add(field)
            fields.append(field)
            size += len(field[0]) + len(field[1]) + _FIELD_BYTES
            if size > MAX_HEADER_BYTES:
                raise BlockTooLarge(f"headers exceed {MAX_HEADER_BYTES} bytes")
        return fields

    def _field(self, index: int) -> tuple[bytes, bytes]:
        if index > len(_STATIC):
            return self._table[index - len(_STATIC) - 1]
        if not index:
            raise IndexError
        return _STATIC[index - 1]

    def _add(self, field: tuple[bytes, bytes]) -> None:
        """Enter a field into the table; a field larger than the table empties it."""
        self._changes += 1
        self._table.appendleft(field)
        self._table_bytes += len(field[0]) + len(field[1]) + _FIELD_BYTES
        self._evict()

    def _resize(self, limit: int) -> None:
        if limit > _MAX_TABLE_BYTES:
            raise InvalidBlock(f"a table of {limit} bytes")
        if limit != self._table_limit:
            self._changes += 1
            self._table_limit = limit
            self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._table_limit:
            name, value = self._table.pop()
            self._table_bytes -= len(name) + len(value) + _FIELD_BYTES


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """Return the integer whose first bits are those of `mask` at `at` (section 5.1), and its end; it has at most six
    bytes."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 35, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidBlock("integer longer than six bytes")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """Return the string at `at` (section 5.2), and its end."""
    is_encoded = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError
    text = block[at:end]
    return (decode_huffman(text) if is_encoded else text), end


_SHORT = tuple(bytes((value,)) for value in range(0x7F))
_KEPT_FIELDS, _KEPT_BYTES = 64, 64  # limits of the cache of encoded fields


def _literal(name: bytes, value: bytes) -> bytes:
    """Encode a field without indexing (RFC 7541, section 6.2.2)."""
    if name == b":status" and value == b"200":
        return b"\x88"  # index in the static table
    return b"".join((b"\0", _encoded_integer(len(name)), name, _encoded_integer(len(value)), value))


_kept_literal = lru_cache(_KEPT_FIELDS)(_literal)


def _encoded_integer(value: int) -> bytes:
    """Encode an integer with a prefix of seven bits (RFC 7541, section 5.1)."""
    if value < 0x7F:
        return _SHORT[value]
    encoded = bytearray((0x7F,))
    value -= 0x7F
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Encode a header block; names are in lower case."""
    return b"".join(
        [_kept_literal(name, value) if len(value) <= _KEPT_BYTES else _literal(name, value) for name, value in headers]
    )


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
_REMEMBERED_FIELDS = 256  # checked fields of up to 16 KiB


class InvalidHead(Exception):
    """The head of a request is malformed; the message names the field."""


class RequestHead(NamedTuple):
    """A request's head; `fields` start with Host and contain no pseudo-headers."""

    method: bytes
    target: bytes
    fields: Headers
    length: int | None
    """Content-Length in bytes."""

    @property
    def expects_continue(self) -> bool:
        return any(name == b"expect" and value.lower() == b"100-continue" for name, value in self.fields)

    def location(self) -> dict[str, Any]:
        """Return the fields of an ASGI scope that are parsed from the target, as uvicorn parses them.

        Raises:
            InvalidHead: the target is not a URL.
        """
        try:
            url = httptools.parse_url(self.target)
        except httptools.HttpParserError:
            raise InvalidHead(f":path is invalid: {_shown(self.target)}") from None
        raw = url.path or b""
        path = raw.decode("ascii")
        return {"path": unquote(path) if "%" in path else path, "raw_path": raw, "query_string": url.query or b""}


def read_head(headers: Headers) -> RequestHead:
    """Return the head of a request from the headers of its stream. Several Cookie fields become one.

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
                raise InvalidHead(f"{_shown(field[0])} is repeated or follows other headers")
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
    """Raise InvalidHead if a field is malformed or a pseudo-header (RFC 9113, section 8.1)."""
    for field in trailers:
        kind = _kind(field)
        if kind is _PSEUDO:
            raise InvalidHead(f"{_shown(field[0])} in the trailers")
        if kind not in _KINDS:
            raise InvalidHead(kind)


@lru_cache(_REMEMBERED_FIELDS)
def _kind(field: tuple[bytes, bytes]) -> str:
    """Return the kind of a field, one of `_KINDS`; for a malformed field, what is wrong with it."""
    name, value = field
    if _VALUE.fullmatch(value) is None:
        return f"the value of {_shown(name)} contains an invalid character"
    if name.startswith(b":"):
        return _problem_of_pseudo(name, value) or _PSEUDO
    if _NAME.fullmatch(name) is None:
        return f"{_shown(name)} is not a valid header name; names are in lower case"
    if name in _OF_CONNECTIONS or (name == b"te" and value.lower() != b"trailers"):
        return f"{_shown(name)} belongs to HTTP/1.1 connections; HTTP/2 has no such header"
    if name == b"content-length" and _LENGTH.fullmatch(value) is None:
        return "content-length is not a number of bytes"
    if name == b"cookie":
        return _COOKIE
    if name == b"host" and not is_host(value):
        return f"host is invalid: {_shown(value)}"
    return _SINGLE if name in SINGLE_HEADERS else _PLAIN


def _problem_of_pseudo(name: bytes, value: bytes) -> str:
    match name:
        case b":method" if _METHOD.fullmatch(value) is None or value == b"CONNECT":
            return f":method is not supported: {_shown(value)}"
        case b":scheme" if value not in (b"http", b"https"):
            return ":scheme must be http or https"
        case b":path" if _TARGET.fullmatch(value) is None:
            return f":path is invalid: {_shown(value)}"
        case b":authority" if not is_host(value):
            return f":authority is invalid: {_shown(value)}"
        case b":method" | b":scheme" | b":path" | b":authority":
            return ""
    return f"{_shown(name)} is not a pseudo-header of requests"


def _with_host(
    authority: bytes | None, host: bytes | None, fields: list[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    if authority is None and host is None:
        raise InvalidHead(":authority and host are missing")
    if authority is None:
        return fields
    if host is not None and host.lower() != authority.lower():
        raise InvalidHead(":authority and host differ")
    return fields if host is not None else [(b"host", authority), *fields]


def _shown(value: bytes) -> str:
    return ascii(value[:_SHOWN_BYTES].decode("latin-1"))
