"""Images in the words of every dialect: one vector each, and refusals that name the item and the way out."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.support.models.dual_encoders import file_of, noise
from tests.worker.dialects.dialect_client import Asking

FILE = file_of(noise(60, 40))
PLAIN = base64.b64encode(FILE).decode()
URI = f"data:image/png;base64,{PLAIN}"
TEXT = "the quick fox"
TOKENS = 5  # of an image: four patches and one for all


def message(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


PART = {"type": "image_url", "image_url": {"url": URI}}
OPENAI = [
    ("/v1/embeddings", {"input": [{"image": PLAIN}, {"text": TEXT}]}),
    ("/jina/v1/embeddings", {"input": [{"image": URI}, TEXT]}),
    ("/v1/embeddings", {"messages": [message([PART]), message(TEXT)]}),
    ("/v1/embeddings", {"messages": message([PART])}),
    ("/v1/embeddings", {"input": URI, "modality": "image"}),
    ("/infinity/embeddings", {"input": [URI, PLAIN], "modality": "image"}),
    ("/embeddings_image", {"input": [URI, PLAIN]}),
]


async def vectors(ask: Asking) -> np.ndarray:
    """Of the image and of the text, by TEI's route of the instance."""
    items = [{"type": "image", "data": PLAIN}, {"type": "text", "value": TEXT}]
    return np.array(await ask.own_port("clip", "/embed", {"inputs": items}), np.float32)


@pytest.mark.parametrize(("path", "body"), OPENAI, ids=range(len(OPENAI)))
async def test_each_form_of_an_image_has_the_same_vector_bit_for_bit(
    ask: Asking, path: str, body: dict[str, Any]
) -> None:
    answer = (await ask.post(path, {"model": "clip", **body})).ok
    found = np.array([one["embedding"] for one in answer["data"]], np.float32)
    image, text = await vectors(ask)
    assert (found[0] == image).all()
    has_text = TEXT in str(body)
    assert not has_text or np.allclose(found[1], text, atol=1e-6)
    images = len(found) - has_text
    assert answer["usage"]["prompt_tokens"] == images * TOKENS + has_text * await ask.tokens("clip", [TEXT])


@pytest.mark.parametrize(("size", "tokens"), [((60, 40), 20), ((200, 20), 10)])
async def test_naflex_reads_an_image_in_its_own_shape(ask: Asking, size: tuple[int, int], tokens: int) -> None:
    plain = base64.b64encode(file_of(noise(*size))).decode()
    answer = (await ask.post("/v1/embeddings", {"model": "naflex", "input": [{"image": f"data:;base64,{plain}"}]})).ok
    expected = await ask.own_port("naflex", "/embed", {"inputs": [{"type": "image", "data": plain}, TEXT]})
    assert (np.array(answer["data"][0]["embedding"], np.float32) == np.array(expected[0], np.float32)).all()
    assert answer["usage"]["prompt_tokens"] == tokens


async def test_items_of_a_type_mixed_with_texts(ask: Asking) -> None:
    image, text = await vectors(ask)
    mixed = [TEXT, {"type": "image", "url": URI}, {"type": "text", "value": TEXT}]
    found = np.array((await ask.post("/instances/clip/embed", {"inputs": mixed})).ok, np.float32)
    assert np.allclose(found, [text, image, text], atol=1e-6)
    one = (await ask.post("/instances/clip/embed", {"inputs": mixed[1], "normalize": False})).ok
    assert np.linalg.norm(one) != pytest.approx(1.0, abs=1e-3)
    texts = np.array(await ask.own_port("clip", "/embed", {"inputs": TEXT}), np.float32)
    assert np.allclose(texts[0], text, atol=1e-6)


async def test_coheres_images_and_contents(ask: Asking) -> None:
    image, text = await vectors(ask)
    body = {"model": "clip", "images": [URI], "input_type": "image", "embedding_types": ["float"]}
    answer = (await ask.post("/v2/embed", body)).ok
    assert (np.array(answer["embeddings"]["float"][0], np.float32) == image).all()
    assert answer["images"] == [{"width": 60, "height": 40, "format": "png", "bit_depth": 8}]
    assert answer["meta"]["billed_units"] == {"input_tokens": 0, "images": 1, "image_tokens": TOKENS}
    contents = [{"content": [PART]}, {"content": [{"type": "text", "text": TEXT}]}]
    answer = (await ask.post("/v2/embed", {"model": "clip", "inputs": contents})).ok
    assert np.allclose(answer["embeddings"]["float"], [image, text], atol=1e-6)
    assert answer["texts"] == [TEXT]


