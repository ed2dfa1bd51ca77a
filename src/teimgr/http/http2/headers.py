"""HPACK (RFC 7541): decoder of received header blocks, with a cache of repeated ones, and encoder of response headers.

The static table and the decoding of Huffman strings are those of the `hpack` library, and so is what is refused. The
encoder's literals enter no dynamic table, so they cost no state and no search.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache

from hpack import HPACKError
from hpack.huffman_table import decode_huffman
from hpack.table import HeaderTable

Headers = Sequence[tuple[bytes, bytes]]

MAX_HEADER_BYTES = 16_384
_STATIC: tuple[tuple[bytes, bytes], ...] = HeaderTable.STATIC_TABLE
_MAX_TABLE_BYTES = 4096
_FIELD_BYTES = 32  # of a field besides its name and value (RFC 7541, section 4.1)
# Blocks in the cache, their longest, and their most fields: one byte can stand for a field.
_CACHED_BLOCKS = 32
_CACHED_BLOCK_BYTES = 1024
_CACHED_FIELDS = 64


class InvalidBlock(Exception):
    """A header block is malformed; the connection cannot go on, as its table is lost."""


class BlockTooLarge(InvalidBlock):
    """The headers of a block exceed `MAX_HEADER_BYTES`."""


class HeaderDecoder:
    """Decodes the header blocks of one connection, in their order.

    A block that leaves the table as it was gives the same headers while the table stays so; clients send such blocks
    for most calls.
    """

    def __init__(self) -> None:
        self._table: deque[tuple[bytes, bytes]] = deque()  # the newest first
        self._table_bytes = 0
        self._table_limit = _MAX_TABLE_BYTES
        self._changes = 0
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """The fields of a block.

        Raises:
            BlockTooLarge: they are more than `MAX_HEADER_BYTES`, 32 for each field included.
            InvalidBlock: the block is malformed.
        """
        known = self._known.get(block)
        if known is not None:
            return known
        before = self._changes
        try:
            headers = tuple(self._decode(block))
        except IndexError:
            raise InvalidBlock("a header block is cut off, or names a field that is not in the table") from None
        except HPACKError as error:
            raise InvalidBlock(str(error)) from error
        if before != self._changes:
            self._known.clear()
        elif len(block) <= _CACHED_BLOCK_BYTES and len(headers) <= _CACHED_FIELDS:
            if len(self._known) == _CACHED_BLOCKS:
                del self._known[next(iter(self._known))]
            self._known[block] = headers
        return headers

    def _decode(self, block: bytes) -> list[tuple[bytes, bytes]]:
        """Raises IndexError: the block is cut off; else as `decode`."""
        fields: list[tuple[bytes, bytes]] = []
        at, end, size = 0, len(block), 0
        while at < end:
            first = block[at]
            if first >= 0x80:
                index, at = _integer(block, at, 0x7F)
                field = self._field(index)
            elif first & 0x60 == 0x20:
                if fields:
                    raise InvalidBlock("a size of the table behind the first field")
                limit, at = _integer(block, at, 0x1F)
                self._resize(limit)
                continue
            else:
                index, at = _integer(block, at, 0x3F if first >= 0x40 else 0x0F)
                if index:
                    name = self._field(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                field = name, value
                if first >= 0x40:
                    self._add(field)
            fields.append(field)
            size += len(field[0]) + len(field[1]) + _FIELD_BYTES
            if size > MAX_HEADER_BYTES:
                raise BlockTooLarge(f"headers of more than {MAX_HEADER_BYTES} bytes")
        return fields

    def _field(self, index: int) -> tuple[bytes, bytes]:
        if index > len(_STATIC):
            return self._table[index - len(_STATIC) - 1]
        if not index:
            raise IndexError
        return _STATIC[index - 1]

    def _add(self, field: tuple[bytes, bytes]) -> None:
        """Enter a field into the table; one that is larger than the table empties it."""
        self._changes += 1
        self._table.appendleft(field)
        self._table_bytes += len(field[0]) + len(field[1]) + _FIELD_BYTES
        self._evict()

    def _resize(self, limit: int) -> None:
        if limit > _MAX_TABLE_BYTES:
            raise InvalidBlock(f"a table of {limit} bytes")
        if limit != self._table_limit:
            self._changes += 1
            self._table_limit = limit
            self._evict()

    def _evict(self) -> None:
        while self._table_bytes > self._table_limit:
            name, value = self._table.pop()
            self._table_bytes -= len(name) + len(value) + _FIELD_BYTES


def _integer(block: bytes, at: int, mask: int) -> tuple[int, int]:
    """The integer whose first bits are those of `mask` at `at` (section 5.1), of at most six bytes, and its end."""
    value = block[at] & mask
    at += 1
    if value < mask:
        return value, at
    for shift in range(0, 35, 7):
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise InvalidBlock("an integer of more than six bytes")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    """The string at `at` (section 5.2), and its end."""
    is_encoded = block[at] & 0x80
    length, at = _integer(block, at, 0x7F)
    end = at + length
    if end > len(block):
        raise IndexError
    text = block[at:end]
    return (decode_huffman(text) if is_encoded else text), end


_SHORT = tuple(bytes((value,)) for value in range(0x7F))
# Of fields that are encoded once: most replies have the same ones.
_KEPT_FIELDS, _KEPT_BYTES = 64, 64


def _literal(name: bytes, value: bytes) -> bytes:
    """A field, without indexing (RFC 7541, section 6.2.2)."""
    if name == b":status" and value == b"200":
        return b"\x88"  # of the static table
    return b"".join((b"\0", _encoded_integer(len(name)), name, _encoded_integer(len(value)), value))


_kept_literal = lru_cache(_KEPT_FIELDS)(_literal)


def _encoded_integer(value: int) -> bytes:
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
