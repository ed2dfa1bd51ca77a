"""Encoder of response headers: HPACK (RFC 7541) in literals that enter no dynamic table, so they cost no state and no
search.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_SHORT = tuple(bytes((value,)) for value in range(0x7F))


@lru_cache(256)
def _name(name: bytes) -> bytes:
    """A literal field without indexing, up to its value (RFC 7541, section 6.2.2)."""
    return b"\0" + _integer(len(name)) + name


def _integer(value: int) -> bytes:
    """An integer with a prefix of seven bits (RFC 7541, section 5.1)."""
    if value < 0x7F:
        return _SHORT[value]
    encoded = bytearray((0x7F,))
    value -= 0x7F
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_headers(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """A header block; names are in lower case."""
    parts = []
    for name, value in headers:
        if name == b":status" and value == b"200":
            parts.append(b"\x88")  # of the static table
        else:
            length = len(value)
            parts += (_name(name), _SHORT[length] if length < 0x7F else _integer(length), value)
    return b"".join(parts)
