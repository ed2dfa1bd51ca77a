"""Reads large JSON texts, or one member of them, in steps of a millisecond or two.

A call of a regular expression or a parser holds the GIL until it returns. So each call gets one window of the text, and
the functions here are generators that yield between windows. The time is linear for any text. Malformed texts are
scanned too; a parser rejects them later.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import cache
from io import BytesIO
from json import JSONDecodeError
from typing import Any, NamedTuple, TypeVar

import orjson

from teimgr.errors import InvalidInput
from teimgr.spec import MAX_TEXT_BYTES
from teimgr.wire.gil import Rests, freed

Text = bytes | bytearray
AnyText = Text | memoryview
ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")
Steps = Generator[None, None, ResultT]

# A regular expression takes 150 ns per escape on a slow processor, so 1.2 ms for a window of escapes.
WINDOW_BYTES = 16 * 1024
# Window of patterns with alternatives, which take that long for any byte: half a millisecond for one-letter strings.
_MATCHED_BYTES = 4 * 1024
_TOKENS_A_STEP = 512
_SEARCHED_BYTES = 256 * 1024  # searched, counted or copied in one call: a tenth of a millisecond
# Limit on the lists, objects and long texts that a scan skips singly: about a second. No client sends this many.
MAX_TOKENS = 1_000_000

_CHARACTERS = rb'(?:[^"\\]++|\\.)*+'
_IN_STRING = re.compile(_CHARACTERS, re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
# Text that leaves the depth unchanged, including lists and objects of scalars. It skips most of a body.
_FLAT = rb'[^"\[\]{}]++|\[[^"\[\]{}]*+\]|\{[^"\[\]{}]*+\}|"' + _CHARACTERS + rb'"'
_LEVEL = re.compile(rb"(?:" + _FLAT + rb")*+", re.DOTALL)
_OPENED = re.compile(rb"[\[{]++")
_CLOSED = re.compile(rb"[\]}]++")
_QUOTE, _COLON, _BRACE = b'":{'
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")
# The text of a member is read up to this size. Longer texts are not names, and errors show only their beginning.
_MAX_VALUE_BYTES = 16 * 1024
# The bytes of a string that the regular expression tries first: most strings end within them.
_SHORT_BYTES = 256
_LONGEST_CUT = 12  # bytes of the longest character, two escapes, that a window may cut


@cache
def _before_member(name: str) -> re.Pattern[bytes]:
    """What may come in an object before the key `name`, each letter of which may be written as an escape.

    It ends before a key that the window cuts.
    """
    key = rb'"' + name_pattern(name.encode()) + rb'"[ \t\r\n]*+(?::|\Z)'
    return re.compile(rb"(?:(?!" + key + rb")(?:" + _FLAT + rb"))*+", re.DOTALL)


def name_pattern(name: bytes) -> bytes:
    """Return the regular expression of a name (ASCII), each letter of which may be written as an escape."""
    return b"".join(b"(?:%c|\\\\u00%x%s)" % (one, one >> 4, _digit(one & 15)) for one in name)


def _digit(value: int) -> bytes:
    digit = b"%x" % value
    return b"[%b%b]" % (digit, digit.upper())


def completed(steps: Steps[ResultT]) -> ResultT:
    """Run all steps and return the result; on a separate thread, with rests between them."""
    rest = Rests()
    try:
        while True:
            next(steps)
            rest()
    except StopIteration as end:
        result: ResultT = end.value
        return result


def in_steps(work: Callable[[ItemT], ResultT], items: Iterable[ItemT]) -> Steps[list[ResultT]]:
    """Return the results of `work` for all items, a step each."""
    found = []
    for item in items:
        found.append(work(item))
        yield
    return found


def _windows(size: int) -> Iterator[int]:
    """Yield where windows begin in `size` bytes that are searched or copied; on a separate thread, with rests."""
    rest = Rests()
    for at in range(0, size, _SEARCHED_BYTES):
        yield at
        rest()


def mentions(text: AnyText, word: bytes) -> bool:
    """True if `word` is in a text."""
    return any(word in bytes(text[at : at + _SEARCHED_BYTES + len(word) - 1]) for at in _windows(len(text)))


def occurrences(text: bytes, part: bytes, stop: int | None = None) -> int:
    """Return how often `part` is in a text; with `stop`, how often it begins before that."""
    stop = len(text) if stop is None else stop
    return sum(text.count(part, at, min(at + _SEARCHED_BYTES, stop) + len(part) - 1) for at in _windows(stop))


def copied(text: AnyText) -> bytes:
    """Copy the bytes of a text: copying tens of megabytes in one call holds the GIL for as many milliseconds."""
    if len(text) <= _SEARCHED_BYTES:
        return bytes(text)
    whole = BytesIO()  # `getvalue` returns its buffer without a copy
    for at in _windows(len(text)):
        whole.write(text[at : at + _SEARCHED_BYTES])
    return whole.getvalue()


def text_member(text: Text, name: str, start: int = 0) -> Steps[str | None]:
    """Return the text under `name` (ASCII) in the JSON object that begins at `start`; None if it lacks such a text.

    The last of several counts, as for a parser. Of a text of more than 16 KiB, only its beginning is returned.

    Raises:
        InvalidInput: more than `MAX_TOKENS` lists, objects and long texts come before it.
    """
    at = yield from _run(_SPACE, text, start)
    if at >= len(text) or text[at] != _BRACE:
        return None
    at += 1
    other, pause = _before_member(name), at + _MATCHED_BYTES
    member, is_repeated = None, False
    for token in range(MAX_TOKENS):
        if at >= pause or token % _TOKENS_A_STEP == _TOKENS_A_STEP - 1:
            pause = at + _MATCHED_BYTES
            yield
        at = matched(other, text, at, at + _MATCHED_BYTES)
        if at >= len(text) or text[at] in _CLOSING:
            return member
        if text[at] in _OPENING:
            at = yield from _end_of_nested(text, at + 1, name)
        elif text[at] == _QUOTE:
            end = yield from end_of_string(text, at + 1)
            after = yield from _run(_SPACE, text, end)
            if after < len(text) and text[after] == _COLON and _is_text(text, at, end, name):
                at = yield from _run(_SPACE, text, after + 1)
                member = (yield from _string(text, at)) if at < len(text) and text[at] == _QUOTE else None
                is_repeated = is_repeated or (yield from _may_come(text, at, name))
                if not is_repeated:
                    return member
                continue
            at = end
    raise _too_many(name)


def _may_come(text: Text, at: int, name: str) -> Steps[bool]:
    """True if the key `name` may come after a position: it is somewhere there, or an escape of one of its letters."""
    key = name.encode()
    sought = {b'"%b"' % key, *(b"\\u00%x" % (letter >> 4) for letter in key)}
    while at < len(text):
        end = at + _SEARCHED_BYTES // 4  # short: an event loop runs the first steps without a pause
        if any(text.find(one, at, end + len(key) + 1) >= 0 for one in sought):
            return True
        at = end
        yield
    return False


def _too_many(name: str) -> InvalidInput:
    return InvalidInput(f"The body has more than {MAX_TOKENS} lists, objects and long texts before `{name}`")


def _run(pattern: re.Pattern[bytes], text: AnyText, at: int) -> Steps[int]:
    """Return the end of a run of the pattern's characters."""
    while True:
        end = matched(pattern, text, at, at + WINDOW_BYTES)
        if end - at < WINDOW_BYTES:
            return end
        at = end
        yield


