"""Messages between processes: one JSON object each, as a line or after its length.

Lines are used between daemon and mux and between agent and actor, and by bridge, fetcher and the enrolment port.
Between the services of hosts, four bytes with its length precede an object, and the bytes that it announces follow it.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Mapping
from typing import Any, Protocol

from teimgr.errors import TeimgrError, error_from_code

MAX_MUX_LINE_BYTES = 64 << 20
"""The counters of ten thousand instances take far less."""
MAX_MESSAGE_BYTES = 4 << 20
"""Limit of a message with a length before it."""
_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


class MessageLink(Protocol):
    """The daemon's control link to a mux."""

    def send(self, **values: str) -> None:
        """Send a message of values that are JSON already."""


def line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode() + b"\n"


def write_line(writer: asyncio.StreamWriter, **values: object) -> None:
    writer.write(line(values))


async def read_line(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message; None at the end of the stream, which may come within a line.

    Raises:
        ValueError: the line is longer than the reader's limit, or not a JSON object.
        OSError: the connection broke.
    """
    text = await reader.readline()
    return unpack(text) if text.endswith(b"\n") else None


def pack(values: Mapping[str, Any]) -> bytes:
    """Pack a message with its length."""
    text = json.dumps(values, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def unpack_length(data: bytes) -> int:
    """Return the length of a message. Raises ValueError if it is over the limit."""
    (size,) = _LENGTH.unpack(data)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes, the limit is {MAX_MESSAGE_BYTES} bytes")
    return int(size)


def unpack(text: bytes) -> dict[str, Any]:
    """Parse the message in a line, or after its length. Raises ValueError if it is not a JSON object."""
    try:
        message = json.loads(text)
    except RecursionError as error:
        raise ValueError("its lists and objects are nested too deeply") from error
    if not isinstance(message, dict):
        raise ValueError("not a JSON object")  # noqa: TRY004
    return message


def pack_error(error: TeimgrError) -> list[Any]:
    """Return the value of `error` in a message that reports one."""
    return [int(error.code), error.message]


def reported_error(message: Mapping[str, Any]) -> TeimgrError | None:
    """Return the error that a message reports. Raises ValueError and TypeError if it is malformed."""
    if "error" not in message:
        return None
    code, text = message["error"]
    return error_from_code(int(code), str(text))
