"""Images and sounds in requests: as data URIs or base64, or in the parts of a content, read off the event loop.

Only fields for images or sounds are read as files, never a text. Links are refused unless the daemon's settings list
their host (`media_links`).
"""

from __future__ import annotations

import asyncio
import binascii
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from teimgr.engine.job import Content, Input, Picture, Sound, pictures_of
from teimgr.errors import InvalidInput, TeimgrError
from teimgr.models.source import shown_id
from teimgr.observability.request_context import current_tenant
from teimgr.worker import http_inference as http

if TYPE_CHECKING:  # importing the engine imports torch
    from teimgr.worker.dispatcher import Dispatcher

_CUT_LINK = 8192  # characters hashed on the event loop; more than `media_links` allows
_SHOWN = 64
_ONLY = 0  # page number that stands for the only page
_PARTS = {
    "text": "`text`, a string",
    "image_url": "`image_url` with `url`, a string",
    "image_base64": "`image_base64`, a string",
    "input_audio": "`input_audio` with `data`, a string",
    "audio_url": "`audio_url` with `url`, a string",
}
_MAX_MESSAGES = 3  # of a conversation
_NOTHING: tuple[Any, ...] = (None, "", [], [{"type": "text", "text": ""}])
_ONE_MESSAGE = "needs one message with a content, and a system message with an instruction before it at most"
_OTHER_MARKS = "\n\r\t -_"
_PLAIN = str.maketrans("-_", "+/", "\n\r\t ")
_STEP = 2**20  # characters of base64 decoded in one call
_MAX_IMAGES = 8  # per input
_MAX_PARTS = 64  # per content
_MAX_HEAD = 256  # characters of a data URI before its comma
_ITEMS_AT_ONCE = 32  # built in one turn of the event loop: some milliseconds
_KEYS = frozenset(("type", "value", "text", "data", "url", "media_type", "content"))  # of an item with `type`
_FETCHED = ("http://", "https://")
_LINKS = ("http:", "https:", "file:", "ftp:", "s3:", "gs:")


class HasImages(Exception):
    """Raised by a validator of a class for texts if the body has images, which another class reads."""


class SentImage(NamedTuple):
    """An image, or a sound by its `kind`, as sent: a data URI, base64, or bytes, and its field. With a `page` it is
    that page, from 1, of a PDF document; 0 is the only page.
    """

    data: str | bytes
    field: str
    kind: str = "image"
    page: int | None = None


class SentContent(NamedTuple):
    """A text with images, as sent, for a model that reads both in one input, and its field."""

    text: str
    images: tuple[SentImage, ...]
    field: str
    instruction: str | None = None


class ChatEnd(NamedTuple):
    """vLLM's `add_generation_prompt` and `continue_final_message`, which determine how chats end; None if absent. Chats
    of the served models end with an open turn of the assistant.
    """

    prompted: bool | None = None
    continued: bool | None = None

    def check(self, is_open: bool, where: str) -> None:
        """Raise BadRequest if the chat would end otherwise; `is_open`: the last message is an assistant's, and
        empty."""
        if is_open and (self.prompted or self.continued is False):
            message = (
                "an empty message of an assistant at the end needs continue_final_message, and no generation prompt"
            )
        elif not is_open and self.continued:
            message = "continue_final_message is for an empty message of an assistant at the end"
        elif not is_open and self.prompted is False:
            message = "add_generation_prompt: false is not supported: the model reads the open turn of an assistant"
        else:
            return
        raise http.BadRequest(400, f"{where}: {message}", "messages")


T = TypeVar("T")
SentItem = Input | SentImage | SentContent


class _Inference(Protocol):
    @property
    def dispatcher(self) -> Dispatcher: ...


