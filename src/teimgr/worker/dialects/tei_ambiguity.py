"""Whether orjson may take a body in another sense than TEI's parser: fields twice, -0 as an integer, deep nesting.

First a search of some microseconds, which also finds texts that look so; then the keys and numbers themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection

import orjson

from teimgr.wire import json_scan
from teimgr.worker.dialects.serde_runs import end_of_run

_WINDOW_BYTES = 2**18
_DEEPEST = 100
_LONGEST_NAME = 256  # of a field, each letter as an escape
_QUOTE = b'"'[0]
_IN_FLOATS = frozenset((b".", b"e", b"E", *(b"%d" % digit for digit in range(10))))
_ESCAPED_LETTERS = (rb"\u005", rb"\u006", rb"\u007")
_MINUS_ZERO = re.compile(rb"[:,\[\s]-0[\s,}\]]")  # an integer to orjson, a float to TEI
# All but a string with the colon behind it, which is a key, but -0, and but what the window cuts: none of these calls
# holds the GIL for longer than a window takes.
_OTHER = re.compile(
    rb'(?:[^"\-]++|"(?:[^"\\]++|\\.)*+"(?![ \t\r\n]*+(?::|\Z))|-(?!0|\Z)|-0[.eE\d]|(?<=[eE])-)*+', re.DOTALL
)
_IN_STRING = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")


def may_be_ambiguous(fields: Collection[bytes], body: bytes) -> bool:
    """False for most correct bodies; `fields` are the names of a request's fields, in quotes."""
    if len(body) > _WINDOW_BYTES:
        return _may_be_ambiguous_by_windows(fields, body)
    if b"\\u00" in body and any(letter in body for letter in _ESCAPED_LETTERS):
        return True  # the name of a field may be written so, which the search below does not see
    return (b"-0" in body and _MINUS_ZERO.search(body) is not None) or (
        body.count(b":") > 1 and any(body.count(name) > 1 for name in fields)
    )


def _may_be_ambiguous_by_windows(fields: Collection[bytes], body: bytes) -> bool:
    """The same of megabytes: one search of all would hold the GIL."""
    starts = range(0, len(body), _WINDOW_BYTES)

    def count(part: bytes) -> int:
        return sum(body.count(part, at, at + _WINDOW_BYTES + len(part) - 1) for at in starts)

    if count(b"\\u00") and any(map(count, _ESCAPED_LETTERS)):
        return True
    if count(b"-0") and any(_MINUS_ZERO.search(body, at, at + _WINDOW_BYTES + 3) is not None for at in starts):
        return True
    return any(count(name) > 1 for name in fields)


def is_ambiguous(fields: Collection[bytes], body: bytes) -> bool:
    """Whether a body that orjson takes has a field twice, at whatever depth, or -0."""
    seen: set[bytes] = set()
    at = 0
    while (at := end_of_run(_OTHER, body, at)) < len(body):
        if body[at] != _QUOTE:  # a minus
            if body[at + 1 : at + 2] == b"0" and body[at + 2 : at + 3] not in _IN_FLOATS:
                return True
            at += 1
            continue
        end = _end_of_string(body, at + 1)
        after = end_of_run(_SPACE, body, end)
        if body[after : after + 1] == b":" and end - at <= _LONGEST_NAME:
            name = body[at:end]
            if b"\\" in name:
                name = b'"%b"' % str(orjson.loads(name)).encode()
            if name in fields:
                if name in seen:
                    return True
                seen.add(name)
        at = end
    return False


def _end_of_string(body: bytes, at: int) -> int:
    """The position behind the string whose characters begin at `at`."""
    while True:
        end = end_of_run(_IN_STRING, body, at)
        if end == at or end >= len(body) or body[end] == _QUOTE:
            return end + 1
        at = end  # the window cut an escape


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