def end_of_string(text: AnyText, at: int) -> Steps[int]:
    """Return the position after a string whose characters begin at `at`; beyond the text if it is unterminated."""
    at = matched(_IN_STRING, text, at, at + _SHORT_BYTES)
    if at < len(text) and text[at] == _QUOTE:
        return at + 1
    while at < len(text):
        # `replace` and `find` skip an escape 20 times as fast as the regular expression.
        window = bytes(text[at : at + WINDOW_BYTES])
        quote = window.find(b'"')
        if b"\\" in (window if quote < 0 else window[:quote]):
            window = window.replace(b"\\\\", b"  ").replace(b'\\"', b"  ")
            quote = window.find(b'"')
        if quote >= 0:
            return at + quote + 1
        at += len(window)
        if window.endswith(b"\\") and at < len(text):
            at -= 1  # the escaped character is in the next window
        yield
    return len(text) + 1


def _end_of_nested(text: Text, at: int, name: str) -> Steps[int]:
    """Return the position after the list or object whose content begins at `at`; the end of the text if it is not
    closed."""
    depth, pause = 1, at + _MATCHED_BYTES
    for token in range(MAX_TOKENS):
        if at >= pause or token % _TOKENS_A_STEP == _TOKENS_A_STEP - 1:
            pause = at + _MATCHED_BYTES
            yield
        at = matched(_LEVEL, text, at, at + _MATCHED_BYTES)
        if at >= len(text):
            return at
        if text[at] == _QUOTE:
            at = yield from end_of_string(text, at + 1)
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
    """True if the string literal between two positions is `expected`, which may be written in escapes."""
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
    """Return the text of the string literal at `at`, or None."""
    end = yield from end_of_string(text, at + 1)
    if end > len(text):
        return None
    if end - at <= _MAX_VALUE_BYTES:
        return _decoded(text[at:end])
    stop = matched(_IN_STRING, text, at + 1, at + 1 + _MAX_VALUE_BYTES)
    whole = (_decoded(text[at:cut] + b'"') for cut in range(stop, max(at, stop - _LONGEST_CUT), -1))
    return next((value for value in whole if value is not None), None)


