"""Whether orjson may take a body in another sense than TEI's parser: fields twice, -0 as an integer, deep nesting.

First a search of some microseconds, which also finds texts that look so; then the keys and numbers themselves.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from functools import cache

import orjson

from teimgr.wire.json_scan import completed, end_of_string, name_pattern
from teimgr.worker.dialects.serde_runs import end_of_run

_WINDOW_BYTES = 2**18
_DEEPEST = 100
_LONGEST_NAME = 256  # of a field, each letter as an escape
_QUOTE = b'"'[0]
_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_IN_FLOATS = frozenset((b".", b"e", b"E", *(b"%d" % digit for digit in range(10))))
_ESCAPED_LETTERS = (rb"\u005", rb"\u006", rb"\u007")
_MINUS_ZERO = re.compile(rb"[:,\[\s]-0[\s,}\]]")  # an integer to orjson, a float to TEI
_SPACE = re.compile(rb"[ \t\r\n]*+")
# What leaves the depth as it is, lists and objects without others in them included.
_SCALARS = rb'[^"\[\]{}]++|' + _STRING
_SMALL = rb"\[(?:" + _SCALARS + rb")*+\]|\{(?:" + _SCALARS + rb")*+\}"
_LEVEL = re.compile(rb"(?:" + _SCALARS + rb"|" + _SMALL + rb")*+", re.DOTALL)
_OPENING = frozenset(b"[{")


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


@cache
def _all_but(fields: frozenset[bytes]) -> re.Pattern[bytes]:
    """All but a string that is a field's name, each letter of which may be written as an escape, with a colon behind
    it; but -0; and but what the window cuts.

    None of these calls holds the GIL for longer than a window takes.
    """
    names = (name_pattern(name[1:-1]) for name in sorted(fields))
    field = rb'"(?:' + b"|".join(names) + rb')"[ \t\r\n]*+(?::|\Z)'
    string = rb"(?!" + field + rb")" + _STRING
    return re.compile(rb'(?:[^"\-]++|' + string + rb"|-(?!0|\Z)|-0[.eE\d]|(?<=[eE])-)*+", re.DOTALL)


def is_ambiguous(fields: Collection[bytes], body: bytes) -> bool:
    """Whether a body that orjson takes has a field twice, at whatever depth, or -0."""
    seen: set[bytes] = set()
    at, other = 0, _all_but(frozenset(fields))
    while (at := end_of_run(other, body, at)) < len(body):
        if body[at] != _QUOTE:  # a minus
            if body[at + 1 : at + 2] == b"0" and body[at + 2 : at + 3] not in _IN_FLOATS:
                return True
            at += 1
            continue
        end = completed(end_of_string(body, at + 1))
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


def may_be_deep(body: bytes) -> bool:
    """Whether values are nested as deep as TEI's parser refuses; orjson takes 1,024 levels."""
    if body.count(b"[") + body.count(b"{") < _DEEPEST:
        return False
    at = depth = 0
    while depth < _DEEPEST and (at := end_of_run(_LEVEL, body, at)) < len(body):
        if body[at] == _QUOTE:
            at = completed(end_of_string(body, at + 1))
            continue
        depth += 1 if body[at] in _OPENING else -1
        at += 1
    return depth >= _DEEPEST
