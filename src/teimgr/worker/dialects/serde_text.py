"""Text of JSON as in serde_json: values in its error messages, and runs without faults.

One call of a regular expression skips a run. The run ends before anything else, valid or not, which `serde_json.Reader`
reads byte by byte; so faults do not depend on the runs. Each call gets one window of the body, since it holds the GIL.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import orjson

from teimgr.wire.json_scan import WINDOW_BYTES, matched

# Characters joined in one call, which holds the GIL.
_SHOWN_AT_ONCE = 4096


def shown(value: Any) -> str:
    """A value as serde_json's faults show it: `integer `1``, `string "a"`, `map`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"boolean `{str(value).lower()}`"
    if isinstance(value, str):
        return f"string {_quoted(value)}"
    if isinstance(value, int):
        return f"integer `{value}`"
    if isinstance(value, float):
        return f"floating point `{_float(value)}`"
    return "sequence" if isinstance(value, list) else "map"


def _float(value: float) -> str:
    """The form that ryu prints: without a plus or leading zeros in the exponent, which begins at 1e16 and at 1e-6."""
    text = repr(value)
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return text
    if exponent == "-05":
        digits = mantissa.replace(".", "").lstrip("-")
        return f"{'-' if value < 0 else ''}0.0000{digits}"
    return f"{mantissa}e{int(exponent)}"


_NAMED_ESCAPES = {"\0": "\\0", "\t": "\\t", "\n": "\\n", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def _quoted(text: str) -> str:
    """A string as Rust's `{:?}` writes it."""
    pieces = [
        "".join([_shown_char(char, not place) for place, char in enumerate(text[at : at + _SHOWN_AT_ONCE], at)])
        for at in range(0, len(text), _SHOWN_AT_ONCE)
    ]
    return f'"{"".join(pieces)}"'


def _shown_char(char: str, is_first: bool) -> str:
    if char in _NAMED_ESCAPES:
        return _NAMED_ESCAPES[char]
    extends = is_first and unicodedata.category(char) in ("Mn", "Me")
    return char if char.isprintable() and not extends else f"\\u{{{ord(char):x}}}"


_S = rb"[ \n\t\r]*+"
_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*+"'
_NUMBER = rb"-?+(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+"
_SCALAR = rb"(?:null|true|false|" + _NUMBER + rb"|" + _STRING + rb")"
_LEVELS = 2  # of lists and objects within a run; each doubles the expression


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
# Integers of less than 64 bits, except -0, which is a float in serde_json.
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