def image_bytes(sent: SentImage, has_hosts: bool = False) -> bytes:
    """Return the bytes of an image or a sound; `has_hosts`: http and https links were fetched before.

    Raises:
        InvalidInput: it is a link, not base64, or a data URI of another kind.
    """
    data, field = sent.data, sent.field
    if isinstance(data, bytes):
        return data
    head = data[:_SHOWN].lstrip().lower()
    if head.startswith(_LINKS) or (head.startswith("//") and "." in head):  # base64 may begin with slashes
        why = "only links by http and https are fetched" if has_hosts else "links are not fetched here"
        raise InvalidInput(
            f"Input validation error: `{field}` is a link ({data[:_SHOWN]!r}), and {why}: send the {sent.kind} itself, "
            "as a data URI or as base64"
        )
    if head.startswith("data:"):
        comma = data.find(",", 0, _MAX_HEAD + 1)
        if comma < 0 or not data[:comma].rstrip().lower().endswith(";base64"):
            raise InvalidInput(
                f"Input validation error: `{field}` is a data URI without `;base64,` in its first {_MAX_HEAD} "
                "characters"
            )
        data = data[comma + 1 :]
    try:
        return _decoded(data)
    except (binascii.Error, ValueError) as error:
        raise InvalidInput(
            f"Input validation error: `{field}` is neither a data URI nor base64 of an {sent.kind} file"
        ) from error


