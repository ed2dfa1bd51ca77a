"""Calls of models that embed images."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypedDict, Unpack, cast
from urllib.parse import quote

import numpy as np

from teimgr.client.checks import check_options
from teimgr.client.inference_calls import RpcCalls
from teimgr.client.rest import RestCalls
from teimgr.client.values import Vectors
from teimgr.errors import TeimgrError, ValidationError
from teimgr.spec import MAX_TEXT_BYTES

_REQUEST_BYTES = 4 * 2**20  # of files; in base64 a third more
_MAX_FILE_BYTES = MAX_TEXT_BYTES // 4 * 3  # in base64 the longest text of a request
# Modes that PNG lacks, and what they are converted to. `I` and `F`, of 32 bits, have no known range.
_PNG_MODES = {**dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB"), "RGBa": "RGBA", "PA": "RGBA"}
_REQUEST_IMAGES = 8  # the default limit of an instance is 32


class Savable(Protocol):
    """What an image of Pillow can do; Pillow itself is not needed here."""

    def save(self, file: Any, format: str) -> None:
        """Write it."""


Image = bytes | str | PathLike[str] | Savable


class ImageOptions(TypedDict, total=False):
    """`normalize` is true unless given, `dimensions` is the model's."""

    normalize: bool
    dimensions: int


class ImageCalls(RpcCalls, RestCalls):
    """Embed images."""

    async def embed_images(
        self, images: Image | Sequence[Image], *, instance: str, in_flight: int = 4, **options: Unpack[ImageOptions]
    ) -> Vectors:
        """One vector per image, float32 [n, dim], in the space of the model's texts; one image gives one row.

        An image is the bytes of a file, a path, or a Pillow image. A Pillow image is sent as PNG, rotated by its EXIF
        orientation; one opened from a JPEG whose pixels were not read is sent as that file. Several images go in one
        request, `in_flight` requests at a time. The first failure cancels the rest; its message names the image.

        Raises:
            ValidationError: An image has another type, cannot be read or written as PNG, or more than 6 MiB as a file.
        """
        check_options(options, ImageOptions)
        is_one = isinstance(images, (bytes, str, PathLike)) or not isinstance(images, Sequence)
        given = cast(Sequence[Image], [images] if is_one else images)
        path = f"/instances/{quote(instance, safe='')}/embed"
        body: dict[str, Any] = {"normalize": options.get("normalize", True)}
        if (dimensions := options.get("dimensions")) is not None:
            body["dimensions"] = dimensions
        starts = range(0, len(given), _REQUEST_IMAGES)

        async def embed_some(_: int, first: int) -> list[Any]:
            return [row async for row in self._rows(given[first : first + _REQUEST_IMAGES], first, path, body)]

        rows = [row for some in await self._each(starts, in_flight, embed_some) for row in some]
        return np.array(rows, np.float32) if rows else np.empty((0, 0), np.float32)

    async def _rows(self, images: Sequence[Image], first: int, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        """A vector for each image, in as many requests as their bytes need; the first image has the number `first`."""
        files = await asyncio.to_thread(
            lambda: [_file_of(one, f"images[{at}]") for at, one in enumerate(images, first)]
        )
        at = 0
        while at < len(files):
            end = at + 1
            while end < len(files) and sum(map(len, files[at : end + 1])) <= _REQUEST_BYTES:
                end += 1
            items = [{"type": "image", "data": base64.b64encode(one).decode()} for one in files[at:end]]
            try:
                rows = await self._call("POST", path, body=body | {"inputs": items})
            except TeimgrError as error:
                error.reword(f"images[{first + at}] to images[{first + end - 1}]: {error.message}")
                raise
            for row in rows:
                yield row
            at = end


def _file_of(image: Image, name: str) -> bytes:
    """The file of an image.

    Raises:
        ValidationError: it has another type, cannot be read or written, or is too large for a request; with its name.
    """
    if isinstance(image, bytes):
        file = image
    elif not isinstance(image, (str, PathLike)) and not callable(getattr(image, "save", None)):
        raise ValidationError(f"{name}: must be bytes, a path or an image of Pillow, and is {type(image).__name__}")
    else:
        try:
            file = Path(image).read_bytes() if isinstance(image, (str, PathLike)) else _file_of_pillow(image)
        except (OSError, ValueError, SyntaxError) as error:  # Pillow's errors of a broken file
            raise ValidationError(f"{name}: {error}") from error
    if len(file) > _MAX_FILE_BYTES:
        form = " as PNG" if not isinstance(image, (bytes, str, PathLike)) and file.startswith(b"\x89PNG") else ""
        raise ValidationError(
            f"{name}: has {len(file):,} bytes{form}, and {_MAX_FILE_BYTES:,} are allowed in a request: send a JPEG "
            "file, by its path or bytes, a smaller image, or a column `image` by `infer`"
        )
    return file


def _file_of_pillow(image: Savable) -> bytes:
    """The bytes to send for a Pillow image: its own file for a JPEG whose pixels were not read or changed, as a PNG
    would have several times its bytes; else a PNG, rotated by its EXIF orientation.

    Raises:
        OSError, ValueError, SyntaxError: it cannot be read, or no PNG has its mode.
    """
    opened: Any = image
    pending = getattr(opened, "tile", None)  # emptied when the pixels are read
    drafted = getattr(opened, "decoderconfig", None) != ()
    if getattr(opened, "format", None) == "JPEG" and pending and not drafted:
        place = opened.fp.tell()
        opened.fp.seek(0)
        file: bytes = opened.fp.read()
        opened.fp.seek(place)
        return file
    if hasattr(opened, "getexif"):
        from PIL import ImageOps  # a caller with such an image has Pillow

        opened = ImageOps.exif_transpose(opened)
        if (mode := _PNG_MODES.get(opened.mode)) is not None:
            opened = opened.convert(mode)
    written = io.BytesIO()
    opened.save(written, format="PNG")
    return written.getvalue()
