"""Runs of JSON that serde_json would read without a fault, passed over by one call of a regular expression each.

A run ends before what it does not know, which may be right or wrong: `serde_json.Reader` reads that byte by byte, so
the words of a fault never depend on the runs. Each call is given a window of the body, since it holds the GIL.
"""

from __future__ import annotations

import re

import orjson

from teimgr.wire.json_scan import WINDOW_BYTES, matched

_S = rb"[ \n\t\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+"'
_NUMBER = rb"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+"
_SCALAR = rb"(?:null|true|false|" + _NUMBER + rb"|" + _STRING + rb")"
_LEVELS = 2  # of lists and objects within a run; each makes the expression twice as long


def _holding(value: bytes) -> bytes:
    """A value, or a list or object of such values."""
    one = rb"(?:" + value + rb")" + _S
    in_list = rb"\[" + _S + rb"(?:" + one + rb"(?:," + _S + rb"(?!\])|(?=\])))*+\]"
    member = _STRING + _S + rb":" + _S + one
    in_object = rb"\{" + _S + rb"(?:" + member + rb"(?:," + _S + rb"(?!\})|(?=\})))*+\}"
    return rb"(?:" + _SCALAR + rb"|" + in_list + rb"|" + in_object + rb")"


_VALUE = _SCALAR
for _ in range(_LEVELS):
    _VALUE = _holding(_VALUE)
_ELEMENTS = re.compile(rb"(?:" + _S + _VALUE + _S + rb",)*+")
_MEMBERS = re.compile(rb"(?:" + _S + _STRING + _S + rb":" + _S + _VALUE + _S + rb",)*+")
_OPENED = re.compile(rb"(?:" + _S + rb"(?:\[|\{" + _S + _STRING + _S + rb":))*+")
_CLOSED = re.compile(rb"(?:" + _S + rb"[\]}])*+")
_STRINGS = re.compile(_STRING)
_BETWEEN = b" \n\t\r:"
_PAIRS = bytes.maketrans(b"[{", b"]}")
# Integers of less than 64 bits, but -0, which serde_json takes for a float.
_INTEGERS = re.compile(rb"(?:" + _S + rb"(?:0|-?+[1-9][0-9]{0,17}+)" + _S + rb",)*+")


def end_of_run(run: re.Pattern[bytes], body: bytes, at: int, limit: int | None = None) -> int:
    """Behind the bytes of a run, in calls of a tenth of a millisecond; or at some byte behind `limit` of them.

    The run has to match no bytes too.
    """
    start = at
    while limit is None or at - start <= limit:
        window = at + WINDOW_BYTES
        at = matched(run, body, at, window)
        if at < window:
            break
    return at


def _end(run: re.Pattern[bytes], body: bytes, at: int) -> int:
    return matched(run, body, at, at + WINDOW_BYTES)


def after_elements(body: bytes, at: int) -> int:
    """Behind the values that begin at `at` and have a comma behind them, that included."""
    return _end(_ELEMENTS, body, at)


def after_members(body: bytes, at: int) -> int:
    """Like `after_elements`, of an object's keys with their values."""
    return _end(_MEMBERS, body, at)


def opened(body: bytes, at: int) -> tuple[int, bytes]:
    """Behind lists and objects that begin one in the other, the first keys included; and their brackets."""
    end = _end(_OPENED, body, at)
    return end, _STRINGS.sub(b"", body[at:end]).translate(None, _BETWEEN)


def closed(body: bytes, at: int, open_frames: bytearray) -> tuple[int, int]:
    """Behind the ends of lists and objects, and how many of `open_frames`, the last ones, end there.

    0 if that is not what ends: which bracket is wrong is then for the reader to find.
    """
    end = _end(_CLOSED, body, at)
    found = body[at:end].translate(None, _BETWEEN)
    if len(found) > len(open_frames):
        return at, 0
    if found != open_frames[len(open_frames) - len(found) :][::-1].translate(_PAIRS):
        return at, 0
    return end, len(found)


def integers(body: bytes, at: int) -> tuple[int, list[int]]:
    """The integers that begin at `at` and have a comma behind them; behind the last one, before its comma."""
    end = _end(_INTEGERS, body, at)
    if end == at:
        return at, []
    return end - 1, orjson.loads(b"[" + body[at : end - 1] + b"]")
