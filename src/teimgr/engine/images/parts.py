"""What an image file consists of, before Pillow: the parts that its pixels come from, and the turn in its EXIF.

Pillow reads comments, profiles and EXIF in Python, with work that their sender chooses: it is given none of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

_MAX_PARTS = 2_000  # segments, chunks or blocks of a file: a photograph has some dozens
_PART_BYTES = 2_048  # for each of which pixels may be in one more: encoders write them in chunks of some KiB
_MAX_TABLE_BYTES = 2**17  # of what stands before the pixels of a JPEG; tables and an image's head take some KiB
_MAX_SCANS = 100  # of a JPEG, each over all pixels: encoders write a dozen
_MAX_FILL_BYTES = 64  # before a marker of JPEG
_MAX_EXIF_BYTES = 2**16
_EXIF = b"Exif\0\0"
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}  # of bytes, by the beginning of a TIFF
_ORIENTATION = 0x0112
_SHORT = 3  # a TIFF's type of 16 bits
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_WEBP_FIRST = 12  # where its parts begin


class BrokenFileError(Exception):
    """The file is cut, or has more parts than are read."""


class Parts(NamedTuple):
    """`pixels` is a file of the same format with what decoding needs alone; `turn` is EXIF's orientation, 1 to 8."""

    pixels: bytes
    turn: int


def read(data: bytes, form: str) -> Parts:
    """The parts of a JPEG, PNG, GIF or WEBP file; raises BrokenFileError."""
    kept, exif = _READERS[form](data)
    return Parts(data if kept is None else b"".join(kept), _orientation(exif))


def _orientation(exif: bytes) -> int:
    """EXIF's orientation, 1 to 8, from the first directory; 1, upright, if it is absent or malformed."""
    exif = exif[:_MAX_EXIF_BYTES].removeprefix(_EXIF)
    order = _ORDERS.get(exif[:4])
    try:
        if order is None:
            return 1
        [start] = struct.unpack_from(f"{order}I", exif, 4)
        [count] = struct.unpack_from(f"{order}H", exif, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, number, value = struct.unpack_from(f"{order}HHIH", exif, at)
            if tag == _ORIENTATION:
                return value if (kind, number) == (_SHORT, 1) and 1 <= value <= 8 else 1
    except struct.error:  # beyond its end
        pass
    return 1


_Found = tuple[list[memoryview] | None, bytes]  # what is kept, None: all; and the EXIF, empty without one


def _jpeg(data: bytes) -> _Found:
    """The segments of a JPEG that decoding needs: no comments, and of applications' segments only JFIF and Adobe, which
    give the colour space.
    """
    view, at, counter, exif, tables = memoryview(data), 2, _Counter(), b"", 0
    kept = [view[:2]]
    while at + 4 <= len(data):
        fill = at
        while at < len(data) and data[at] == 0xFF:
            at += 1
            if at - fill > _MAX_FILL_BYTES:
                raise BrokenFileError
        if at == fill or at >= len(data):
            raise BrokenFileError
        counter.add()
        marker, start = data[at], at - 1
        if marker == 0xDA:  # the picture begins
            if data.count(b"\xff\xda", at, data.find(b"\xff\xd9", at)) > _MAX_SCANS:
                raise BrokenFileError
            return [*kept, view[start:]], exif
        at += 1
        if not 0xD0 <= marker <= 0xD9 and marker != 0x01:
            size = int.from_bytes(data[at : at + 2], "big")
            if size < 2:
                raise BrokenFileError
            at += size
        named = data[start + 4 : start + 10]
        if marker == 0xE1 and named == _EXIF and not exif:
            exif = data[start + 4 : at]
        if _is_needed(marker, named):
            kept.append(view[start:at])
            tables += at - start
            if tables > _MAX_TABLE_BYTES:
                raise BrokenFileError
    raise BrokenFileError


def _is_needed(marker: int, named: bytes) -> bool:
    if marker == 0xE0:
        return named.startswith(b"JFIF\0")
    return marker == 0xEE or not (0xE0 <= marker <= 0xEF or marker == 0xFE)


def _png(data: bytes) -> _Found:
    view, at, counter, exif = memoryview(data), 8, _Counter(len(data)), b""
    kept = [view[:8]]
    while at + 8 <= len(data):
        counter.add()
        start, kind = at, data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        if kind in _PNG_KEPT:
            kept.append(view[start:at])
        elif kind == b"eXIf" and not exif:
            exif = data[start + 8 : min(at - 4, start + 8 + _MAX_EXIF_BYTES)]
        if kind == b"IEND":
            break
    return kept, exif


def _gif(data: bytes) -> _Found:
    """Of what stands before the first image the block that names its transparent colour."""
    view, at, counter = memoryview(data), 13, _Counter()
    if len(data) > 10 and data[10] & 0x80:
        at += 3 << (data[10] & 7) + 1
    kept = [view[:at]]
    while at < len(data) and data[at] != 0x3B:
        if data[at] == 0x2C:
            return [*kept, view[at:]], b""
        counter.add()
        start, is_extension = at, data[at] == 0x21
        at += 1
        if is_extension:
            at += 1
            while at < len(data) and data[at]:
                at += 1 + data[at]
                counter.add()
            at += 1
            if data[start + 1 : start + 2] == b"\xf9":
                kept.append(view[start:at])
    raise BrokenFileError


def _webp(data: bytes) -> _Found:
    """All of it: the library of WebP reads its parts, not a loop in Python."""
    at, counter = _WEBP_FIRST, _Counter(len(data))
    while at + 8 <= len(data):
        counter.add()
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if data[at : at + 4] == b"EXIF":
            return None, data[at + 8 : at + 8 + min(size, _MAX_EXIF_BYTES)]
        at += 8 + size + size % 2
    return None, b""


class _Counter:
    """Counts the parts of a file, those with `size` bytes of pixels among them."""

    def __init__(self, size: int = 0) -> None:
        self._left = _MAX_PARTS + size // _PART_BYTES

    def add(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise BrokenFileError


_READERS: dict[str, Callable[[bytes], _Found]] = {"JPEG": _jpeg, "PNG": _png, "GIF": _gif, "WEBP": _webp}
