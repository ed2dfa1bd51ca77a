"""Images in requests: as data URIs or base64, or in the parts of a content, read off the event loop.

A text is never taken for an image, whatever it looks like: only what a request marks as an image is one. Links are not
fetched; they are refused by name.
"""

from __future__ import annotations

import binascii
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from teimgr.engine.job import Input, Picture
from teimgr.errors import InvalidInput, TeimgrError
from teimgr.models.source import shown_id
from teimgr.worker import http_inference as http

if TYPE_CHECKING:  # importing the engine imports torch
    from teimgr.worker.dispatcher import Dispatcher

_SHOWN = 64
_STEP = 2**20  # characters of base64, decoded in one call
_LINKS = ("http:", "https:", "file:", "ftp:", "s3:", "gs:")


class HasImages(Exception):
    """A body with images, which another class reads: raised by a validator of the class for texts."""


class SentImage(NamedTuple):
    """An image as a request has it: a data URI, base64, or its bytes, and the field that it is in."""

    data: str | bytes
    field: str


class _Inference(Protocol):
    @property
    def dispatcher(self) -> Dispatcher: ...


def image_bytes(sent: SentImage) -> bytes:
    """The bytes of an image.

    Raises:
        InvalidInput: it is a link, no base64, or a data URI of another kind.
    """
    data, field = sent
    if isinstance(data, bytes):
        return data
    head = data[:_SHOWN].lstrip().lower()
    if head.startswith(_LINKS) or head.startswith("//"):
        raise InvalidInput(
            f"Input validation error: `{field}` is a link ({data[:_SHOWN]!r}), and links are not fetched here: send "
            "the image itself, as a data URI or as base64"
        )
    if head.startswith("data:"):
        kind, comma, data = data.partition(",")
        if not comma or not kind.rstrip().lower().endswith(";base64"):
            raise InvalidInput(f"Input validation error: `{field}` is a data URI without `;base64,`")
    try:
        return _decoded(data)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(
            f"Input validation error: `{field}` is neither a data URI nor base64 of an image file"
        ) from error