# Limits of decoded texts.

# Five per input of the largest batch. Garbage collection visits all of them, and the objects that pydantic makes of
# them, with the GIL held: 20 ms for this many.
MAX_CONTAINERS = 50_000
# Elements and members of all lists and objects in total: one call frees them, in 10 to 20 ms. OpenAI's service accepts
# 300,000 token ids in a request.
MAX_VALUES = 1_000_000
_SHOWN_KEY = 64
LONG_TEXT = f"a text of more than {MAX_TEXT_BYTES} bytes"
_MAX_DEPTH = 1024  # of nested lists and objects, as in orjson
# In pieces with more brackets than this, brackets within strings are not counted.
_FEW_BRACKETS = 64
_SCALARS = rb'[^"\[\]{}]++|"' + _CHARACTERS + rb'"'
_SMALL = rb"(?:" + _SCALARS + rb"|\[(?:" + _SCALARS + rb")*+\]|\{(?:" + _SCALARS + rb")*+\})"
_NESTED = rb'[^"\[\]{},]++|"' + _CHARACTERS + rb'"|\[' + _SMALL + rb"*+\]|\{" + _SMALL + rb"*+\}"
# One element of a list or member of an object without its comma, and any number of them with commas.
_ELEMENT = re.compile(rb"(?:" + _NESTED + rb")*+", re.DOTALL)
_ELEMENTS = re.compile(rb"(?:(?:" + _NESTED + rb")*+,)*+", re.DOTALL)
_LITERAL = re.compile(rb'[^ \t\r\n",:\[\]{}]*+')
_BRACKET = re.compile(rb'[\[{]|"' + _CHARACTERS + rb'"', re.DOTALL)
# Whole characters of a string: no escape and no pair of surrogates is cut.
_WHOLE = re.compile(
    rb'(?:[^"\\]++|\\[^u]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4})*+',
    re.DOTALL,
)
_BACKSLASH, _COMMA = b"\\,"
_CLOSED_BY = {list: b"]"[0], dict: b"}"[0]}


class DepthExceededError(ValueError):
    """Lists and objects are nested in each other too deeply."""


class Reading(NamedTuple):
    """How to decode a text: its limits, and the functions that decode a piece of it and put a member into an object.

    If `max_values` is None, the caller has counted values and containers. `decode` gets a whole JSON text, and raises
    `json.JSONDecodeError` if it is invalid. `put` handles duplicate keys; it gets a new list or object before its
    elements are read.
    """

    max_values: int | None = MAX_VALUES
    max_text_bytes: int = MAX_TEXT_BYTES
    decode: Callable[[bytes], Any] = orjson.loads
    put: Callable[[dict[str, Any], str, Any], None] | None = None


def read(text: AnyText, reading: Reading) -> Any:
    """Like `loads`, by the rules of `reading`. Also raises DepthExceededError, and the errors of `reading.decode` and
    `put`."""
    return completed(_Decoder(text, reading).value())


def loads(text: AnyText, max_values: int = MAX_VALUES) -> Any:
    """Return the value of a JSON text, like `orjson.loads`, by calls of orjson for at most 16 KiB each.

    For large texts on a thread: other threads get the GIL between two calls.

    Raises:
        ValueError: the text is not JSON.
        InvalidInput: it has more than `MAX_CONTAINERS` lists and objects or members of one object, more than
            `max_values` values, or a text of more than `MAX_TEXT_BYTES`.
    """
    return completed(decoded(text, max_values))


