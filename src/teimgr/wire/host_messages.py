"""Messages between the services of hosts: JSON behind its length, four bytes. Bytes that one announces follow it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from teimgr.errors import TeimgrError, error_from_code

MAX_MESSAGE_BYTES = 4 << 20
_LENGTH = struct.Struct("!I")
LENGTH_BYTES = _LENGTH.size


def pack(values: Mapping[str, Any]) -> bytes:
    """A message with its length."""
    text = json.dumps(values, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def unpack_length(data: bytes) -> int:
    """The length of a message. Raises ValueError where it is over the limit."""
    (size,) = _LENGTH.unpack(data)
    if size > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {size} bytes")
    return int(size)


def unpack(text: bytes) -> dict[str, Any]:
    """A message without its length. Raises ValueError where it is no JSON object."""
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("not a message")  # noqa: TRY004  the bytes are wrong, not the caller
    return message


def pack_error(error: TeimgrError) -> list[Any]:
    """The value of `error` in a message that reports one."""
    return [int(error.code), error.message]


def reported_error(message: Mapping[str, Any]) -> TeimgrError | None:
    """The error that a message reports. Raises ValueError and TypeError where it is malformed."""
    if "error" not in message:
        return None
    code, text = message["error"]
    return error_from_code(int(code), str(text))