def _decoded(data: str) -> bytes:
    """The bytes of base64, in steps of a millisecond: a call of Python's decoder holds the GIL until it is done.

    Raises:
        binascii.Error, ValueError: it is not base64, or has something behind its end.
    """
    parts = [binascii.a2b_base64(data[at : at + _STEP], strict_mode=True) for at in range(0, len(data), _STEP)]
    if any(len(part) != _STEP // 4 * 3 for part in parts[:-1]):
        raise binascii.Error("there is padding before the end")
    return b"".join(parts)


async def read_all(inference: _Inference, items: Sequence[Input | SentImage]) -> list[Input]:
    """The items with their images as the engine takes them, each read on a thread.

    Raises:
        BadRequest: the model embeds texts alone; with the field of the image.
        InvalidInput: an image is none, is too large, or is a link; with its place and field.
    """
    dispatcher = inference.dispatcher
    found: list[Input] = []
    for place, item in enumerate(items):
        if not isinstance(item, SentImage):
            found.append(item)
            continue
        _need_images(dispatcher, item)
        try:
            found.append(await dispatcher.off_loop(_read, dispatcher, item))
        except TeimgrError as error:
            if len(items) > 1:
                error.name_input(place)
            dispatcher.metrics.received(len(items))
            dispatcher.metrics.failed(error)
            raise
    return found


def _need_images(dispatcher: Dispatcher, sent: SentImage) -> None:
    info = dispatcher.engine.info
    if "image" not in info.modalities:
        message = f"{sent.field}: only text is supported by the model {shown_id(info.model_id)}, and this is an image"
        raise http.BadRequest(400, message, sent.field.partition(".")[0])


def _read(dispatcher: Dispatcher, sent: SentImage) -> Picture:
    engine = dispatcher.engine
    try:
        return engine.picture(image_bytes(sent))
    except InvalidInput as error:
        if f"`{sent.field}`" not in error.message:
            error.reword(error.message.replace(": ", f": `{sent.field}`: ", 1))
        raise


def typed_item(given: Any, place: str) -> Input | SentImage:
    """An item of TEI's route with a type: `{"type": "text", "value": …}`, `{"type": "image", "data" or "url": …}`; a
    text as such is a text.

    Raises:
        BadRequest: it is something else; with its place.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise http.BadRequest(422, f"{place}: must be a text or an object with `type`", place.partition(".")[0])
    kind = given.get("type")
    if kind == "text":
        return _string(given, ("value", "text"), place)
    if kind == "image":
        name = "url" if given.get("url") is not None else "data"
        return SentImage(_string(given, ("data", "url"), place), f"{place}.{name}")
    known = "text and image are" if kind != "content" else "a content of several parts is not; text and image are"
    raise http.BadRequest(422, f"{place}.type: {str(kind)[:_SHOWN]!r} is not served: {known}", place.partition(".")[0])


def _string(given: dict[str, Any], names: Sequence[str], place: str) -> str:
    """The value of the one of `names` that is given."""
    values = [given[name] for name in names if given.get(name) is not None]
    if len(values) != 1 or not isinstance(values[0], str):
        wanted = " or ".join(f"`{name}`" for name in names)
        raise http.BadRequest(422, f"{place}: needs {wanted}, a string", place.partition(".")[0])
    return values[0]


def item_of_object(given: dict[str, Any], place: str) -> Input | SentImage:
    """Jina's `{"text": …}` or `{"image": …}`.

    Raises:
        BadRequest: it is something else; with its place.
    """
    named = [name for name in ("text", "image") if isinstance(given.get(name), str)]
    if len(named) == len(given) == 1:
        text: str = given[named[0]]
        return SentImage(text, place) if named == ["image"] else text
    raise http.BadRequest(
        400,
        f"{place}: needs `text` or `image`, a string, and one of them alone: this model embeds one at a time",
        place.partition(".")[0],
    )


def has_image(given: Any) -> bool:
    """Whether a document of a rerank has an image: Jina's `{"image": …}`, or vLLM's content of parts."""
    if not isinstance(given, dict):
        return False
    parts = given.get("content")
    of_parts = isinstance(parts, list) and any(
        isinstance(one, dict) and _image_of_part(one) is not None for one in parts
    )
    return of_parts or isinstance(given.get("image"), str)


def item_of_parts(parts: Any, place: str) -> Input | SentImage:
    """The one item of a content: a text, or parts of texts, or one image (`image_url`, `image`, `input_image`).

    Raises:
        BadRequest: it has images and texts, several images, or parts of another kind; with its place.
    """
    field = place.partition(".")[0]
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise http.BadRequest(400, f"{place}: must be a text or a list of parts", field)
    texts: list[str] = []
    sent: list[SentImage] = []
    for at, part in enumerate(parts):
        where = f"{place}.{at}"
        if part.get("type", "text" if "text" in part else None) == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif (url := _image_of_part(part)) is not None:
            sent.append(SentImage(url, f"{where}.image_url"))
        else:
            raise http.BadRequest(400, f"{where}: only parts of type text and image_url are served", field)
    if not sent and texts:
        return "\n".join(texts)
    if len(sent) != 1 or texts:
        raise http.BadRequest(
            400,
            f"{place}: needs texts or one image: this model embeds one at a time, and no text with an image; send them "
            "as inputs of their own",
            field,
        )
    return sent[0]


def _image_of_part(part: dict[str, Any]) -> str | None:
    """OpenAI's and vLLM's `image_url` (an object or a string), Voyage's `image_base64`."""
    given = part.get("image_url", part.get("image_base64"))
    url = given.get("url") if isinstance(given, dict) else given
    return url if isinstance(url, str) else None


def items_of_messages(messages: Any) -> Iterator[Input | SentImage]:
    """vLLM's: one conversation is one item, a list of conversations as many. Of one the user's content counts.

    Raises:
        BadRequest: it is something else, or a conversation has several messages.
    """
    several = isinstance(messages, list) and messages and isinstance(messages[0], list)
    conversations = messages if several else [messages]
    for at, conversation in enumerate(conversations):
        where = f"messages.{at}" if several else "messages"
        if not isinstance(conversation, list) or len(conversation) != 1 or not isinstance(conversation[0], dict):
            raise http.BadRequest(400, f"{where}: needs one message with a content: this model has no chat", "messages")
        yield item_of_parts(conversation[0].get("content"), f"{where}.0.content")


def counted(job_inputs: Sequence[Input]) -> tuple[int, int]:
    """The images of a job, and the tokens that they take."""
    tokens = [one.tokens for one in job_inputs if isinstance(one, Picture)]
    return len(tokens), sum(tokens)
