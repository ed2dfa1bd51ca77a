"""Image files of callers: format and size from the header, then the pixels, each within limits.

An image is decoded to RGB: turned by its EXIF orientation, alpha on white, 16 bits scaled to 8, the first frame of an
animation. Pillow gets only the parts of a file that decoding needs (`parts`).
"""

from __future__ import annotations

import ctypes
import functools
import io
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
from PIL import Image, ImageFile

from teimgr.engine.images import memory, parts
from teimgr.engine.native_library import give_way
from teimgr.errors import InvalidInput

MAX_PIXELS = 50_000_000
"""Limit of one image, by its header, and of all images being decoded at a time."""
MAX_SIDE = 2**16  # Pillow keeps a pointer per line, and filter coefficients per pixel of a side
MAX_FILE_BYTES = 20 * 2**20
FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
_IN_STEPS = ("JPEG", "PNG")  # decoded into our memory; Pillow's modules for the other formats allocate their own
_STEP_BYTES = 2**14  # per step of decoding, about a millisecond
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_ON_THE_SIDE = (5, 6, 7, 8)
_KNOWN_OTHERS = (
    (
        b"%PDF",
        "a PDF document, which is embedded page by page: `teimgr embed` does that, and /embed and /rerank take "
        '{"type": "pdf", "data": …, "page": 1}',
    ),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"<svg", "SVG"),
    (b"<?xml", "SVG or other XML"),
)
_WAY_OUT = "send JPEG, PNG, WebP or GIF"

# `read_size` refuses larger images by their header. Pillow's limit would apply to the whole process.
Image.MAX_IMAGE_PIXELS = None


class _Steps(io.BytesIO):
    """A file that gives way to queries before each step of reading."""

    def read(self, size: int | None = -1, /) -> bytes:
        give_way()
        return super().read(size)


class Size(NamedTuple):
    """Format and size of an image file, from its header: `width` and `height` in pixels, after its EXIF orientation."""

    format: str
    width: int
    height: int


def read_size(data: bytes) -> Size:
    """Read format and size of an image file from its header.

    Raises:
        InvalidInput: its format is not allowed, its beginning is broken, or it is too large.
    """
    if not data:
        raise InvalidInput("Input validation error: the image is empty: it has no bytes")
    if len(data) > MAX_FILE_BYTES:
        raise InvalidInput(
            f"Input validation error: the image has {len(data):,} bytes, and {MAX_FILE_BYTES:,} are allowed: send a "
            "smaller one"
        )
    form = _format(data)
    found = _parts(data, form)
    if form == "WEBP":
        width, height = _webp_size(data)
    else:
        with _opened(found.pixels, form) as image:
            width, height = image.size
    if width < 1 or height < 1:
        raise _broken(form)
    if width * height > MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise InvalidInput(
            f"Input validation error: the image has {width} x {height} pixels, and {MAX_PIXELS:,} are allowed, "
            f"{MAX_SIDE:,} on a side: send it smaller, models read some 224 x 224"
        )
    return Size(form, height, width) if found.turn in _ON_THE_SIDE else Size(form, width, height)