def decoded(text: AnyText, max_values: int = MAX_VALUES) -> Steps[Any]:
    """Run `loads` in steps."""
    return (yield from _Decoder(text, Reading(max_values)).value())


def too_large(what: str) -> InvalidInput:
    return InvalidInput(f"The body has {what}")


def long_value(steps: Iterable[object], most_bytes: int = MAX_TEXT_BYTES) -> InvalidInput:
    """Make the refusal of a text, or of bytes, of more than `most_bytes`, which may be a file; `steps` lead to it."""
    place = ".".join(map(_shown_step, steps))
    what = LONG_TEXT if most_bytes == MAX_TEXT_BYTES else f"bytes of more than {most_bytes}"
    return too_large(
        f"{what} in `{place}`: in base64 a file may have 6 MiB; send a smaller image or sound, or a column of files by "
        "gRPC"
    )


def _shown_step(step: object) -> str:
    """Return an index, or the beginning of a key; for a key of another type, in msgpack, the type's name."""
    return step[:_SHOWN_KEY] if isinstance(step, str) else str(step) if type(step) is int else type(step).__name__


class _Decoder:
    """Decodes many small lists and objects in one call; a stack holds the enclosing lists and objects."""

    def __init__(self, text: AnyText, reading: Reading) -> None:
        self._text = text
        self._reading = reading
        self._max_values = reading.max_values
        self._containers = self._values = 0
        self._open: list[tuple[list[Any] | dict[str, Any], str]] = []  # with the key being read

    def value(self) -> Steps[Any]:
        """Return the value of the whole text. If it is refused, the values read before are freed in parts."""
        try:
            return (yield from self._value())
        except (ValueError, InvalidInput):
            for container, _ in self._open:
                yield from freed(container)
            raise

    def _value(self) -> Steps[Any]:
        text = self._text
        at, result = yield from self._opened_or_scalar((yield from _run(_SPACE, text, 0)))
        stack = self._open
        has_comma = False  # whether the next element follows a comma
        while stack:
            yield
            container, _ = stack[-1]
            limit = at + WINDOW_BYTES
            several = matched(_ELEMENTS, text, at, limit)
            end = matched(_ELEMENT, text, several, limit)
            if end < limit and end < len(text) and text[end] == _CLOSED_BY[type(container)]:
                if not self._add(container, at, end) and has_comma:
                    raise _malformed("trailing comma is not allowed", end)
                at, has_comma = yield from self._after_value(end)
            elif several > at:
                if not self._add(container, at, several - 1):
                    raise _malformed("unexpected comma", several - 1)
                at, has_comma = several, True
            else:
                depth = len(stack)
                at, one = yield from self._large_element(container, at)
                if len(stack) > depth:
                    has_comma = False
                else:
                    self._store(one)
                    at, has_comma = yield from self._after_value(at)
        at = yield from _run(_SPACE, text, at)
        if at < len(text):
            raise _malformed("unexpected content after document", at)
        return result

    def _add(self, container: list[Any] | dict[str, Any], start: int, end: int) -> bool:
        """Add the elements or members between two positions; False without any."""
        piece = self._text[start:end]
        has_nested = self._max_values is not None and self._count(piece)
        opening, closing = (b"[", b"]") if isinstance(container, list) else (b"{", b"}")
        try:
            found = self._reading.decode(b"".join((opening, piece, closing)))
        except JSONDecodeError as error:
            raise _malformed(error.msg.partition(": line ")[0], start + max(error.pos - 1, 0)) from None
        self._counted_values(_values_in(found) if has_nested else len(found))
        if isinstance(container, list):
            container.extend(found)
        else:
            if self._reading.put is None:
                container.update(found)
            else:
                for key, value in found.items():
                    self._reading.put(container, key, value)
            if self._max_values is not None and len(container) > MAX_CONTAINERS:
                raise too_large(f"an object with more than {MAX_CONTAINERS} members")
        return bool(found)

    def _count(self, piece: AnyText) -> bool:
        """Count the lists and objects of a piece; False without any."""
        raw = bytes(piece)
        found = raw.count(b"[") + raw.count(b"{")
        if found > _FEW_BRACKETS and b'"' in raw:
            found = sum(one != b'"' for one in (token[:1] for token in _BRACKET.findall(raw)))
        self._counted(found)
        return found > 0

    def _counted(self, more: int) -> None:
        self._containers += more
        if self._max_values is not None and self._containers > MAX_CONTAINERS:
            raise too_large(f"more than {MAX_CONTAINERS} lists and objects")

    def _counted_values(self, more: int) -> None:
        self._values += more
        if self._max_values is not None and self._values > self._max_values:
            raise too_large(f"more than {self._max_values} values")

    def _large_element(self, container: list[Any] | dict[str, Any], at: int) -> Steps[tuple[int, Any]]:
        """Read an element or member that exceeds a window or is deeply nested; returns like `_opened_or_scalar`."""
        text = self._text
        at = yield from _run(_SPACE, text, at)
        if isinstance(container, dict):
            if at >= len(text) or text[at] != _QUOTE:
                raise _malformed("a key was expected", at)
            at, key = yield from self._whole_string(at)
            at = yield from _run(_SPACE, text, at)
            if at >= len(text) or text[at] != _COLON:
                raise _malformed("a colon was expected", at)
            self._open[-1] = (container, key)
            at = yield from _run(_SPACE, text, at + 1)
        return (yield from self._opened_or_scalar(at))

    def _opened_or_scalar(self, at: int) -> Steps[tuple[int, Any]]:
        """Return the position after a scalar, or the bracket of a list or object, which is opened; and its value."""
        text = self._text
        if at < len(text) and text[at] == _QUOTE:
            return (yield from self._whole_string(at))
        if at < len(text) and text[at] in _OPENING:
            self._counted(1)
            if len(self._open) >= _MAX_DEPTH:
                raise DepthExceededError(f"depth limit exceeded: byte {at}")
            opened: list[Any] | dict[str, Any] = {} if text[at] == _BRACE else []
            if self._open:
                self._store(opened)
            self._open.append((opened, ""))
            return at + 1, opened
        end = matched(_LITERAL, text, at, at + WINDOW_BYTES)
        if end - at >= WINDOW_BYTES:
            raise _malformed("a number is too long", at)
        try:
            return end, self._reading.decode(bytes(text[at:end]))
        except JSONDecodeError:
            raise _malformed("a JSON value was expected", at) from None

    def _store(self, value: Any) -> None:
        self._counted_values(1)
        container, key = self._open[-1]
        if isinstance(container, list):
            container.append(value)
        elif self._reading.put is None:
            container[key] = value
        else:
            self._reading.put(container, key, value)

    def _after_value(self, at: int) -> Steps[tuple[int, bool]]:
        """Return the position of the next element, and whether there is one; brackets that close its containers are
        passed over."""
        text = self._text
        while self._open:
            at = yield from _run(_SPACE, text, at)
            if at < len(text) and text[at] == _COMMA:
                return at + 1, True
            if at >= len(text) or text[at] != _CLOSED_BY[type(self._open[-1][0])]:
                raise _malformed("a comma or the end of a list or object was expected", at)
            self._open.pop()
            at += 1
        return at, False

    def _whole_string(self, at: int) -> Steps[tuple[int, str]]:
        """Return the position after the string literal at `at`, and its text."""
        text = self._text
        end = yield from end_of_string(text, at + 1)
        if end > len(text):
            raise _malformed("unexpected end of data", len(text))
        if end - at > self._reading.max_text_bytes:
            last = len(self._open) - 1  # the innermost list lacks its element: it is not read yet
            raise long_value(
                key if isinstance(one, dict) else len(one) - (depth < last)
                for depth, (one, key) in enumerate(self._open)
            )
        pieces: list[str] = []
        at += 1
        while at < end - 1:
            cut = _whole_characters(text, at, end - 1)
            try:
                pieces.append(self._reading.decode(b"".join((b'"', text[at:cut], b'"'))))
            except JSONDecodeError as error:
                raise _malformed(error.msg.partition(": line ")[0], at) from None
            at = cut
            yield
        return end, "".join(pieces)