def _decoded(data: str) -> bytes:
    """Decode base64 in steps of a millisecond, since a call of Python's decoder holds the GIL. Line breaks and spaces
    are allowed, padding may be missing, and the alphabet may be that of URLs.

    Raises:
        binascii.Error, ValueError: it is not base64, or has something behind its end.
    """
    if not data.isascii():  # `translate` takes 45 ms for a step with other letters
        raise binascii.Error("it is not ASCII")
    if any(mark in data for mark in _OTHER_MARKS):
        data = "".join(data[at : at + _STEP].translate(_PLAIN) for at in range(0, len(data), _STEP))
    data += "=" * (-len(data) % 4)
    parts = [binascii.a2b_base64(data[at : at + _STEP], strict_mode=True) for at in range(0, len(data), _STEP)]
    if any(len(part) != _STEP // 4 * 3 for part in parts[:-1]):
        raise binascii.Error("there is padding before the end")
    return b"".join(parts)


async def built(
    inference: http.HttpInference,
    given: Sequence[T],
    place: str,
    read: Callable[[T, str], SentItem],
    limit: int = http.MAX_INPUTS,
) -> list[SentItem]:
    """Return the items of a request, each made by `read` from its value and place; counted before the first is built.

    Raises:
        TooManyInputs: there are more than `limit`. Also what `read` raises.
    """
    inference.check_count(len(given), limit)
    found: list[SentItem] = []
    for at, one in enumerate(given):
        if at % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        found.append(read(one, f"{place}.{at}"))
    return found


def _check_parts(parts: Sequence[Any], place: str, status: int) -> None:
    """Raise BadRequest for a content with too many parts, before any of them is read."""
    if len(parts) > _MAX_PARTS:
        message = f"{place}: has {len(parts):,} parts, and {_MAX_PARTS} are allowed in a content"
        raise http.BadRequest(status, message, place.partition(".")[0])


def _shown(given: Any) -> str:
    """Show the beginning of a text or a number, and only the type of containers, which take long to print."""
    return str(given)[:_SHOWN] if given is None or isinstance(given, str | int | float) else type(given).__name__


async def read_all(inference: _Inference, items: Sequence[SentItem], first: int = 0) -> list[Input]:
    """Read the items with their images for the engine, each on a thread. The first has the place `first`; a negative
    place is a query.

    Raises:
        BadRequest: the model takes no image, or only one image or text at a time; with the field.
        InvalidInput: an image cannot be read, is too large, or is a link; with its place and field.
    """
    dispatcher = inference.dispatcher
    sent = [item for item in items if isinstance(item, (SentImage, SentContent))]
    links: list[str] = []
    for at, one in enumerate(sent):
        if at % _ITEMS_AT_ONCE == _ITEMS_AT_ONCE - 1:
            await asyncio.sleep(0)
        _need_modality(dispatcher, one)
        links += [link for each in _sent_in(one) if (link := _link(each)) is not None]
    found: list[Input] = []
    async with _fetching(dispatcher, links) as files:
        for place, item in enumerate(items, first):
            if not isinstance(item, (SentImage, SentContent)):
                found.append(item)
                continue
            try:
                found.append(await _read_item(dispatcher, item, files))
            except TeimgrError as error:
                if len(items) > 1 and place >= 0:
                    error.name_input(place)
                dispatcher.metrics.received(len(items))
                dispatcher.metrics.failed(error)
                raise
    return found


_Files = Mapping[str, "asyncio.Task[bytes]"]  # fetches by link


def _fetching(dispatcher: Dispatcher, links: Sequence[str]) -> AbstractAsyncContextManager[_Files]:
    """Start fetching the files that items link to; nothing if links are refused."""
    if dispatcher.fetcher is None or not links:
        return nullcontext({})
    return dispatcher.fetcher.fetching(links, current_tenant())


def _sent_in(item: SentImage | SentContent) -> Sequence[SentImage]:
    return (item,) if isinstance(item, SentImage) else item.images


def _link(sent: SentImage) -> str | None:
    """Return the http(s) link that was sent, or None; a link that is too long is cut, and stays too long."""
    data = sent.data
    is_link = isinstance(data, str) and data[:_SHOWN].lstrip().lower().startswith(_FETCHED)
    return str(data[:_CUT_LINK]) if is_link else None


async def _read_item(dispatcher: Dispatcher, item: SentImage | SentContent, files: _Files) -> Input:
    if isinstance(item, SentImage):
        return await _read_sent(dispatcher, item, files)
    read = [await _read_sent(dispatcher, one, files) for one in item.images]
    return Content(item.text, tuple(one for one in read if isinstance(one, Picture)), item.instruction)


async def _read_sent(dispatcher: Dispatcher, sent: SentImage, files: _Files) -> Picture | Sound:
    try:
        link = _link(sent) if files else None
        fetched = sent if link is None else sent._replace(data=await files[link])
        if fetched.page is not None:
            document = await dispatcher.off_loop(image_bytes, fetched, dispatcher.fetcher is not None)
            rendered = await dispatcher.renderer().page(document, fetched.page or None, current_tenant())
            fetched = SentImage(rendered, sent.field)
        return await dispatcher.off_loop(_read, dispatcher, fetched)
    except InvalidInput as error:
        if f"`{sent.field}`" not in error.message:
            error.reword(error.message.replace(": ", f": `{sent.field}`: ", 1))
        raise


def _need_modality(dispatcher: Dispatcher, item: SentImage | SentContent) -> None:
    """Raise BadRequest if the model does not read an item's kind of content."""
    for sent in _sent_in(item):
        _need_images(dispatcher, sent)
    if isinstance(item, SentImage):
        return
    field = item.field.partition(".")[0]
    if not dispatcher.engine.info.fused:
        if item.instruction is not None:
            message = f"{item.field}: needs one message with a content, and no system message: this model has no chat"
        else:
            message = (
                f"{item.field}: needs texts or one image: this model embeds one at a time, and no text with an image; "
                "send them as separate inputs"
            )
        raise http.BadRequest(400, message, field)
    if len(item.images) > _MAX_IMAGES:
        raise http.BadRequest(
            400, f"{item.field}: has {len(item.images)} images, and {_MAX_IMAGES} are allowed in an input", field
        )


def _need_images(dispatcher: Dispatcher, sent: SentImage) -> None:
    info = dispatcher.engine.info
    if sent.kind not in info.modalities:
        known = " and ".join(info.modalities)
        known = f"only {known} is" if len(info.modalities) == 1 else f"{known} are"
        named = "audio" if sent.kind == "audio" else f"an {sent.kind}"
        message = f"{sent.field}: {known} supported by the model {shown_id(info.model_id)}, and this is {named}"
        raise http.BadRequest(400, message, sent.field.partition(".")[0])


def _read(dispatcher: Dispatcher, sent: SentImage) -> Picture | Sound:
    engine = dispatcher.engine
    data = image_bytes(sent, dispatcher.fetcher is not None)
    return (engine.sound if sent.kind == "audio" else engine.picture)(data)


def typed_item(given: Any, place: str) -> SentItem:
    """Read an item of TEI's route with a type: `{"type": "text", "value": …}`, `{"type": "image", "data" or "url": …}`,
    a PDF page `{"type": "pdf", "data" or "url": …, "page": 1}`, or `{"content": […]}` of several of these; a plain
    string is a text.

    Raises:
        BadRequest: it is anything else; the error names its place.
    """
    if isinstance(given, str):
        return given
    if not isinstance(given, dict):
        raise http.BadRequest(422, f"{place}: must be a text or an object with `type`", place.partition(".")[0])
    kind = given.get("type", "content" if "content" in given else None)
    if unknown := sorted(given.keys() - _KEYS - ({"page"} if kind == "pdf" else set())):
        message = f"{place}: {_shown(unknown[0])!r} is not a key of an item of a type"
        raise http.BadRequest(422, message, place.partition(".")[0])
    if kind == "content" and isinstance(given.get("content"), list):
        where = f"{place}.content"
        _check_parts(given["content"], where, 422)
        if any(isinstance(one, dict) and "content" in (one.get("type"), *one) for one in given["content"]):
            raise http.BadRequest(422, f"{where}: needs texts and images", place.partition(".")[0])
        return _together([typed_item(one, f"{where}.{at}") for at, one in enumerate(given["content"])], where, 422)
    if kind == "text":
        return _string(given, ("value", "text"), place)
    if kind in ("image", "audio", "pdf"):
        name = "url" if given.get("url") is not None else "data"
        data, field = _string(given, ("data", "url"), place), f"{place}.{name}"
        return SentImage(data, field, page=_page(given, place)) if kind == "pdf" else SentImage(data, field, kind)
    known = "text, image, audio and pdf are, and a list of these as content"
    raise http.BadRequest(422, f"{place}.type: {_shown(kind)!r} is not served: {known}", place.partition(".")[0])


def _page(given: dict[str, Any], place: str) -> int:
    number = given.get("page")
    if number is None:
        return _ONLY
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        message = f"{place}.page: must be the number of a page, from 1 on, and is {_shown(number)!r}"
        raise http.BadRequest(422, message, place.partition(".")[0])
    return number


def _together(parts: Sequence[SentItem], place: str, status: int, instruction: str | None = None) -> SentItem:
    """Join texts and images to one item; a single image, or texts alone, become a plain item.

    Raises:
        BadRequest: it is empty, or a content contains a content; the error names its place.
    """
    texts = [one for one in parts if isinstance(one, str)]
    sent = tuple(one for one in parts if isinstance(one, SentImage))
    if not parts or len(texts) + len(sent) < len(parts):
        raise http.BadRequest(status, f"{place}: needs texts and images", place.partition(".")[0])
    if instruction is None and not sent:
        return "\n".join(texts)
    if instruction is None and len(sent) == 1 and not texts:
        return sent[0]
    return SentContent("\n".join(texts), sent, place, instruction)


def _string(given: dict[str, Any], names: Sequence[str], place: str) -> str:
    """Return the value of whichever of `names` is given."""
    values = [given[name] for name in names if given.get(name) is not None]
    if len(values) != 1 or not isinstance(values[0], str):
        wanted = " or ".join(f"`{name}`" for name in names)
        raise http.BadRequest(422, f"{place}: needs {wanted}, a string", place.partition(".")[0])
    return values[0]


def item_of_object(given: dict[str, Any], place: str) -> SentItem:
    """Read Jina's `{"text": …}` or `{"image": …}`, or both together for a model that reads them in one input.

    Raises:
        BadRequest: it is anything else; the error names its place.
    """
    named = [name for name in ("text", "image") if isinstance(given.get(name), str)]
    if len(named) == len(given) == 1:
        text: str = given[named[0]]
        return SentImage(text, place) if named == ["image"] else text
    if len(named) == len(given) == 2:
        return SentContent(given["text"], (SentImage(given["image"], f"{place}.image"),), place)
    raise http.BadRequest(400, f"{place}: needs `text` or `image`, a string, and nothing else", place.partition(".")[0])


def has_image(given: Any) -> bool:
    """True if a document of a rerank has an image: Jina's `{"image": …}`, or vLLM's content of parts."""
    if not isinstance(given, dict):
        return False
    parts = given.get("content")
    of_parts = isinstance(parts, list) and (
        len(parts) > _MAX_PARTS  # `item_of_parts` refuses it
        or any(isinstance(one, dict) and _image_of_part(one) is not None for one in parts)
    )
    return of_parts or isinstance(given.get("image"), str)


def item_of_content(given: dict[str, Any], place: str) -> SentItem:
    """Read the item of an object with `content`, as `item_of_parts`."""
    return item_of_parts(given.get("content"), f"{place}.content")


def item_of_parts(parts: Any, place: str, instruction: str | None = None) -> SentItem:
    """Read one item from a content: a text, or parts of texts and images (`image_url`, `image`, `input_image`).

    Raises:
        BadRequest: it has parts of another kind; the error names their place.
    """
    field = place.partition(".")[0]
    if isinstance(parts, str):
        return parts if instruction is None else SentContent(parts, (), place, instruction)
    if isinstance(parts, list):
        _check_parts(parts, place, 400)
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise http.BadRequest(400, f"{place}: must be a text or a list of parts", field)
    found: list[SentItem] = []
    for at, part in enumerate(parts):
        where = f"{place}.{at}"
        if part.get("type", "text" if "text" in part else None) == "text" and isinstance(part.get("text"), str):
            found.append(part["text"])
        elif (url := _image_of_part(part)) is not None:
            found.append(SentImage(url, f"{where}.{'image_url' if 'image_url' in part else 'image_base64'}"))
        elif (sent := _sound_of_part(part, where)) is not None:
            found.append(sent)
        else:
            raise http.BadRequest(400, f"{where}: {_refusal_of_part(part)}", field)
    return _together(found, place, 400, instruction)


def _refusal_of_part(part: dict[str, Any]) -> str:
    given = _shown(part.get("type", next(iter(part), "")))
    if given in _PARTS:
        return f"a part of type {given} needs {_PARTS[given]}"
    *some, last = _PARTS
    return f"only parts of type {', '.join(some)} and {last} are served, and this is {given!r}"


def _image_of_part(part: dict[str, Any]) -> str | None:
    """Return the image of OpenAI's and vLLM's `image_url` (an object or a string), or Voyage's `image_base64`."""
    given = part.get("image_url", part.get("image_base64"))
    url = given.get("url") if isinstance(given, dict) else given
    return url if isinstance(url, str) else None


def _sound_of_part(part: dict[str, Any], where: str) -> SentImage | None:
    """Return the sound of OpenAI's `input_audio` with `data`, or vLLM's `audio_url` with a data URI."""
    for name, key in (("input_audio", "data"), ("audio_url", "url")):
        given = part.get(name)
        found = given.get(key) if isinstance(given, dict) else given
        if isinstance(found, str):
            return SentImage(found, f"{where}.{name}", "audio")
    return None


def is_conversations(messages: Any) -> bool:
    """True if vLLM's `messages` are several conversations, each of which is an item."""
    return isinstance(messages, list) and bool(messages) and isinstance(messages[0], list)


def item_of_conversation(conversation: Any, where: str, end: ChatEnd = ChatEnd()) -> SentItem:  # noqa: B008
    """Read one of vLLM's conversations: the user's content is the item; a system message before it is the instruction;
    an assistant's message after it must be empty.

    Raises:
        BadRequest: it is anything else, has several messages of a user, or ends otherwise.
    """
    if not isinstance(conversation, list) or not all(isinstance(one, dict) for one in conversation[:_MAX_MESSAGES]):
        raise http.BadRequest(400, f"{where}: must be a list of messages", "messages")
    if len(conversation) > _MAX_MESSAGES:
        raise http.BadRequest(400, f"{where}: {_ONE_MESSAGE}", "messages")
    return _of_conversation(list(enumerate(conversation)), where, end)


def _of_conversation(messages: list[tuple[int, dict[str, Any]]], where: str, end: ChatEnd) -> SentItem:
    instruction: str | None = None
    if len(messages) > 1 and messages[0][1].get("role") == "system":
        at, message = messages.pop(0)
        given = item_of_parts(message.get("content"), f"{where}.{at}.content")
        if not isinstance(given, str):
            raise http.BadRequest(400, f"{where}.{at}.content: an instruction is a text, and has no images", "messages")
        instruction = given
    last = messages[-1][1] if len(messages) > 1 else {}
    is_open = last.get("role") == "assistant" and last.get("content") in _NOTHING
    if is_open:
        messages.pop()
    if len(messages) != 1:
        raise http.BadRequest(400, f"{where}: {_ONE_MESSAGE}", "messages")
    end.check(is_open, where)
    at, message = messages[0]
    if (role := message.get("role", "user")) != "user":
        raise http.BadRequest(400, f"{where}.{at}.role: must be user, and is {_shown(role)!r}", "messages")
    return item_of_parts(message.get("content"), f"{where}.{at}.content", instruction)


def counted(job_inputs: Sequence[Input]) -> tuple[int, int]:
    """Return the number of images in a job, and of the tokens that they take."""
    tokens = [one.tokens for item in job_inputs for one in pictures_of(item) if isinstance(one, Picture)]
    return len(tokens), sum(tokens)


def heard_ms(job_inputs: Sequence[Input]) -> int:
    """Return the milliseconds of sound in a job."""
    return round(1e3 * sum([one.seconds for one in job_inputs if isinstance(one, Sound)]))