TYPED = {"type": "image", "data": PLAIN}


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/instances/dense/embed", {"inputs": [TYPED]}, 400, "inputs.0.data: only text is supported by the model"),
        ("/v1/embeddings", {"messages": message([PART])}, 400, "messages.0.content.0.image_url: only text"),
        ("/jina/v1/embeddings", {"input": [{"image": URI}]}, 400, "input.0: only text"),
    ],
    ids=["tei", "vllm", "jina"],
)
async def test_a_model_of_texts_refuses_an_image_by_name(
    ask: Asking, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    told = await ask.post(path, {"model": "dense", **body})
    assert told.status == status
    assert said in told.body.decode()


_LINK = "https://example.com/cat.png"
_BROKEN = base64.b64encode(FILE[:-600]).decode()
_LARGE = base64.b64encode(file_of(Image.new("1", (9000, 9000)))).decode()


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/instances/clip/embed", {"inputs": [TEXT, {"type": "image", "url": _LINK}]}, "`inputs.1.url` is a link"),
        (
            "/instances/clip/embed",
            {"inputs": {"type": "image", "url": "file:///etc/passwd"}},
            "links are not fetched here: send",
        ),
        ("/instances/clip/embed", {"inputs": [{"type": "image"}]}, "inputs.0: needs `data` or `url`"),
        ("/instances/clip/embed", {"inputs": [{"type": "video", "data": PLAIN}]}, "text, image, audio and pdf are"),
        (
            "/instances/clip/embed",
            {"inputs": [{"type": "image", "data": "no base64!"}]},
            "neither a data URI nor base64",
        ),
        ("/instances/clip/embed", {"inputs": [{"type": "image", "data": "aGVsbG8="}]}, "send JPEG, PNG, WebP or GIF"),
        (
            "/instances/clip/embed",
            {"inputs": [TEXT, {"type": "image", "data": _BROKEN}]},
            "the PNG file is truncated or broken",
        ),
        (
            "/instances/clip/embed",
            {"inputs": [{"type": "image", "data": _LARGE}]},
            "9000 x 9000 pixels, and 50,000,000",
        ),
        ("/instances/clip/embed", {"inputs": [{**TYPED, "page": 2}]}, "inputs.0: 'page' is not a key of"),
        ("/v1/encode/clip", {"items": [{"images": [{"data": PLAIN, "detail": 1}]}]}, "items.0.images.0.detail"),
        ("/v1/embeddings", {"input": [{"image": _LINK}]}, "`input.0` is a link"),
        ("/v1/embeddings", {"messages": message([PART, {"type": "text", "text": "a"}])}, "texts or one image"),
        ("/v1/embeddings", {"messages": message([PART, PART])}, "texts or one image"),
        ("/v1/embeddings", {"input": "a", "messages": message([PART])}, "messages"),
        ("/v2/embed", {"images": [URI], "texts": [TEXT]}, "contradicts"),
        ("/infinity/embeddings", {"input": [[1, 2]], "modality": "image"}, "must be data URIs or base64"),
        ("/infinity/embeddings", {"input": [URI], "modality": "audio"}, "text and image are supported by the model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusals_name_the_item_and_the_way_out(ask: Asking, path: str, body: dict[str, Any], said: str) -> None:
    told = await ask.post(path, {"model": "clip", **body})
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()


@pytest.mark.parametrize("text", [_LINK, "/etc/passwd", URI], ids=["link", "path", "data URI"])
async def test_a_text_that_looks_like_an_image_is_a_text(ask: Asking, text: str) -> None:
    plain = (await ask.post("/v1/embeddings", {"model": "clip", "input": [text]})).ok
    assert plain["usage"]["prompt_tokens"] == min(77, await ask.tokens("clip", [text]))
    image, _ = await vectors(ask)
    assert np.abs(np.array(plain["data"][0]["embedding"]) - image).max() > 1e-3


async def test_what_a_model_embeds_is_told(ask: Asking) -> None:
    assert (await ask.get("/v1/models/clip")).ok["inputs"] == ["text", "image"]
    assert (await ask.get("/v1/models/dense")).ok["inputs"] == ["text"]
    assert '"modalities":["text","image"]' in await ask.own_text("clip", "/info")


_OF_IMAGES = "this model embeds images alone: send an image"


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/instances/dinov2/embed", {"inputs": [TYPED, {"type": "text", "value": TEXT}]}, _OF_IMAGES),
        ("/instances/dinov2/embed", {"inputs": TEXT}, _OF_IMAGES),
        ("/instances/dinov2/tokenize", {"inputs": TEXT}, "embeds images alone"),
        ("/instances/dinov2/decode", {"ids": [1]}, "embeds images alone"),
        ("/v1/embeddings", {"input": [[1, 2]]}, _OF_IMAGES),
        ("/v2/embed", {"texts": [TEXT], "input_type": "image", "embedding_types": ["float"]}, _OF_IMAGES),
        ("/v1/rerank", {"query": TEXT, "documents": [{"image": URI}]}, _OF_IMAGES),
        ("/infinity/embeddings", {"input": [URI], "modality": "audio"}, "only image is supported by the model"),
    ],
    ids=["item", "text", "tokenize", "decode", "ids", "cohere", "rerank", "audio"],
)
async def test_a_model_of_images_alone_refuses_what_else_there_is_by_name(
    ask: Asking, path: str, body: dict[str, Any], said: str
) -> None:
    told = await ask.post(path, {"model": "dinov2", **body})
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()