def _values_in(found: list[Any] | dict[str, Any]) -> int:
    """Count elements and members of a list or object and of the values in it."""
    inner = found if isinstance(found, list) else found.values()
    return len(found) + sum(_values_in(one) for one in inner if type(one) in _CONTAINERS)


_CONTAINERS = frozenset((list, dict))


def matched(pattern: re.Pattern[bytes], text: AnyText, at: int, limit: int) -> int:
    """Return the end of a match at `at` that stops before `limit`; `at` if nothing matches."""
    found = pattern.match(text, at, limit)
    return at if found is None else found.end()


def _whole_characters(text: AnyText, at: int, end: int) -> int:
    """Return where a piece of a string that begins at `at` may end: within a window, and between two characters."""
    if end - at <= WINDOW_BYTES:
        return end
    cut = at + WINDOW_BYTES
    for _ in range(3):
        if text[cut] & 0xC0 == 0x80:
            cut -= 1
    if _BACKSLASH in text[cut - _LONGEST_CUT : cut]:
        window = bytes(text[at:cut]).replace(b"\\\\", b"  ").replace(b'\\"', b"  ")  # backslashes left begin escapes
        tail = window[-_LONGEST_CUT:]
        cut -= len(tail) - matched(_WHOLE, tail, 0, len(tail))
        if cut == at:
            raise _malformed("invalid escape in string", at)
    return cut


