"""Embedding and tokenizer calls, typed: texts or images in, float32 arrays out; and the base of all inference calls."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, TypedDict, TypeVar, Unpack, cast
from urllib.parse import quote

import numpy as np
from google.protobuf.message import Message

from teimgr.client.checks import (
    check_count,
    check_flag,
    check_limit,
    check_options,
    check_sequence,
    check_source,
    check_text,
)
from teimgr.client.grpc_channel import GrpcChannel
from teimgr.client.payloads import (
    ArrowOptions,
    Compression,
    EmbedOptions,
    Gathered,
    Routing,
    TextOptions,
    Texts,
    arrow_request,
    embed_request,
    lane_metadata,
    pack_texts,
    slices,
    target,
    text_fields,
    unpack_vectors,
    vector,
)
from teimgr.client.rest import RestCalls
from teimgr.client.values import Embedded, Info, SparseVector, Token, Vectors
from teimgr.errors import Internal, TeimgrError, ValidationError
from teimgr.spec import MAX_TEXT_BYTES
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.pb.tei_multiplexer.v1 import multiplexer_pb2 as mux_pb2

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)
ResultT = TypeVar("ResultT")

_STREAM_WINDOW = 512
_BATCH_WINDOW = 4


class RpcCalls:
    """Base of the classes whose methods are gRPC calls. Every method raises the `TeimgrError` of the reply's status.

    `instance=` or `model=` selects the instance. Calls end after the client's `timeout_s`; streams when a reply is
    owed for that long.
    """

    _grpc: GrpcChannel
    _timeout_s: float

    async def _unary(
        self, method: str, request: type[Message], reply: type[MessageT], options: Routing, **fields: Any
    ) -> MessageT:
        """Call a method whose message has the routing as `target` and a message of `fields` as `request`."""
        message = request(target=target(options), **{"request": fields} if fields else {})
        chosen = lane_metadata(options)
        return reply.FromString(await self._grpc.unary(method, message.SerializeToString(), self._timeout_s, chosen))

    async def _each_text(
        self, texts: str | Sequence[str], in_flight: int, call: Callable[[str], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """Like `_each`, for texts; one text is a sequence of one.

        Raises:
            ValidationError: `texts` is not a sequence, or an item is not a text.
        """
        several = [texts] if isinstance(texts, str) else texts
        check_sequence("texts", several)

        async def call_one(position: int, text: str) -> ResultT:
            check_text(f"texts[{position}]", text)
            return await call(text)

        return await self._each(several, in_flight, call_one)

    async def _each(
        self, items: Sequence[T], in_flight: int, call: Callable[[int, T], Coroutine[Any, Any, ResultT]]
    ) -> list[ResultT]:
        """The results of `call` for every item and its position, in order, `in_flight` at a time.

        The first failure cancels the rest.

        Raises:
            ValidationError: `in_flight` is below 1.
        """
        check_limit("in_flight", in_flight)
        if len(items) == 1:  # a single query needs no task
            return [await call(0, items[0])]
        results: dict[int, ResultT] = {}
        waiting = iter(enumerate(items))

        async def work() -> None:
            for position, item in waiting:
                results[position] = await call(position, item)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(in_flight, len(items))):
                    group.create_task(work())
        except BaseExceptionGroup as failures:
            # Only the first failure is raised, since it caused the others.
            error: BaseException = failures
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            raise error from None
        return [results[position] for position in range(len(items))]


# Limits on what one call on a thread reads from the source: items, and time.
_ITEMS = 256
_TAKE_S = 0.002


async def items(source: Iterable[T] | AsyncIterable[T], at_once: int = _ITEMS) -> AsyncIterator[T]:
    """Yield the items of `source` in order; a plain iterable is advanced on a thread, so it may block.

    At most `at_once` items are read ahead: 1 for large ones.
    """
    if isinstance(source, AsyncIterable):
        async for item in source:
            yield item
        return
    iterator = iter(source)
    failure: Exception | None = None
    while failure is None:
        taken, failure = await asyncio.to_thread(_take, iterator, at_once)
        for item in taken:
            yield item
        if not taken:
            break
    if failure is not None:
        raise failure


def _take(iterator: Iterator[T], at_once: int) -> tuple[list[T], Exception | None]:
    """Some items, none at the end, and what the source raised after them."""
    taken: list[T] = []
    limit = time.monotonic() + _TAKE_S
    try:
        for item in iterator:
            taken.append(item)
            if len(taken) == at_once or time.monotonic() > limit:
                break
    except Exception as failure:
        return taken, failure
    return taken, None


async def requests_of(
    name: str, source: Iterable[T] | AsyncIterable[T], request: Callable[[str, T], bytes], at_once: int = _ITEMS
) -> AsyncIterator[bytes]:
    """Yield a request for each of `items`, made from its name for messages (`texts[3]`) and the item."""
    number = 0
    async for item in items(source, at_once):
        yield request(f"{name}[{number}]", item)
        number += 1


class InferenceCalls(RpcCalls):
    """Calls of embedding models of every kind, and of their tokenizers."""

    async def embed(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **options: Unpack[EmbedOptions]
    ) -> Vectors:
        """One vector per text, float32 [n, dim]; one text gives one row, no text none ([0, 0]).

        Each text is its own call, `in_flight` at a time; for thousands of texts `embed_arrow` is faster.
        The first failure cancels the rest.
        """
        check_options(options, EmbedOptions)

        chosen = lane_metadata(options)

        async def embed_one(text: str) -> Vectors:
            return vector(await self._grpc.unary("Embed", embed_request(text, options), self._timeout_s, chosen))

        rows = await self._each_text(texts, in_flight, embed_one)
        return np.stack(rows) if rows else np.empty((0, 0), np.float32)

    async def embed_sparse(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **options: Unpack[TextOptions]
    ) -> Sequence[SparseVector]:
        """The weights of every text over the model's vocabulary; one text gives one vector."""
        check_options(options, TextOptions)

        async def embed_one(text: str) -> SparseVector:
            types = mux_pb2.EmbedSparseRequest, tei_pb2.EmbedSparseResponse
            return SparseVector.from_message(
                await self._unary("EmbedSparse", *types, options, **text_fields(text, options))
            )

        return await self._each_text(texts, in_flight, embed_one)

    async def embed_all(
        self, texts: str | Sequence[str], *, in_flight: int = 64, **options: Unpack[TextOptions]
    ) -> Sequence[Vectors]:
        """A vector for every token of every text, float32 [tokens, dim] each; one text gives one matrix.

        A late-interaction model gives the vectors it compares, any other its last hidden states.
        """
        check_options(options, TextOptions)

        async def embed_one(text: str) -> Vectors:
            types = mux_pb2.EmbedAllRequest, tei_pb2.EmbedAllResponse
            reply = await self._unary("EmbedAll", *types, options, **text_fields(text, options))
            rows = [np.array(token.embeddings, np.float32) for token in reply.token_embeddings]
            return np.stack(rows) if rows else np.empty((0, 0), np.float32)

        return await self._each_text(texts, in_flight, embed_one)

    async def embed_stream(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        window: int = _STREAM_WINDOW,
        **options: Unpack[EmbedOptions],
    ) -> AsyncIterator[Vectors]:
        """One row (float32 [dim]) per text, in order, while `texts` is still being read.

        Memory is constant: at most `window` texts are sent and not answered. A plain iterable is read on a thread.
        """
        check_options(options, EmbedOptions)
        check_limit("window", window)
        check_source("texts", texts)

        def request(name: str, text: str) -> bytes:
            check_text(name, text)
            return embed_request(text, options)

        requests, chosen = requests_of("texts", texts, request), lane_metadata(options)
        replies = self._grpc.stream("EmbedStream", requests, window=window, idle_s=self._timeout_s, metadata=chosen)
        async for reply in replies:
            yield vector(reply)

    async def embed_arrow(
        self,
        texts: Texts,
        *,
        batch_rows: int = 2048,
        in_flight: int = 2,
        compression: Compression | None = None,
        **options: Unpack[ArrowOptions],
    ) -> Embedded:
        """Many texts as Arrow batches: one vector or one error per text, in order.

        `batch_rows` texts travel per call, `in_flight` calls at a time; `compression` is that of the request.
        A text that fails alone has its reason in `Embedded.errors`; a failing call raises.
        """
        check_options(options, ArrowOptions)
        pieces = list(slices(texts, batch_rows))
        gathered, chosen = Gathered(len(texts)), lane_metadata(options)

        async def embed_slice(at: int, piece: Texts) -> None:
            request = arrow_request(pack_texts(piece, compression, first_row=at * batch_rows), options)
            embedded = unpack_vectors(await self._grpc.unary("EmbedArrow", request, self._timeout_s, chosen))
            if len(embedded.vectors) != len(piece):
                raise Internal(f"the server answered {len(embedded.vectors)} rows for {len(piece)} texts")
            gathered.add(at * batch_rows, embedded)

        await self._each(pieces, in_flight, embed_slice)
        return gathered.result()

    async def embed_arrow_stream(
        self,
        batches: Iterable[Texts] | AsyncIterable[Texts],
        *,
        compression: Compression | None = None,
        window: int = _BATCH_WINDOW,
        **options: Unpack[ArrowOptions],
    ) -> AsyncIterator[Embedded]:
        """One answer per batch, in order, with at most `window` batches sent and not answered."""
        check_options(options, ArrowOptions)
        check_limit("window", window)
        check_source("batches", batches)

        def request(name: str, batch: Texts) -> bytes:
            return arrow_request(pack_texts(batch, compression, name=name), options)

        requests, chosen = requests_of("batches", batches, request, at_once=1), lane_metadata(options)
        replies = self._grpc.stream(
            "EmbedArrowStream", requests, window=window, idle_s=self._timeout_s, metadata=chosen
        )
        async for reply in replies:
            yield unpack_vectors(reply)

    async def info(self, **routing: Unpack[Routing]) -> Info:
        """Properties and limits of the served model."""
        check_options(routing, Routing)
        return Info.from_message(await self._unary("Info", mux_pb2.InfoRequest, tei_pb2.InfoResponse, routing))

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, prompt_name: str | None = None, **routing: Unpack[Routing]
    ) -> Sequence[Token]:
        """The tokens of a text, prompt included, untruncated."""
        check_options(routing, Routing)
        check_text("text", text)
        check_flag("add_special_tokens", add_special_tokens)
        if prompt_name is not None:
            check_text("prompt_name", prompt_name)
        fields = {"inputs": text, "add_special_tokens": add_special_tokens, "prompt_name": prompt_name}
        reply = await self._unary("Tokenize", mux_pb2.EncodeRequest, tei_pb2.EncodeResponse, routing, **fields)
        return [Token.from_message(token) for token in reply.tokens]

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True, **routing: Unpack[Routing]) -> str:
        """The text of token ids."""
        check_options(routing, Routing)
        check_flag("skip_special_tokens", skip_special_tokens)
        check_sequence("ids", ids)
        for position, token in enumerate(ids):
            check_count(f"ids[{position}]", token)
        types = mux_pb2.DecodeRequest, tei_pb2.DecodeResponse
        return (await self._unary("Decode", *types, routing, ids=ids, skip_special_tokens=skip_special_tokens)).text


_REQUEST_BYTES = 4 * 2**20  # of files; base64 adds a third
_MAX_FILE_BYTES = MAX_TEXT_BYTES // 4 * 3  # as base64 the longest text of a request
# Modes that PNG lacks, and what they are converted to. `I` and `F`, of 32 bits, have no known range.
_PNG_MODES = {**dict.fromkeys(("CMYK", "YCbCr", "LAB", "HSV", "RGBX"), "RGB"), "RGBa": "RGBA", "PA": "RGBA"}
_REQUEST_IMAGES = 8  # the default limit of an instance is 32


class Savable(Protocol):
    """The methods of a Pillow image that are used here, so that Pillow need not be installed."""

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
