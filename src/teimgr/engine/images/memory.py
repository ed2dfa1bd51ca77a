"""Memory of large images, mapped and unmapped without the GIL.

Pillow holds the GIL while it allocates and frees an image, a tenth of a second for 50 million pixels, during which no
query is answered. It releases the GIL only for work on pixels.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from typing import Any

from PIL import Image

_SMALL_PIXELS = 2**20  # Pillow allocates these in less than a millisecond
_STRIP_PIXELS = 2**20  # per step of moving or converting
_BYTES = {"L": 1, "P": 1, "I;16": 2, "I;16L": 2, "I;16B": 2, "I;16N": 2}  # per pixel of mapped images; others have 4
IS_MAPPED = sys.platform == "linux"
_HUGE = 14  # MADV_HUGEPAGE
_core: Any = vars(Image)["core"]  # Pillow's module in C

if IS_MAPPED:
    _libc = ctypes.CDLL(None, use_errno=True)  # its calls release the GIL
    _libc.mmap.restype = ctypes.c_void_p
    _libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    _libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def blank(mode: str, size: tuple[int, int]) -> Image.Image:
    """Make an image of zeros; raises MemoryError if it cannot be allocated."""
    return Image.Image()._new(core(mode, size))


def give(image: Image.Image) -> None:
    """Allocate memory for the pixels of an opened image, before it is loaded."""
    if is_large(image.size):
        image.im = core(image.mode, image.size)


def core(mode: str, size: tuple[int, int]) -> Any:
    """Make Pillow's internal object of an image of zeros."""
    return _mapped(mode, size)[0] if is_large(size) else _core.new(mode, size)


def is_large(size: tuple[int, int]) -> bool:
    """True if our own memory is used for an image of this size."""
    return IS_MAPPED and size[0] * size[1] > _SMALL_PIXELS


def mapped(mode: str, size: tuple[int, int]) -> tuple[Image.Image, int]:
    """Make an image of zeros; also return the address of its pixels, line by line, valid while the image exists."""
    own, address = _mapped(mode, size)
    return Image.Image()._new(own), address


def _mapped(mode: str, size: tuple[int, int]) -> tuple[Any, int]:
    pixels = _mapping(size[0] * size[1] * _BYTES.get(mode, 4))
    return _core.map_buffer(pixels, size, "raw", 0, (mode, 0, 1)), ctypes.addressof(pixels)


def _mapping(size: int) -> Any:
    """Map zeroed bytes, which are unmapped when the last object that uses them is freed."""
    rights, kind = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    address = _libc.mmap(None, size, rights, kind, -1, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        raise MemoryError(f"no memory for {size} bytes of an image")
    _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(size), _HUGE)
    found = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(found, _libc.munmap, address, size).atexit = False
    return found


def strips(image: Image.Image, pixels: int = _STRIP_PIXELS) -> list[tuple[int, int]]:
    """Split the rows of an image into parts of some milliseconds: first row, and the row after the last."""
    rows = max(1, pixels // image.width)
    return [(top, min(image.height, top + rows)) for top in range(0, image.height, rows)]


def turned(image: Image.Image, turn: Image.Transpose) -> Image.Image:
    """Like `image.transpose(turn)`, strip by strip."""
    width, height = image.size
    is_swapped = turn in _SWAPPING
    found = blank(image.mode, (height, width) if is_swapped else (width, height))
    for top, bottom in strips(image):
        part = image.crop((0, top, width, bottom)).transpose(turn)
        at = height - bottom if turn in _FROM_THE_END else top
        found.paste(part, (at, 0) if is_swapped else (0, at))
    return found


_SWAPPING = (
    *(Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_270),
    *(Image.Transpose.TRANSPOSE, Image.Transpose.TRANSVERSE),
)
_FROM_THE_END = (
    *(Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_180),
    *(Image.Transpose.ROTATE_270, Image.Transpose.TRANSVERSE),
)