def decode(data: bytes) -> Image.Image:
    """Decode a file that `read_size` accepted to an upright RGB image on white.

    Raises:
        InvalidInput: the file is truncated or broken, or its pixels have a format that is not supported.
    """
    form = _format(data)
    found = _parts(data, form)
    with _opened(found.pixels, form) as image:
        loaded: Image.Image | None = None
        try:
            if form in _IN_STEPS:
                memory.give(image)
                image.decodermaxblock = _STEP_BYTES
            elif form == "WEBP" and memory.is_large(image.size):
                loaded = webp_pixels(data, image.mode, image.size)
            if loaded is None:
                image.load()
        except (OSError, SyntaxError, ValueError, EOFError, MemoryError, IndexError) as error:
            raise _broken(form) from error
        if image.width * image.height > MAX_PIXELS:  # the parts of the file contradict each other
            raise _broken(form)
        turn = _TURNS.get(found.turn)
        upright = to_rgb(loaded or image)
        return upright if turn is None else memory.turned(upright, turn)


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert `image` to RGB: 16 bits divided by 257, alpha on white.

    Raises:
        InvalidInput: the range of its numbers is not known.
    """
    if image.mode in ("F", "I"):
        raise InvalidInput(
            f"Input validation error: the image has pixels of Pillow's mode {image.mode}, of which black and white are "
            f"not known: {_WAY_OUT} of 8 or 16 bits"
        )
    is_transparent = "A" in image.getbands() or image.info.get("transparency") is not None
    if image.mode == "RGB" and not is_transparent:
        return image
    convert = _scaled if image.mode.startswith("I;16") else _on_white if is_transparent else _converted
    found = memory.blank("RGB", image.size)
    for top, bottom in memory.strips(image):
        found.paste(convert(image.crop((0, top, image.width, bottom))), (0, top))
    return found


def _converted(image: Image.Image) -> Image.Image:
    return image.convert("RGB")


def _on_white(image: Image.Image) -> Image.Image:
    strip = image.convert("RGBA")
    white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, strip).convert("RGB")


def _scaled(image: Image.Image) -> Image.Image:
    """Scale grey of 16 bits to 8; its transparent value becomes white."""
    grey = np.asarray(image).astype(np.uint32)
    scaled = ((grey + 128) // 257).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        scaled[grey == transparent] = 255
    return Image.fromarray(scaled).convert("RGB")


def _format(data: bytes) -> str:
    if data[:3] == b"\xff\xd8\xff":
        return "JPEG"
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return "PNG"
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return "GIF"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    named = next((name for start, name in _KNOWN_OTHERS if data.lstrip()[:16].lower().startswith(start.lower())), None)
    if named is None and data[4:8] == b"ftyp":
        named = "HEIC, AVIF or video"
    raise InvalidInput(
        "Input validation error: the bytes are not an image of an allowed format"
        + (f", but {named}" if named else "")
        + f": {_WAY_OUT}"
    )


def _parts(data: bytes, form: str) -> parts.Parts:
    try:
        return parts.read(data, form)
    except parts.BrokenFileError as error:
        raise _broken(form) from error


def _opened(data: bytes, form: str) -> ImageFile.ImageFile:
    try:
        return Image.open(_Steps(data), formats=(form,))
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        IndexError,
        TypeError,
    ) as error:  # its text has an address
        raise _broken(form) from error


def _broken(form: str) -> InvalidInput:
    return InvalidInput(
        f"Input validation error: the image cannot be decoded: the {form} file is truncated or broken: send it whole"
    )


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read the size of the canvas before Pillow allocates one."""
    kind, at = data[12:16], data[20:]
    if kind == b"VP8X" and len(at) >= 10:
        return int.from_bytes(at[4:7], "little") + 1, int.from_bytes(at[7:10], "little") + 1
    if kind == b"VP8L" and len(at) >= 5 and at[0] == 0x2F:
        bits = int.from_bytes(at[1:5], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 " and len(at) >= 10 and at[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(at[6:8], "little") & 0x3FFF, int.from_bytes(at[8:10], "little") & 0x3FFF
    raise _broken("WEBP")


def webp_pixels(data: bytes, mode: str, size: tuple[int, int]) -> Image.Image | None:
    """Return the pixels of a large WebP image (of an animation, the first frame); `mode` is RGB or RGBA. They are
    decoded by Pillow's libwebp, without Pillow's copy under the GIL. None if that library cannot be used.

    Raises:
        OSError: the file is truncated or broken.
    """
    decode = _webp_decoder()
    if decode is None or mode not in ("RGB", "RGBA"):
        return None
    frame = parts.first_webp_frame(data) or parts.Frame(data, size, (0, 0))
    (width, height), (left, top) = frame.size, frame.place
    if left + width > size[0] or top + height > size[1]:
        raise OSError("a frame beyond the picture")
    pixels, address = memory.mapped(mode, frame.size)
    if not decode(frame.file, len(frame.file), address, width * height * 4, width * 4):
        raise OSError("broken")
    if frame.size == size:
        return pixels
    whole = memory.blank(mode, size)
    for first, last in memory.strips(pixels):
        whole.paste(pixels.crop((0, first, width, last)), (left, top + first))
    return whole


@functools.cache
def _webp_decoder() -> Any:
    """Return WebPDecodeRGBAInto, called without the GIL; None if Pillow has no such library."""
    found = sorted((Path(PIL.__file__).parent.parent / "pillow.libs").glob("libwebp-*.so*"))
    if not found or not memory.IS_MAPPED:
        return None
    decode = ctypes.CDLL(str(found[0])).WebPDecodeRGBAInto
    decode.restype = ctypes.c_void_p
    decode.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return decode
