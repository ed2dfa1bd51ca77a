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

_REQUEST_BYTES = 4 * 2**20  # of files; in base64 a third more
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

        An image is the bytes of a file, a path, or an image of Pillow, which is sent as PNG. Several images go in one
        request, `in_flight` requests at a time. The first failure cancels the rest; its message names the image.

        Raises:
            ValidationError: An image has another type, or a file cannot be read.
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
        """A vector for each of some images, the first of which is number `first`, in as many requests as their bytes
        need.
        """
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
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, PathLike)):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise ValidationError(f"{name}: {error}") from error
    if not callable(getattr(image, "save", None)):
        raise ValidationError(f"{name}: must be bytes, a path or an image of Pillow, and is {type(image).__name__}")
    written = io.BytesIO()
    image.save(written, format="PNG")
    return written.getvalue()
