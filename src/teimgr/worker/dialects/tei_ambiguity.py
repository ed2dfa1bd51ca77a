"""Whether orjson may take a body in another sense than TEI's parser: fields twice, -0 as an integer, deep nesting.

First a search of some microseconds, which also finds texts that look so; then the keys and numbers themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import orjson

from teimgr.wire import json_scan

_WINDOW_BYTES = 2**20
_DEEPEST = 100
_ESCAPED_LETTERS = (rb"\u005", rb"\u006", rb"\u007")
_MINUS_ZERO = re.compile(rb"[:,\[\s]-0[\s,}\]]")  # an integer to orjson, a float to TEI
# A string with the colon behind it, if it is a key, or -0 outside of strings. One match after the other: no call holds
# the GIL for longer than a string takes.
_KEY_OR_ZERO = re.compile(rb'("(?:[^"\\]++|\\.)*+")[ \t\r\n]*+(:)?|(?<![eE])-0(?![.eE\d])', re.DOTALL)


def may_be_ambiguous(fields: Collection[bytes], body: bytes) -> bool:
    """False for most correct bodies; `fields` are the names of a request's fields, in quotes."""
    if b"\\u00" in body and any(letter in body for letter in _ESCAPED_LETTERS):
        return True  # the name of a field may be written so, which the search below does not see
    if len(body) <= _WINDOW_BYTES:
        return (b"-0" in body and _MINUS_ZERO.search(body) is not None) or (
            body.count(b":") > 1 and any(body.count(name) > 1 for name in fields)
        )
    starts = range(0, len(body), _WINDOW_BYTES)  # one search of megabytes would hold the GIL
    if b"-0" in body and any(_MINUS_ZERO.search(body, at, at + _WINDOW_BYTES + 3) is not None for at in starts):
        return True
    return any(sum(body.count(name, at, at + _WINDOW_BYTES + len(name) - 1) for at in starts) > 1 for name in fields)


def is_ambiguous(fields: Collection[bytes], body: bytes) -> bool:
    """Whether a body that orjson takes has a field twice, at whatever depth, or -0; some 0.4 µs a string."""
    seen = set()
    for found in _KEY_OR_ZERO.finditer(body):
        name, colon = found.groups()
        if name is None:
            return True
        if colon is None:
            continue
        if b"\\" in name:
            name = b'"%b"' % str(orjson.loads(name)).encode()
        if name in fields:
            if name in seen:
                return True
            seen.add(name)
    return False


def may_be_deep(body: bytes) -> bool:
    """Whether values are nested as deep as TEI's parser refuses; orjson takes 1,024 levels."""
    if body.count(b"[") + body.count(b"{") < _DEEPEST:
        return False
    level, depth = [json_scan.loads(body)], 0
    while level and depth < _DEEPEST:
        holders = [each for each in level if isinstance(each, list | dict)]
        level = [one for each in holders for one in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    return bool(level)
