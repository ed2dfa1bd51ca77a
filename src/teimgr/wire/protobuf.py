"""Protobuf at byte level: extracts the target and the inner request of a message without decoding the rest.

The rules are proto3's: fields come in any order, unknown ones are skipped, repeated occurrences of a submessage merge
(which is concatenation of their bytes), the last member of a oneof wins. Only the worker parses the inner request.

A message with more fields than any request needs is refused: each field costs Python about a microsecond, and
protobuf's own parser up to a fifth of one, with the GIL held throughout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

from teimgr.errors import InvalidInput

TARGET_FIELD = 1

# Limits on the fields of a message, with those in its groups: of any message; of one with a target and a table, which
# may name 1,024 columns; of others with a target, and of a target, whose fields encoders write once each.
MAX_FIELDS = 4096
_MAX_TABLE_FIELDS = 1152
_MAX_ENVELOPE_FIELDS = 128
# The fields of messages up to this size are not counted: protobuf parses the worst of them in some 3 ms.
UNCOUNTED_BYTES = 64 * 1024
_MAX_TARGET_BYTES = 256 * 1024
_VARINT, _FIXED64, _BYTES, _GROUP, _END_GROUP, _FIXED32 = 0, 1, 2, 3, 4, 5
_MAX_GROUP_DEPTH = 100
# Slices of at least this size are views: a copy would cost more.
_VIEW_BYTES = 16 * 1024
# Limit of joined parts: one call copies them, 1 ms per MB. Encoders write each field once, so nothing is joined.
MAX_JOINED_BYTES = 1024 * 1024

Octets = bytes | bytearray
"""A received message. Large ones are a bytearray, since `bytes` would take a copy."""
Slice = Octets | memoryview


class Target(NamedTuple):
    """Target of a call; at most one field is set."""

    instance_name: str | None = None
    model_id: str | None = None
    instance_index: int | None = None


class Envelope(NamedTuple):
    """The two parts of a multiplexer message, None if absent. Small parts are bytes, large ones views."""

    target: Slice | None
    inner: Slice | None


def malformed(reason: str) -> InvalidInput:
    return InvalidInput(f"Malformed message: {reason}")


def read_envelope(message: Octets, inner_field: int, *, has_table: bool = False) -> Envelope:
    """Return the bytes of `target` and of field `inner_field` (0 = no such field) of a multiplexer message.

    A message that `has_table` may have more fields.

    Raises:
        InvalidInput: the bytes are not a protobuf message, or one of the two comes in parts of more than
            `MAX_JOINED_BYTES` together.
    """
    common = _common_envelope(message, inner_field)
    most = _MAX_TABLE_FIELDS if has_table else _MAX_ENVELOPE_FIELDS
    return common if common is not None else _any_envelope(message, inner_field, most)


def read_target(raw: Slice) -> Target:
    """Parse the `Target` message in `raw`; all three are None if its oneof is unset.

    Raises:
        InvalidInput: the bytes are not such a message, are too many, or a string in it is not UTF-8.
    """
    if len(raw) > _MAX_TARGET_BYTES:
        raise InvalidInput(f"`target` has {len(raw)} bytes, more than {_MAX_TARGET_BYTES}")
    target = Target()
    for number, wire_type, start, end in scan(raw, _MAX_ENVELOPE_FIELDS):
        if wire_type == _BYTES and number == 1:
            target = Target(instance_name=_text(raw[start:end]))
        elif wire_type == _BYTES and number == 2:
            target = Target(model_id=_text(raw[start:end]))
        elif wire_type == _VARINT and number == 3:
            target = Target(instance_index=_varint(raw, start, end)[0] & 0xFFFFFFFF)
    return target


def without_fields(message: Slice, *numbers: int) -> Slice:
    """Return `message`, which has a table, without any occurrence of the given fields, in order; a single part is a
    view.

    Raises:
        InvalidInput: the bytes are not a protobuf message, or the rest has parts of more than `MAX_JOINED_BYTES`.
    """
    return _split(message, numbers, _MAX_TABLE_FIELDS)[0]


def split_off(message: Slice, number: int) -> tuple[Slice, memoryview]:
    """Return `message` as `without_fields`, and the last value of that field as `bytes_field`; raises like both."""
    return _split(message, (number,), MAX_FIELDS)


def _split(message: Slice, numbers: Collection[int], most: int) -> tuple[Slice, memoryview]:
    kept: list[tuple[int, int]] = []
    value = memoryview(b"")
    at = 0
    for number, wire_type, start, end in scan(message, most):
        if number not in numbers:
            joins = kept and kept[-1][1] == at
            kept[-1:] = [(kept[-1][0], end)] if joins else [*kept[-1:], (at, end)]
        elif wire_type == _BYTES:
            value = memoryview(message)[start:end]
        at = end
    parts = [memoryview(message)[start:end] for start, end in kept]
    return parts[0] if len(parts) == 1 and len(parts[0]) > _VIEW_BYTES else _joined(parts), value


def bytes_field(message: Slice, number: int) -> memoryview:
    """Return the last value of a field of bytes, as a view of `message`; empty if the field is absent.

    Raises:
        InvalidInput: the bytes are not a protobuf message.
    """
    found = memoryview(b"")
    for field, wire_type, start, end in scan(message):
        if field == number and wire_type == _BYTES:
            found = memoryview(message)[start:end]
    return found


def varint(value: int) -> bytes:
    """Encode a non-negative integer in protobuf's base-128 form."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def scan(data: Slice, most: int = MAX_FIELDS) -> Iterator[tuple[int, int, int, int]]:
    """Yield each top-level field of a message as (number, wire type, start of its value, end of its value).

    Raises:
        InvalidInput: there are more than `most` fields, or the bytes are not a protobuf message.
    """
    at, size, room = 0, len(data), _Room(most)
    while at < size:
        number, wire_type, at = _tag(data, at, size, room)
        start, at = _value(data, number, wire_type, at, size, 0, room)
        yield number, wire_type, start, at