async def test_a_model_of_images_alone_embeds_them_in_each_form(ask: Asking) -> None:
    image = np.array(await ask.own_port("dinov2", "/embed", {"inputs": [TYPED]}), np.float32)[0]
    answer = (await ask.post("/v1/embeddings", {"model": "dinov2", "input": [URI, PLAIN], "modality": "image"})).ok
    assert all((np.array(one["embedding"], np.float32) == image).all() for one in answer["data"])
    assert answer["usage"]["prompt_tokens"] == 2 * 10  # nine patches and one for all, each
    query = {"model": "dinov2", "query": {"image": URI}, "documents": [{"image": URI}]}
    assert (await ask.post("/v1/rerank", query)).ok["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-5)
    assert (await ask.get("/v1/models/dinov2")).ok["inputs"] == ["image"]
    assert '"modalities":["image"]' in await ask.own_text("dinov2", "/info")


_TEXTS = {"inputs": TEXT, "input": TEXT, "texts": [TEXT], "text": TEXT, "prompt": TEXT, "query": TEXT}
UNREAD = [
    *(("clip", path) for path in ("/api/embed", "/api/embeddings", "/v1/embeddings", "/voyage/v1/embeddings")),
    *(("clip", path) for path in ("/infinity/embeddings", "/jina/v1/embeddings", "/v1/rerank", "/score", "/pooling")),
    *(
        ("clip", f"/instances/clip{path}")
        for path in ("/embed", "/rerank", "/v1/embeddings", "/tokenize", "/similarity")
    ),
    *(("classifier", path) for path in ("/classify", "/v1/classify", "/instances/classifier/predict")),
    *(("clip", path) for path in ("/tokenize", "/v1/tokenize")),
]


@pytest.mark.parametrize(("model", "path"), UNREAD, ids=[path for _, path in UNREAD])
async def test_an_image_in_a_field_that_a_route_does_not_read_is_refused_by_name(
    ask: Asking, model: str, path: str
) -> None:
    """Ollama ignores it, and so would the answer be of the text alone."""
    body = {"model": model, **_TEXTS, "documents": [TEXT], "images": [PLAIN]}
    told = await ask.post(path, body)
    assert told.status in (400, 422), (told.status, told.body[:300])
    assert "images: this route does not read it" in told.body.decode()
    assert "does not read" not in (await ask.post(path, body | {"images": []})).body.decode()


async def test_classify_refuses_a_chat_by_name(ask: Asking) -> None:
    told = await ask.post("/classify", {"model": "classifier", "messages": message(TEXT)})
    assert told.status == 400
    assert "messages: this route does not read it" in told.body.decode()
