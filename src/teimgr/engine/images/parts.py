"""Reads an image file's parts before Pillow: those with pixels, and the orientation in its EXIF or XMP.

Pillow reads comments, profiles and EXIF in Python, at a cost chosen by the sender, so it does not get them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from teimgr.wire.gil import Rests

_MAX_PARTS = 2_000  # segments, chunks or blocks of a file; a photograph has some dozens
_PART_BYTES = 2_048  # allows one more part per this many bytes of pixels; encoders write chunks of some KiB
_MAX_TABLE_BYTES = 2**17  # before the pixels of a JPEG; tables and header take some KiB
_MAX_SCANS = 100  # of a JPEG, each over all pixels; encoders write a dozen
_MAX_FILL_BYTES = 64  # before a JPEG marker
_MAX_EXIF_BYTES = 2**16
_STEP_BYTES = 2**20  # of a JPEG searched per step
_EXIF = b"Exif\0\0"
_XMP, _PNG_XMP = b"http://ns.adobe.com/xap/1.0/\0", b"XML:com.adobe.xmp\0\0\0\0\0"  # prefixes of XMP
_XMP_TURN = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
_ORDERS = {b"II*\0": "<", b"MM\0*": ">"}  # byte order by the beginning of a TIFF
_ORIENTATION = 0x0112
_SIZES = {1: "B", 3: "H", 4: "I"}  # format of integers by TIFF type
_PNG_KEPT = (b"IHDR", b"PLTE", b"tRNS", b"IDAT", b"IEND")
_WEBP_FIRST, _FRAME_HEAD = 12, 16  # offset of the first part of a WebP file, and of a frame's parts in its chunk


class BrokenFileError(Exception):
    """The file is truncated, or has too many parts."""


class Parts(NamedTuple):
    """`pixels` is a file of the same format with only what decoding needs; `turn` is EXIF's orientation, 1 to 8, or
    XMP's if EXIF has none.
    """

    pixels: bytes
    turn: int


def read(data: bytes, form: str) -> Parts:
    """Read the parts of a JPEG, PNG, GIF or WEBP file; raises BrokenFileError."""
    kept, exif, xmp = _READERS[form](data)
    turn = _orientation(exif)
    if turn is None:
        named = _XMP_TURN.search(xmp)
        turn = 1 if named is None else int(named[1])
    return Parts(data if kept is None else b"".join(kept), turn if 1 <= turn <= 8 else 1)


def _orientation(exif: bytes) -> int | None:
    """Return EXIF's orientation from the first directory; 0 if it is not a whole number, None if it is absent."""
    exif = exif[:_MAX_EXIF_BYTES].removeprefix(_EXIF)
    order = _ORDERS.get(exif[:4])
    try:
        if order is None:
            return None
        [start] = struct.unpack_from(f"{order}I", exif, 4)
        [count] = struct.unpack_from(f"{order}H", exif, start)
        for at in range(start + 2, start + 2 + 12 * count, 12):
            tag, kind, number = struct.unpack_from(f"{order}HHI", exif, at)
            if tag == _ORIENTATION:
                [value] = struct.unpack_from(f"{order}{_SIZES.get(kind, 'x')}", exif, at + 8) or (0,)
                return int(value) if number == 1 else 0
    except struct.error:  # an offset beyond the end of the data
        pass
    return None


_Found = tuple[list[memoryview] | None, bytes, bytes]  # parts to keep, None for all; EXIF and XMP, empty without one


def _jpeg(data: bytes) -> _Found:
    """Return the segments of a JPEG that decoding needs: no comments, and only JFIF and Adobe of the application
    segments, since they set the colour space.
    """
    view, at, counter, exif, xmp, tables = memoryview(data), 2, _Counter(), b"", b"", 0
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
        if marker == 0xDA:  # start of scan
            if _has_many_scans(data, at):
                raise BrokenFileError
            return [*kept, view[start:]], exif, xmp
        at += 1
        if not 0xD0 <= marker <= 0xD9 and marker != 0x01:
            size = int.from_bytes(data[at : at + 2], "big")
            if size < 2:
                raise BrokenFileError
            at += size
        named = data[start + 4 : start + 10]
        if marker == 0xE1 and named == _EXIF and not exif:
            exif = data[start + 4 : at]
        if marker == 0xE1 and not xmp and data.startswith(_XMP, start + 4):
            xmp = data[start + 4 : at]
        if _is_needed(marker, named):
            kept.append(view[start:at])
            tables += at - start
            if tables > _MAX_TABLE_BYTES:
                raise BrokenFileError
    raise BrokenFileError


def _has_many_scans(data: bytes, at: int) -> bool:
    """True if more than `_MAX_SCANS` begin from there to the end of the picture; in steps: a search holds the GIL."""
    scans, rests = 0, Rests()
    for begin in range(at, len(data), _STEP_BYTES):
        stop = begin + _STEP_BYTES + 1  # one more byte: a marker has two
        end = data.find(b"\xff\xd9", begin, stop)
        scans += data.count(b"\xff\xda", begin, stop if end < 0 else end)
        if scans > _MAX_SCANS or end >= 0:
            break
        rests()
    return scans > _MAX_SCANS


