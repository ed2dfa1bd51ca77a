"""Encoder of response headers: HPACK (RFC 7541) in literals that enter no dynamic table, so they cost no state and no
search.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

_SHORT = tuple(bytes((value,)) for value in range(0x7F))
# Of fields that are encoded once: most replies have the same ones.
_KEPT_FIELDS, _KEPT_BYTES = 64, 64


def _literal(name: bytes, value: bytes) -> bytes:
    """A field, without indexing (RFC 7541, section 6.2.2)."""
    if name == b":status" and value == b"200":
        return b"\x88"  # of the static table
    return b"".join((b"\0", _integer(len(name)), name, _integer(len(value)), value))


_kept_literal = lru_cache(_KEPT_FIELDS)(_literal)


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
    return b"".join(
        [_kept_literal(name, value) if len(value) <= _KEPT_BYTES else _literal(name, value) for name, value in headers]
    )
