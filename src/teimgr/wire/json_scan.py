"""Reading parts of large JSON texts without parsing the whole: in steps, each of which takes a millisecond at most.

A call of a regular expression, as one of a parser, holds the GIL until it returns. So each is given a window of the
text, every function here is a generator that yields between two of them, and the time is linear in the text whatever
it is: malformed texts are scanned too, and what they mean is for a parser to say.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import cache
from typing import TypeVar

import orjson

from teimgr.errors import InvalidInput

Text = bytes | bytearray
ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]

WINDOW_BYTES = 64 * 1024
_TOKENS_A_STEP = 512
# Lists, objects and long texts that one scan passes over one by one: about a second. No client sends this many.
MAX_TOKENS = 1_000_000

_CHARACTERS = rb'(?:[^"\\]++|\\.)*+'
_IN_STRING = re.compile(_CHARACTERS, re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
# What leaves the depth as it is, lists and objects of scalars included: most of a text is passed over by these.
_FLAT = rb'[^"\[\]{}]++|\[[^"\[\]{}]*+\]|\{[^"\[\]{}]*+\}|"' + _CHARACTERS + rb'"'
_LEVEL = re.compile(rb"(?:" + _FLAT + rb")*+", re.DOTALL)
_OPENED = re.compile(rb"[\[{]++")
_CLOSED = re.compile(rb"[\]}]++")
_QUOTE, _COLON, _BRACE = b'":{'
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
# A text of a member is read up to here: longer ones are no names, and only their beginning is shown.
_MAX_VALUE_BYTES = 16 * 1024
_LONGEST_CUT = 12  # bytes of a character that the limit cuts: two escapes


@cache
def _before_member(name: str) -> re.Pattern[bytes]:
    """What may come in an object before the key `name`, each letter of which may be written as an escape.

    It ends before a key that the window cuts.
    """
    letters = (b"(?:%c|\\\\u00%x%s)" % (ord(one), ord(one) >> 4, _digit(ord(one) & 15)) for one in name)
    key = rb'"' + b"".join(letters) + rb'"[ \t\r\n]*+(?::|\Z)'
    return re.compile(rb"(?:(?!" + key + rb")(?:" + _FLAT + rb"))*+", re.DOTALL)


def _digit(value: int) -> bytes:
    digit = b"%x" % value
    return b"[%b%b]" % (digit, digit.upper())


def completed(steps: Steps[ResultT]) -> ResultT:
    """The result of all steps, one after the other."""
    try:
        while True:
            next(steps)
    except StopIteration as end:
        result: ResultT = end.value
        return result


def text_member(text: Text, name: str, start: int = 0) -> Steps[str | None]:
    """The text under `name` (ASCII) in the JSON object that begins at `start`; None if it has no such text.

    The first of several counts. Of a text of more than 16 KiB, its beginning.

    Raises:
        InvalidInput: more than `MAX_TOKENS` lists, objects and long texts come before it.
    """
    at = yield from _run(_SPACE, text, start)
    if at >= len(text) or text[at] != _BRACE:
        return None
    at += 1
    other, pause = _before_member(name), at + WINDOW_BYTES
    for token in range(MAX_TOKENS):
        if at >= pause or token % _TOKENS_A_STEP == _TOKENS_A_STEP - 1:
            pause = at + WINDOW_BYTES
            yield
        found = other.match(text, at, at + WINDOW_BYTES)
        at = at if found is None else found.end()
        if at >= len(text) or text[at] in _CLOSING:
            return None
        if text[at] in _OPENING:
            at = yield from _end_of_nested(text, at + 1, name)
        elif text[at] == _QUOTE:
            end = yield from _end_of_string(text, at + 1)
            after = yield from _run(_SPACE, text, end)
            if after < len(text) and text[after] == _COLON and _is_text(text, at, end, name):
                at = yield from _run(_SPACE, text, after + 1)
                return (yield from _string(text, at)) if at < len(text) and text[at] == _QUOTE else None
            at = end
    raise _too_many(name)


def _too_many(name: str) -> InvalidInput:
    return InvalidInput(f"The body has more than {MAX_TOKENS} lists, objects and long texts before `{name}`")


def _run(pattern: re.Pattern[bytes], text: Text, at: int) -> Steps[int]:
    """The end of a run of the pattern's characters."""
    while True:
        found = pattern.match(text, at, at + WINDOW_BYTES)
        end = at if found is None else found.end()
        if end - at < WINDOW_BYTES:
            return end
        at = end
        yield


def _end_of_string(text: Text, at: int) -> Steps[int]:
    """The position behind a string whose characters begin at `at`; beyond the text if it is unterminated."""
    while True:
        found = _IN_STRING.match(text, at, at + WINDOW_BYTES)
        end = at if found is None else found.end()
        if end < len(text) and text[end] == _QUOTE:
            return end + 1
        if end >= len(text) or end == at:  # a backslash ends the text
            return len(text) + 1
        at = end
        yield


def _end_of_nested(text: Text, at: int, name: str) -> Steps[int]:
    """The position behind the list or object whose content begins at `at`; the end of the text if it is not closed."""
    depth, pause = 1, at + WINDOW_BYTES
    for token in range(MAX_TOKENS):
        if at >= pause or token % _TOKENS_A_STEP == _TOKENS_A_STEP - 1:
            pause = at + WINDOW_BYTES
            yield
        found = _LEVEL.match(text, at, at + WINDOW_BYTES)
        at = at if found is None else found.end()
        if at >= len(text):
            return at
        if text[at] == _QUOTE:
            at = yield from _end_of_string(text, at + 1)
        elif (opened := _OPENED.match(text, at, at + WINDOW_BYTES)) is not None:
            depth += opened.end() - at
            at = opened.end()
        elif (closed := _CLOSED.match(text, at, at + WINDOW_BYTES)) is not None:
            if closed.end() - at >= depth:
                return at + depth
            depth -= closed.end() - at
            at = closed.end()
    raise _too_many(name)


def _is_text(text: Text, at: int, end: int, expected: str) -> bool:
    """Whether the string literal between two positions is `expected`, which may be written in escapes."""
    if end - at == len(expected) + 2:
        return text[at + 1 : end - 1] == expected.encode()
    if end - at > 6 * len(expected) + 2 or text.find(b"\\", at, end) < 0:
        return False
    return _decoded(text[at:end]) == expected


def _decoded(literal: Text) -> str | None:
    try:
        return str(orjson.loads(literal))
    except orjson.JSONDecodeError:
        return None


def _string(text: Text, at: int) -> Steps[str | None]:
    """The text of the string literal at `at`; None if it is none."""
    end = yield from _end_of_string(text, at + 1)
    if end > len(text):
        return None
    if end - at <= _MAX_VALUE_BYTES:
        return _decoded(text[at:end])
    found = _IN_STRING.match(text, at + 1, at + 1 + _MAX_VALUE_BYTES)
    stop = at + 1 if found is None else found.end()
    whole = (_decoded(text[at:cut] + b'"') for cut in range(stop, max(at, stop - _LONGEST_CUT), -1))
    return next((value for value in whole if value is not None), None)