def _malformed(message: str, at: int) -> ValueError:
    return ValueError(f"{message}: byte {at}")


# Locating text that is not Unicode.

# Any bytes, up to half of a surrogate pair or a malformed escape.
_PAIRED = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+",
    re.DOTALL,
)
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_UNMARKED = re.compile(rb'[^\[\]{}"]*+')


class BrokenText(NamedTuple):
    """A text in a JSON value that is not Unicode: the keys and indices of its path, and its fault."""

    path: tuple[str | int, ...]
    fault: str


def broken_text(text: AnyText) -> BrokenText | None:
    """Return the first text of a JSON text with half of a surrogate pair, or with bytes that are not UTF-8; None if
    there is no such text, or its place is unknown.

    Takes time in proportion to the text, without holding the GIL for more than a few milliseconds.
    """
    return completed(_broken_text(text))


def _broken_text(text: AnyText) -> Steps[BrokenText | None]:
    before, at = -1, 0
    while at > before:  # the next window begins with the escape that the last one cut
        before, at = at, matched(_PAIRED, text, at, at + WINDOW_BYTES)
        yield
    half = _HALF.match(text, at)
    fault = "not valid UTF-8" if half is None else f"half of a surrogate pair, {half.group().decode()}"
    if half is None:
        at = yield from _invalid_utf8(text)
        if at < 0:
            return None
    closing = yield from _closing(text, at)
    begin = bytearray()
    for start in range(0, at, WINDOW_BYTES):  # in parts: one copy of all would hold the GIL
        begin += text[start : min(start + WINDOW_BYTES, at)]
        yield
    for end in (b'"', b'":0'):  # the text is a value, or the key of a member
        begin[at:] = end + closing
        try:
            value = yield from decoded(begin)
        except (ValueError, InvalidInput):
            continue
        return BrokenText(tuple(_last(value)), fault)
    return None


def _invalid_utf8(text: AnyText) -> Steps[int]:
    """Return the position of the first byte that is not UTF-8, -1 if all are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(text), WINDOW_BYTES):
        pending = len(decoder.getstate()[0])
        try:
            decoder.decode(text[at : at + WINDOW_BYTES], at + WINDOW_BYTES >= len(text))
        except UnicodeDecodeError as error:
            return at - pending + error.start
        yield
    return -1


def _closing(text: AnyText, stop: int) -> Steps[bytes]:
    """Return the brackets that close the lists and objects that are open at `stop`, which is within a string."""
    opened, at, token = bytearray(), 0, 0
    while (at := (yield from _run(_UNMARKED, text, at))) < stop:
        first = text[at]
        at += 1
        if first == _QUOTE:
            at = yield from end_of_string(text, at)
        elif first in _OPENING:
            opened.append(_CLOSED_BY[dict if first == _BRACE else list])
        elif opened:
            opened.pop()
        token += 1
        if token % _TOKENS_A_STEP == 0:
            yield
    return bytes(reversed(opened))


def _last(value: Any) -> Iterator[str | int]:
    """Return the keys and indices that lead to the last value within a value."""
    while value and isinstance(value, (list, dict)):
        step = len(value) - 1 if isinstance(value, list) else next(reversed(value))
        yield step
        value = value[step]
