"""Items of requests: counted before one is built, contents of few parts, and data URIs of short heads."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from teimgr.errors import InvalidInput, TeimgrError
from teimgr.worker import http_inference as http
from teimgr.worker import images
from teimgr.worker.dialects.infinity import InfinityEmbeddingsRequest
from teimgr.worker.dialects.openai import OpenAIItemsRequest
from teimgr.worker.dialects.vllm import VllmScoreItemsRequest
from teimgr.worker.images import SentImage, image_bytes

_MANY = [""] * 300_000
_INFERENCE: Any = SimpleNamespace(check_count=http.check_count)


@pytest.mark.parametrize(
    "items",
    [
        lambda: OpenAIItemsRequest(input=[*_MANY, {"image": "a"}]).items(_INFERENCE),
        lambda: VllmScoreItemsRequest(queries="a", documents=[*_MANY, {"content": "a"}]).contents(_INFERENCE),
        lambda: InfinityEmbeddingsRequest(input=_MANY, modality="image").sent_images(_INFERENCE),
    ],
    ids=["openai", "vllm", "infinity"],
)
async def test_items_are_counted_before_one_is_built(items: Callable[[], Any]) -> None:
    with pytest.raises(http.TooManyInputs):
        await items()


def test_a_content_has_64_parts_and_no_content_within() -> None:
    for read, status in ((images.typed_item, 422), (images.item_of_content, 400)):
        given = {"content": [{"type": "text", "text": "a"}] * 64}
        assert read(given, "inputs.0") == "\n".join("a" * 64)
        given["content"] = [{}] * 300_000
        with pytest.raises(http.BadRequest, match="300,000 parts, and 64 are allowed in a content") as refused:
            read(given, "inputs.0")
        assert refused.value.status == status
        assert images.has_image(given)
    with pytest.raises(http.BadRequest, match="needs texts and images"):
        images.typed_item({"content": [{"content": ["a"]}]}, "inputs.0")


def test_a_conversation_has_three_messages() -> None:
    with pytest.raises(http.BadRequest, match="needs one message with a content"):
        images.item_of_conversation([{"content": "a"}] * 4, "messages")


def test_a_refusal_writes_out_no_list() -> None:
    large = {"type": [""] * 1_000_000}
    began = time.thread_time()
    for read in (images.typed_item, lambda one, place: images.item_of_parts([one], place)):
        with pytest.raises(http.BadRequest, match="'list'"):
            read(large, "inputs.0")
    assert time.thread_time() - began < 0.01


def test_the_head_of_a_data_uri_is_short() -> None:
    assert images.image_bytes(images.SentImage("data:image/png;base64,YQ==", "x")) == b"a"
    assert images.image_bytes(images.SentImage(f"data:{'a' * 244};base64,YQ==", "x")) == b"a"
    for head in ("a" * 245, "İ" * 10**6):
        with pytest.raises(TeimgrError, match="without `;base64,` in its first 256 characters"):
            images.image_bytes(images.SentImage(f"data:{head};base64,YQ==", "x"))


async def test_ten_thousand_images_are_looked_at_in_many_turns_of_the_loop() -> None:
    """The last is a sound, which the model does not read; nothing is decoded before that is found."""
    info = SimpleNamespace(modalities=("text", "image"), fused=False, model_id="a/b")
    inference: Any = SimpleNamespace(dispatcher=SimpleNamespace(engine=SimpleNamespace(info=info), fetcher=None))
    items = [images.SentImage("", f"input.{at}") for at in range(9_999)]
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    with pytest.raises(http.BadRequest, match=r"input\.9999"):
        await images.read_all(inference, [*items, images.SentImage("", "input.9999", "audio")])
    counting.cancel()

    assert turns > 300


def test_base64_of_every_tool_is_read() -> None:
    data = bytes(range(256)) * 20 + b"\xfb\xff"
    plain = base64.b64encode(data).decode()
    for sent in (
        base64.encodebytes(data).decode(),
        f"{plain}\r\n",
        plain.rstrip("="),
        f"data:image/png;base64,{plain}",
    ):
        assert image_bytes(SentImage(sent, "inputs.0")) == data
    urls = base64.urlsafe_b64encode(data).decode()
    assert "-" in urls
    assert image_bytes(SentImage(urls, "inputs.0")) == data
    for sent in ("a b c d e", "abc$", "ab=c", f"{plain}{plain}", "a"):
        with pytest.raises(InvalidInput, match="neither a data URI nor base64"):
            image_bytes(SentImage(sent, "inputs.0"))


def test_base64_that_begins_with_two_slashes_is_no_link() -> None:
    """As of each MP3 without tags: its first two bytes are a frame's."""
    data = b"\xff\xfb\x90\x64" + bytes(range(200))
    sent = base64.b64encode(data).decode()
    assert sent.startswith("//")
    assert image_bytes(SentImage(sent, "inputs.0", "audio")) == data
    with pytest.raises(InvalidInput, match="is a link"):
        image_bytes(SentImage("//example.com/a", "inputs.0"))


@pytest.mark.parametrize("other", ["é", "\u4e00"])
def test_base64_with_a_letter_beyond_ascii_is_refused_at_once(other: str) -> None:
    """`str.translate` takes 45 ms of the GIL for a step with one of these, and there are eight here."""
    sent = SentImage((("YQ" * 2**19)[1:] + other) * 8 + " ", "inputs.0")
    began = time.thread_time()
    with pytest.raises(InvalidInput, match="neither a data URI nor base64"):
        image_bytes(sent)
    assert time.thread_time() - began < 0.02
