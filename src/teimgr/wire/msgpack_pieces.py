"""Decoding large msgpack bodies in pieces: each call of the library holds the GIL for a few milliseconds."""

from __future__ import annotations

from typing import Any

import msgpack

from teimgr.errors import InvalidInput
from teimgr.wire.json_scan import MAX_CONTAINERS

_PIECE_BYTES = 64 * 1024


def loads(body: bytes | bytearray | memoryview) -> Any:
    """The value of a msgpack text as `msgpack.unpackb(body, raw=False, strict_map_key=False)` gives it.

    Raises:
        ValueError: it is no msgpack, or a list or map has more than `MAX_CONTAINERS` elements.
        InvalidInput: it has more than `MAX_CONTAINERS` lists and maps.
    """
    containers = 0

    def counted(container: Any) -> Any:
        nonlocal containers
        containers += 1
        if containers > MAX_CONTAINERS:
            raise InvalidInput(f"The body has more than {MAX_CONTAINERS} lists and objects")
        return container

    # A list is allocated by the length that its header announces, which no byte has to follow.
    unpacker = msgpack.Unpacker(
        raw=False,
        strict_map_key=False,
        max_buffer_size=len(body),
        max_array_len=min(MAX_CONTAINERS, len(body)),
        max_map_len=min(MAX_CONTAINERS, len(body)),
        list_hook=counted,
        object_hook=counted,
    )
    view = memoryview(body)
    for at in range(0, len(view), _PIECE_BYTES):
        unpacker.feed(view[at : at + _PIECE_BYTES])
        try:
            value = unpacker.unpack()
        except msgpack.OutOfData:
            continue
        except msgpack.UnpackException as error:  # not all are ValueErrors
            raise ValueError(str(error)) from error
        if unpacker.tell() < len(view):
            raise ValueError("unpack(b) received extra data.")
        return value
    raise ValueError("Unpack failed: incomplete input")
