"""One text of a JSON object, found without reading the rest: a body of megabytes does not become Python objects."""

from __future__ import annotations

import re

import orjson

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TOKEN = re.compile(_STRING + rb"|[\[{]|[\]}]", re.DOTALL)
_IS_KEY = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+(" + _STRING + rb")?", re.DOTALL)
# What no request has in earnest; looking at so many takes some tenths of a second.
_MAX_TOKENS = 1_000_000

Buffer = bytes | bytearray | memoryview


def text_of(key: str, body: Buffer, start: int = 0) -> str | None:
    """The text under `key` of the object that begins at `start`; None where there is none.

    The first of several wins. What is no JSON may have an answer too: whoever reads the whole body finds out.
    """
    depth, plain = 0, b'"' + key.encode() + b'"'
    for count, token in enumerate(_TOKEN.finditer(body, start)):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
        elif depth == 1 and (value := _IS_KEY.match(body, token.end())) and _is(token.group(), plain, key):
            return None if value.group(1) is None else _decoded(value.group(1))
        if count >= _MAX_TOKENS or depth <= 0:
            return None
    return None


def _is(token: Buffer, plain: bytes, key: str) -> bool:
    if token == plain:
        return True
    return b"\\" in bytes(token) and _decoded(token) == key


def _decoded(string: Buffer) -> str | None:
    try:
        value = orjson.loads(string)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, str) else None