def _is_needed(marker: int, named: bytes) -> bool:
    if marker == 0xE0:
        return named.startswith(b"JFIF\0")
    return marker == 0xEE or not (0xE0 <= marker <= 0xEF or marker == 0xFE)


def _png(data: bytes) -> _Found:
    view, at, counter, exif, xmp = memoryview(data), 8, _Counter(len(data)), b"", b""
    kept = [view[:8]]
    while at + 8 <= len(data):
        counter.add()
        start, kind = at, data[at + 4 : at + 8]
        at += 12 + int.from_bytes(data[at : at + 4], "big")
        if kind in _PNG_KEPT:
            kept.append(view[start:at])
        elif kind == b"eXIf" and not exif:
            exif = data[start + 8 : min(at - 4, start + 8 + _MAX_EXIF_BYTES)]
        elif kind == b"iTXt" and not xmp and data.startswith(_PNG_XMP, start + 8):
            xmp = data[start + 8 : min(at - 4, start + 8 + _MAX_EXIF_BYTES)]
        if kind == b"IEND":
            break
    return kept, exif, xmp


def _gif(data: bytes) -> _Found:
    """Return the parts of a GIF; before the first image only the block that names its transparent colour is kept."""
    view, at, counter = memoryview(data), 13, _Counter()
    if len(data) > 10 and data[10] & 0x80:
        at += 3 << (data[10] & 7) + 1
    kept = [view[:at]]
    while at < len(data) and data[at] != 0x3B:
        if data[at] == 0x2C:
            return [*kept, view[at:]], b"", b""
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
    """Return all parts: libwebp reads them, not a loop in Python."""
    at, counter, found = _WEBP_FIRST, _Counter(len(data)), dict[bytes, bytes]()
    while at + 8 <= len(data):
        counter.add()
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        if (kind := data[at : at + 4]) in (b"EXIF", b"XMP "):
            found.setdefault(kind, data[at + 8 : at + 8 + min(size, _MAX_EXIF_BYTES)])
        at += 8 + size + size % 2
    return None, found.get(b"EXIF", b""), found.get(b"XMP ", b"")


class Frame(NamedTuple):
    """A frame of an animation, as a still image: its size, and the position of its upper left corner in the picture."""

    file: bytes
    size: tuple[int, int]
    place: tuple[int, int]


def first_webp_frame(data: bytes) -> Frame | None:
    """Return the first frame of a WEBP animation; None for a still image.

    Raises:
        OSError: it has no frame, or a frame without pixels.
    """
    is_animation = False
    for kind, begin, end in _webp_parts(data, _WEBP_FIRST, len(data)):
        if kind in (b"VP8 ", b"VP8L"):
            return None
        is_animation = is_animation or kind == b"ANIM"
        if kind == b"ANMF" and end - begin > _FRAME_HEAD:
            numbers = (int.from_bytes(data[begin + at : begin + at + 3], "little") for at in range(0, 12, 3))
            left, top, width, height = numbers
            size = width + 1, height + 1
            return Frame(_still(data, begin + _FRAME_HEAD, end, size), size, (2 * left, 2 * top))
    if is_animation:
        raise OSError("no frame")
    return None


def _still(data: bytes, begin: int, end: int, size: tuple[int, int]) -> bytes:
    """Make a file of the image in these parts of a frame."""
    kept = {kind: data[first - 8 : last + (last - first) % 2] for kind, first, last in _webp_parts(data, begin, end)}
    pixels = kept.get(b"VP8 ") or kept.get(b"VP8L")
    if not pixels:
        raise OSError("no pixels")
    if b"ALPH" in kept:
        sides = b"".join((side - 1).to_bytes(3, "little") for side in size)
        pixels = b"VP8X\x0a\0\0\0\x10\0\0\0" + sides + kept[b"ALPH"] + pixels
    return b"RIFF" + (len(pixels) + 4).to_bytes(4, "little") + b"WEBP" + pixels


def _webp_parts(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield the first parts between `at` and `end`: kind, and where their content begins and ends."""
    for _ in range(_MAX_PARTS):
        if at + 8 > end:
            return
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        yield data[at : at + 4], at + 8, min(at + 8 + size, end)
        at += 8 + size + size % 2


class _Counter:
    """Counts the parts of a file, including those with `size` bytes of pixels."""

    def __init__(self, size: int = 0) -> None:
        self._left = _MAX_PARTS + size // _PART_BYTES

    def add(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise BrokenFileError


_READERS: dict[str, Callable[[bytes], _Found]] = {"JPEG": _jpeg, "PNG": _png, "GIF": _gif, "WEBP": _webp}
