"""Large WebP images by the library that Pillow brings along, into memory of ours: Pillow copies them under the GIL."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import PIL
from PIL import Image

from teimgr.engine.images import memory


def decoded(data: bytes, mode: str, size: tuple[int, int]) -> Image.Image | None:
    """The pixels of a WebP image, RGB or RGBA as `mode` says; None for an animation, or without the library.

    Raises:
        OSError: the file is truncated or broken.
    """
    decode = _decoder()
    if decode is None or mode not in ("RGB", "RGBA") or any(kind == b"ANIM" for kind in _parts(data)):
        return None
    width, height = size
    pixels, address = memory.mapped(mode, size)
    if not decode(data, len(data), address, width * height * 4, width * 4):
        raise OSError("broken")
    return pixels


def _parts(data: bytes) -> Iterator[bytes]:
    """The kinds of the first parts of a file: an animation begins among them."""
    at = 12
    for _ in range(4):
        yield data[at : at + 4]
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2


@functools.cache
def _decoder() -> Any:
    """WebPDecodeRGBAInto, called without the GIL; None if Pillow has no such library."""
    found = sorted((Path(PIL.__file__).parent.parent / "pillow.libs").glob("libwebp-*.so*"))
    if not found or not memory.IS_MAPPED:
        return None
    decode = ctypes.CDLL(str(found[0])).WebPDecodeRGBAInto
    decode.restype = ctypes.c_void_p
    decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return decode