class _Room:
    """The number of fields that may still follow, and the limit."""

    __slots__ = ("left", "most")

    def __init__(self, most: int) -> None:
        self.left = self.most = most


def _common_envelope(message: Octets, inner_field: int) -> Envelope | None:
    """Read the layout of generated encoders on a fast path: a target below 128 bytes, then only the inner message."""
    size = len(message)
    if size < 2 or message[0] != 0x0A or message[1] > 0x7F:
        return None
    end_of_target = 2 + message[1]
    target = message[2:end_of_target]
    if end_of_target == size:
        return Envelope(target, None)
    if end_of_target + 2 > size or not inner_field or message[end_of_target] != inner_field << 3 | _BYTES:
        return None
    length = message[end_of_target + 1]
    start = end_of_target + 2
    if length > 0x7F:
        length, start = _varint(message, end_of_target + 1, size)
    return Envelope(target, _cut(message, start, size)) if start + length == size else None


def _any_envelope(message: Octets, inner_field: int, most: int) -> Envelope:
    targets: list[Slice] = []
    inners: list[Slice] = []
    for number, wire_type, start, end in scan(message, most):
        if wire_type == _BYTES and number == TARGET_FIELD:
            targets.append(_cut(message, start, end))
        elif wire_type == _BYTES and number == inner_field:
            inners.append(_cut(message, start, end))
    return Envelope(_merge(targets), _merge(inners))


def _merge(occurrences: list[Slice]) -> Slice | None:
    if len(occurrences) > 1:
        return _joined(occurrences)
    return occurrences[0] if occurrences else None


def _joined(parts: list[Slice] | list[memoryview]) -> bytes:
    if len(parts) > 1 and sum(map(len, parts)) > MAX_JOINED_BYTES:
        raise InvalidInput(
            f"The message repeats a field {len(parts)} times, with more than {MAX_JOINED_BYTES} bytes in total: send "
            "each field once"
        )
    return b"".join(parts)


def _cut(message: Octets, start: int, end: int) -> Slice:
    return message[start:end] if end - start < _VIEW_BYTES else memoryview(message)[start:end]


def _text(raw: Slice) -> str:
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise malformed("a string of the target is not valid UTF-8") from None


def _tag(data: Slice, at: int, size: int, room: _Room) -> tuple[int, int, int]:
    room.left -= 1
    if room.left < 0:
        raise InvalidInput(f"The message has more than {room.most} fields")
    tag, after = _varint(data, at, size)
    if tag > 0xFFFFFFFF or after - at > 5:
        raise malformed("a field tag is out of range")
    if tag >> 3 == 0:
        raise malformed("field number 0")
    return tag >> 3, tag & 7, after


def _value(data: Slice, number: int, wire_type: int, at: int, size: int, depth: int, room: _Room) -> tuple[int, int]:
    """Return the start of the value (after its length, if it has one) and its end."""
    start = at
    if wire_type == _BYTES:
        length, start = _varint(data, at, size)
        end = start + length
    elif wire_type == _VARINT:
        end = _varint(data, at, size)[1]
    elif wire_type == _FIXED64:
        end = at + 8
    elif wire_type == _FIXED32:
        end = at + 4
    elif wire_type == _GROUP:
        end = _end_of_group(data, number, at, size, depth + 1, room)
    else:
        raise malformed(f"wire type {wire_type}")
    if end > size:
        raise malformed("it ends inside a field")
    return start, end


def _end_of_group(data: Slice, group: int, at: int, size: int, depth: int, room: _Room) -> int:
    if depth > _MAX_GROUP_DEPTH:
        raise malformed("groups are nested too deeply")
    while at < size:
        number, wire_type, at = _tag(data, at, size, room)
        if wire_type == _END_GROUP:
            if number != group:
                raise malformed("a group ends with the tag of another field")
            return at
        at = _value(data, number, wire_type, at, size, depth, room)[1]
    raise malformed("it ends inside a group")


def _varint(data: Slice, at: int, size: int) -> tuple[int, int]:
    """Return the number at `at` and the offset after it."""
    value = shift = 0
    while at < size:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value > 0xFFFFFFFFFFFFFFFF:
                break
            return value, at
        shift += 7
        if shift > 63:
            break
    raise malformed("a number is truncated or too long")
