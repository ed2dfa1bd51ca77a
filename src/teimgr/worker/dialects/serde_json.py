"""Reads JSON by the rules of serde_json, TEI's parser of request bodies, with its faults.

A body is read once, from left to right, up to the first fault of syntax or type. The rules are those of serde_json 1
(https://docs.rs/serde_json, `de.rs` and `read.rs`), the path before a fault is serde_path_to_error's, and the two kinds
of faults are axum's (https://docs.rs/axum, `JsonRejection`). The time is linear in the body.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from teimgr.errors import InvalidInput
from teimgr.spec import MAX_TEXT_BYTES
from teimgr.wire.json_scan import LONG_TEXT, WINDOW_BYTES, Steps, matched, occurrences, too_large
from teimgr.worker.dialects import serde_text
from teimgr.worker.dialects.serde_text import shown

Path = tuple[str | int, ...]
_UNKNOWN = "?"  # the path segment of an unread key

_MAX_DEPTH = 128
# Limit of values and ends of lists and objects that are read singly: about a second. Runs of flat ones do not count
# (`serde_text`).
_MAX_STEPS = 100_000
# Read in one step of a shared thread: a millisecond or two.
_VALUES_A_STEP, _BYTES_A_STEP = 64, 2**16
_U64 = 2**64
_I63 = 2**63
_MAX_NUMBER_DIGITS = 2**16
_MAX_DIGITS = 21  # of a 64-bit integer, with its sign
_MAX_EXPONENT = 2**31 - 1

_SPACE = re.compile(rb"[ \n\t\r]*+")
# Valid parts of a string. In a skipped string, half of a surrogate pair is valid too.
_ESCAPE = rb'\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
_PAIR = rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_RIGHT = re.compile(rb'(?:[^"\\\x00-\x1f]++|' + _ESCAPE + rb"|" + _PAIR + rb")*+")
_SKIPPED = re.compile(rb'(?:[^"\\\x00-\x1f]++|' + _ESCAPE + rb"|\\u[0-9a-fA-F]{4})*+")
_DIGITS = re.compile(rb"[0-9]*+")
_HEX = re.compile(rb"[0-9a-fA-F]{4}")
_ESCAPES = {ord(key): value for key, value in zip('"\\/bfnrt', b'"\\/\b\f\n\r\t', strict=True)}
_IDENTS: Mapping[int, tuple[bytes, bool | None]] = {
    ord("n"): (b"null", None),
    ord("t"): (b"true", True),
    ord("f"): (b"false", False),
}

_EOF_VALUE, _EOF_LIST = "EOF while parsing a value", "EOF while parsing a list"
EOF_OBJECT, _EOF_STRING = "EOF while parsing an object", "EOF while parsing a string"
_CONTROL = "control character (\\u0000-\\u001F) found while parsing a string"
_NOT_A_NUMBER = "invalid number"


class Fault(Exception):
    """The first fault of a body.

    Attributes:
        is_syntax: Whether the part read is not JSON; otherwise a value has the wrong type.
        index: The byte at the fault's line and column; None until the enclosing value ends.
        path: The fields and indices that lead to the fault; None until known.
    """

    def __init__(self, message: str, index: int | None = None, path: Path | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.is_syntax = index is not None
        self.index = index
        self.path = path

    def set_path(self, path: Path) -> None:
        self.path = path

    def sentence(self, body: bytes) -> str:
        """`inputs[1]: invalid type: null, expected a string at line 1 column 20`."""
        line_start = body.rfind(b"\n", 0, self.index) + 1
        line, column = 1 + occurrences(body, b"\n", line_start), (self.index or 0) - line_start
        return f"{_shown_path(self.path or ())}{self.message} at line {line} column {column}"


def _shown_path(path: Path) -> str:
    if all(part == _UNKNOWN for part in path):
        return ""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(parts).removeprefix(".") + ": "


def is_digit(byte: int) -> bool:
    return 48 <= byte <= 57


class Reader:
    """Reads a body like serde_json, from a current position."""

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.at = 0
        self._depth = 0
        self._steps = 0
        self._pause_at = _BYTES_A_STEP

    def fault(self, message: str) -> Fault:
        """A fault of syntax behind the last byte that was read."""
        return Fault(message, self.at)

    def next_fault(self, message: str) -> Fault:
        """A fault of syntax at the next byte."""
        return Fault(message, min(len(self.body), self.at + 1))

    def peek(self) -> int:
        """The next byte, -1 at the end."""
        return self.body[self.at] if self.at < len(self.body) else -1

    def after_space(self) -> int:
        """The next byte behind white space, -1 at the end."""
        self._pass(_SPACE)
        return self.peek()

    def _pass(self, run: re.Pattern[bytes], limit: int | None = None) -> None:
        """Pass over the bytes of a run, or over `limit` of them and some more."""
        self.at = serde_text.end_of_run(run, self.body, self.at, limit)

    def value_start(self) -> Steps[int]:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise InvalidInput(f"The body has more than {_MAX_STEPS} values before a fault")
        if self.at >= self._pause_at or not self._steps % _VALUES_A_STEP:
            self._pause_at = self.at + _BYTES_A_STEP
            yield
        first = self.after_space()
        if first < 0:
            raise self.next_fault(_EOF_VALUE)
        return first

    def close_object(self) -> None:
        """Read the end of an object."""
        last = self.after_space()
        if last != ord("}"):
            raise self.fault(EOF_OBJECT if last < 0 else "expected value")
        self.at += 1

    @contextmanager
    def nested(self, close: Callable[[], None]) -> Iterator[None]:
        """The inside of a list or object, whose first byte is next; `close` reads its end, after a fault too."""
        self._depth += 1
        if self._depth >= _MAX_DEPTH:
            raise self.next_fault("recursion limit exceeded")
        self.at += 1
        try:
            yield
        except Fault:
            self._depth -= 1
            with suppress(Fault):
                close()
            raise
        self._depth -= 1
        close()

    def end_list(self) -> None:
        first = self.after_space()
        if first == ord("]"):
            self.at += 1
        elif first == ord(","):
            self.at += 1
            raise self.next_fault("trailing comma" if self.after_space() == ord("]") else "trailing characters")
        else:
            raise self.next_fault(_EOF_LIST if first < 0 else "trailing characters")

    def end_object(self) -> None:
        first = self.after_space()
        if first == ord("}"):
            self.at += 1
        elif first < 0:
            raise self.next_fault(EOF_OBJECT)
        else:
            raise self.next_fault("trailing comma" if first == ord(",") else "trailing characters")

    def has_element(self, index: int) -> bool:
        """True if a list, of which `index` elements were read, goes on."""
        first = self.after_space()
        if first < 0:
            raise self.next_fault(_EOF_LIST)
        if first == ord("]"):
            return False
        if index == 0:
            return True
        if first != ord(","):
            raise self.next_fault("expected `,` or `]`")
        self.at += 1
        first = self.after_space()
        if first < 0:
            raise self.next_fault(_EOF_VALUE)
        if first == ord("]"):
            raise self.next_fault("trailing comma")
        return True

    def key(self, index: int) -> str | None:
        """The next key of an object of which `index` were read; None at the object's end."""
        first = self.after_space()
        if first < 0:
            raise self.next_fault(EOF_OBJECT)
        if first == ord("}"):
            return None
        if index:
            if first != ord(","):
                raise self.next_fault("expected `,` or `}`")
            self.at += 1
            first = self.after_space()
            if first < 0:
                raise self.next_fault(_EOF_VALUE)
            if first == ord("}"):
                raise self.next_fault("trailing comma")
        if first != ord('"'):
            raise self.next_fault("key must be a string")
        return self.string()

    def colon(self) -> None:
        first = self.after_space()
        if first != ord(":"):
            raise self.next_fault(EOF_OBJECT if first < 0 else "expected `:`")
        self.at += 1

    def ident(self, first: int) -> bool | None:
        word, value = _IDENTS[first]
        for expected in word:
            found = self.peek()
            if found < 0:
                raise self.fault(_EOF_VALUE)
            self.at += 1
            if found != expected:
                raise self.fault("expected ident")
        return value

    def string(self) -> str:
        """The string whose quotation mark is next.

        Raises:
            InvalidInput: it has more than `MAX_TEXT_BYTES`.
        """
        self.at += 1
        start, is_unicode = self.at, True
        pieces: list[str] = []
        while (end := self._end_of_right_part()) > self.at:
            if end - start > MAX_TEXT_BYTES:
                raise too_large(LONG_TEXT)
            try:
                pieces.append(orjson.loads(b'"%b"' % self.body[self.at : end]))
            except orjson.JSONDecodeError:
                is_unicode = False  # raised later: a syntax fault in the rest of the string comes first
            self.at = end
        special = self.peek()
        if special < 0:
            raise self.fault(_EOF_STRING)
        self.at += 1
        if special == ord("\\"):
            raise self._fault_of_escape()
        if special != ord('"'):
            raise self.fault(_CONTROL)
        if not is_unicode:
            raise self.fault("invalid unicode code point")
        return pieces[0] if len(pieces) == 1 else "".join(pieces)

    def _end_of_right_part(self) -> int:
        """Where a part of a string without faults ends, which a window holds: it cuts no escape and no character."""
        window = self.at + WINDOW_BYTES
        end = matched(_RIGHT, self.body, self.at, window)
        if end < window or end >= len(self.body):
            return end
        whole = next((at for at in range(end, end - 4, -1) if not 0x80 <= self.body[at] < 0xC0), end)
        return whole if whole > self.at else end

    def _fault_of_escape(self) -> Fault:
        """The fault of an escape, whose backslash has been read."""
        letter = self._next_of_string()
        if letter != ord("u"):
            return self.fault("invalid escape")
        if 0xDC00 <= self._hex() <= 0xDFFF:
            return self.fault("lone leading surrogate in hex escape")
        for expected in b"\\u":
            if self._next_of_string() != expected:
                return self.fault("unexpected end of hex escape")
        self._hex()
        return self.fault("lone leading surrogate in hex escape")

    def _next_of_string(self) -> int:
        found = self.peek()
        if found < 0:
            raise self.fault(_EOF_STRING)
        self.at += 1
        return found

    def _hex(self) -> int:
        four = self.body[self.at : self.at + 4]
        self.at += len(four)
        if len(four) < 4:
            raise self.fault(_EOF_STRING)
        if _HEX.fullmatch(four) is None:
            raise self.fault("invalid escape")
        return int(four, 16)

    def number(self) -> int | float:
        """The number whose sign or first digit is next; an integer beyond 64 bits, and -0, is a float."""
        start = self.at
        is_negative = self.peek() == ord("-")
        self.at += is_negative
        if self._integer(_EOF_VALUE) and self.at - start <= _MAX_DIGITS:
            value = -int(self.body[start + 1 : self.at]) if is_negative else int(self.body[start : self.at])
            if is_negative:
                return -float(-value) if value == 0 or -value > _I63 else value
            return value if value < _U64 else float(value)
        value_of_float = float(self.body[start : self.at])
        if math.isinf(value_of_float):
            raise self.fault("number out of range")
        return value_of_float

    def _integer(self, at_end: str | None) -> bool:
        """Read digits, fraction and exponent; whether the latter two are missing.

        `at_end` is the fault of a number that ends with the body; None: it is an invalid one.
        """
        first = self.peek()
        if first < 0:
            raise self.fault(at_end or _NOT_A_NUMBER)
        self.at += 1
        if first == ord("0"):
            if is_digit(self.peek()):
                raise self.next_fault(_NOT_A_NUMBER)
        elif not ord("1") <= first <= ord("9"):
            raise self.fault(_NOT_A_NUMBER)
        start = self.at - 1
        self._digits()
        is_integer = True
        if self.peek() == ord("."):
            self.at += 1
            is_integer = False
            if not self._digits():
                raise self.next_fault(at_end if at_end and self.peek() < 0 else _NOT_A_NUMBER)
        if self.peek() in (ord("e"), ord("E")):
            self._exponent(at_end, is_zero=not self.body[start : self.at].strip(b"0."))
            is_integer = False
        return is_integer

    def _exponent(self, at_end: str | None, *, is_zero: bool) -> None:
        self.at += 1
        is_negative = self.peek() == ord("-")
        self.at += self.peek() in (ord("+"), ord("-"))
        start = self.at
        if not self._digits():
            if self.peek() < 0:
                raise self.fault(at_end or _NOT_A_NUMBER)
            self.at += 1
            raise self.fault(_NOT_A_NUMBER)
        if at_end is not None and not is_zero and not is_negative:
            digits = self.body[start : self.at].lstrip(b"0")
            for count in range(1, min(len(digits), _MAX_DIGITS) + 1):
                if int(digits[:count]) > _MAX_EXPONENT:
                    self.at -= len(digits) - count
                    raise self.fault("number out of range")

    def _digits(self) -> int:
        start = self.at
        self._pass(_DIGITS, _MAX_NUMBER_DIGITS)
        if self.at - start > _MAX_NUMBER_DIGITS:
            raise InvalidInput(f"The body has a number of more than {_MAX_NUMBER_DIGITS} digits")
        return self.at - start

    def wrong_type(self, expected: str) -> Fault:
        """The fault of the next value, which was to be another one; a syntax fault in it comes first."""
        first = self.peek()
        if first in _IDENTS:
            found = shown(self.ident(first))
        elif first == ord("-") or is_digit(first):
            found = shown(self.number())
        elif first == ord('"'):
            found = shown(self.string())
        elif first in (ord("["), ord("{")):
            found = "sequence" if first == ord("[") else "map"
        else:
            return self.next_fault("expected value")
        return Fault(f"invalid type: {found}, expected {expected}")

    def any_value(self, path: Path) -> Steps[Any]:
        """The next value, whatever its type: an object as a dict, null as None."""
        with self.within(path):
            first = yield from self.value_start()
            if first in _IDENTS:
                return self.ident(first)
            if first == ord("-") or is_digit(first):
                return self.number()
            if first == ord('"'):
                return self.string()
            if first == ord("["):
                return (yield from self._any_list(path))
            if first == ord("{"):
                return (yield from self._any_object(path))
            raise self.next_fault("expected value")

    def _any_list(self, path: Path) -> Steps[list[Any]]:
        values: list[Any] = []
        with self.nested(self.end_list):
            while self.has_element(len(values)):
                values.append((yield from self.any_value((*path, len(values)))))
                if self.peek() == ord(","):
                    end, more = serde_text.integers(self.body, self.at + 1)
                    if more:
                        values += more
                        self.at = end
        return values

    def _any_object(self, path: Path) -> Steps[dict[str, Any]]:
        values: dict[str, Any] = {}
        count = 0
        with self.nested(self.end_object):
            while (key := self.key_at(path, count)) is not None:
                self.colon()
                values[key] = yield from self.any_value((*path, _UNKNOWN))
                count += 1
        return values

    def key_at(self, path: Path, index: int) -> str | None:
        try:
            return self.key(index)
        except Fault as fault:
            fault.path = (*path, _UNKNOWN)
            raise

    @contextmanager
    def within(self, path: Path) -> Iterator[None]:
        """Faults of the value at `path` get its path, and where they have none the position behind it."""
        try:
            yield
        except Fault as fault:
            if fault.index is None:
                fault.index = self.at
            if fault.path is None:
                fault.path = path
            raise

    def skip(self, path: Path) -> Steps[None]:
        """Skip a value that no one reads: its syntax counts, its strings and numbers may have any value."""
        with self.within(path):
            yield from self._skip()

    def _skip(self) -> Steps[None]:
        open_frames = bytearray()
        while True:
            if open_frames and open_frames[-1] == ord("["):
                self.at = serde_text.after_elements(self.body, self.at)
            first = yield from self.value_start()
            accept_comma = True
            if first in _IDENTS:
                self.ident(first)
            elif first == ord("-") or is_digit(first):
                self.at += first == ord("-")
                self._integer(None)
            elif first == ord('"'):
                self._skip_string()
            elif first in b"[{":
                accept_comma = False
                end, frames = serde_text.opened(self.body, self.at)
                self.at = end if frames else self.at + 1
                open_frames += frames or bytes((first,))
                if frames.endswith(b"{"):
                    continue
            else:
                raise self.next_fault("expected value")
            if not self._skip_ends(open_frames, accept_comma):
                return
            if open_frames[-1] == ord("{"):
                self.at = serde_text.after_members(self.body, self.at)
                first = self.after_space()
                if first != ord('"'):
                    raise self.next_fault(EOF_OBJECT if first < 0 else "key must be a string")
                self._skip_string()
                self.colon()

    def _skip_ends(self, open_frames: bytearray, accept_comma: bool) -> bool:
        """Skip the ends of lists and objects, and the comma before the next value; whether there is one."""
        while len(open_frames) > 1:
            self.at, ended = serde_text.closed(self.body, self.at, open_frames)
            if not ended:
                break
            del open_frames[len(open_frames) - ended :]
            accept_comma = True
        while open_frames:
            is_list, first = open_frames[-1] == ord("["), self.after_space()
            if first < 0:
                raise self.next_fault(_EOF_LIST if is_list else EOF_OBJECT)
            if first == ord(",") and accept_comma:
                self.at += 1
                return True
            if first != (ord("]") if is_list else ord("}")):
                if accept_comma:
                    raise self.next_fault("expected `,` or `]`" if is_list else "expected `,` or `}`")
                return True
            self.at += 1
            open_frames.pop()
            accept_comma = True
        return False

    def _skip_string(self) -> None:
        self.at += 1
        while True:
            self._pass(_SKIPPED)
            special = self.peek()
            if special < 0:
                raise self.fault(_EOF_STRING)
            if special not in b'"\\':
                raise self.fault(_CONTROL)
            self.at += 1
            if special == ord('"'):
                return
            letter = self._next_of_string()
            if letter == ord("u"):
                self._hex()
            elif letter not in _ESCAPES:
                raise self.fault("invalid escape")
