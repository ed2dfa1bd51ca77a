"""Images in SIE's items, in reranks, and of page models in the words of every dialect with vectors per token."""

from __future__ import annotations

import base64
from typing import Any

import msgpack
import numpy as np
import pytest
from tests.support.models.dual_encoders import file_of, noise, pdf_of
from tests.worker.dialects.dialect_client import Asking

from teimgr.wire import pdf_pages

FILES = [file_of(noise(90, 60, seed)) for seed in range(3)]
PLAIN = [base64.b64encode(one).decode() for one in FILES]
URIS = [f"data:image/png;base64,{one}" for one in PLAIN]
TEXT = "the quick fox"
TYPED = [{"type": "image", "data": one} for one in PLAIN]


async def matrix(ask: Asking, row: int) -> np.ndarray:
    """Of a page, by the instance's own port."""
    found = await ask.own_port("pages", "/embed_all", {"inputs": [TYPED[row]]})
    return np.array(found[0], np.float32)


async def of_query(ask: Asking) -> np.ndarray:
    asked = {"inputs": TEXT, "prompt_name": "query"}
    return np.array((await ask.own_port("pages", "/embed_all", asked))[0], np.float32)


async def test_a_page_has_one_matrix_bit_for_bit_in_every_form(ask: Asking) -> None:
    page, query = await matrix(ask, 0), await of_query(ask)
    assert page.shape[1] == query.shape[1] == 24
    mixed = (await ask.post("/instances/pages/embed_all", {"inputs": [TYPED[0], TEXT]})).ok
    assert (np.array(mixed[0], np.float32) == page).all()
    assert np.allclose(mixed[1], query, atol=1e-6)
    body = {"model": "pages", "input": [URIS[0]], "modality": "image"}
    answer = (await ask.post("/infinity/embeddings", body)).ok
    assert (np.array(answer["data"][0]["embedding"], np.float32) == page).all()
    assert answer["usage"]["prompt_tokens"] == len(page)
    items = {"items": [{"images": [{"data": PLAIN[0]}]}], "params": {"output_types": ["multivector"]}}
    answer = (await ask.post("/v1/encode/pages", items)).ok
    assert (np.array(answer["items"][0]["multivector"]["values"], np.float32) == page).all()
    assert answer["usage"] == {"input_tokens": len(page), "images": 1}


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


async def test_vllms_pooling_takes_pages_as_messages(ask: Asking) -> None:
    parts = [{"type": "image_url", "image_url": {"url": one}} for one in URIS]
    page = await matrix(ask, 0)
    for more in ({}, {"task": "token_embed"}, {"encoding_format": "base64"}):
        answer = (await ask.post("/pooling", {"model": "pages", "messages": chat(parts[0]), **more})).ok
        [one] = answer["data"]
        data = one["data"] if isinstance(one["data"], list) else np.frombuffer(base64.b64decode(one["data"]), "<f4")
        assert (one["object"], one["index"], answer["object"]) == ("pooling", 0, "list")
        assert (np.array(data, np.float32).reshape(page.shape) == page).all()
        assert answer["usage"]["prompt_tokens"] == len(page)
    text = {"type": "text", "text": TEXT}
    several = (await ask.post("/pooling", {"model": "pages", "messages": [chat(parts[0]), chat(text)]})).ok["data"]
    assert (np.array(several[0]["data"], np.float32) == page).all()
    assert np.allclose(several[1]["data"], await of_query(ask), atol=1e-6)
    texts = (await ask.post("/pooling", {"model": "dense", "messages": [chat(text), chat(text)]})).ok["data"]
    assert np.allclose([one["data"] for one in texts], await ask.vectors("dense", [TEXT] * 2), atol=1e-6)
    image = np.array(await ask.own_port("clip", "/embed", {"inputs": [TYPED[0]]}), np.float32)
    for more in ({}, {"task": "embed"}):
        pooled = (await ask.post("/pooling", {"model": "clip", "messages": chat(parts[0]), **more})).ok["data"]
        assert (np.array(pooled[0]["data"], np.float32) == image[0]).all()


async def test_patches_of_a_page_are_told(ask: Asking) -> None:
    asked = {"inputs": [TYPED[0], TEXT], "patches": True}
    page, query = (await ask.post("/instances/pages/embed_all", asked)).ok
    assert (np.array(page["vectors"], np.float32) == await matrix(ask, 0)).all()
    patches = page["patches"]
    assert patches["rows"] * patches["columns"] == len(patches["vectors"]) == len(set(patches["vectors"]))
    assert 0 < min(patches["vectors"]) < max(patches["vectors"]) < len(page["vectors"])
    assert query["patches"] is None
    alone = (await ask.post("/instances/colbert/embed_all", {"inputs": [TEXT], "patches": True})).ok
    assert alone[0]["patches"] is None
    assert (await ask.post("/instances/colbert/embed_all", {"inputs": [TEXT]})).ok == [alone[0]["vectors"]]
    told = await ask.post("/instances/pages/embed_all", asked | {"pool_factor": 2})
    assert (told.status, "patches: pooled vectors belong to no patch" in told.body.decode()) == (422, True)


PDF = pdf_of(*((72, 36, f"{blue} 0 1 rg 0 0 {10 + 30 * blue} 36 re f") for blue in (0, 1)))


def page_of(data: bytes = PDF, **given: Any) -> dict[str, Any]:
    return {"type": "pdf", "data": base64.b64encode(data).decode(), **given}


async def test_a_page_of_a_document_has_the_vectors_of_its_image(ask: Asking) -> None:
    images = [{"type": "image", "data": base64.b64encode(one).decode()} for one in pdf_pages.pages(PDF)]
    documents = [page_of(page=1), page_of(page=2)]
    for instance, route in (("pages", "/embed_all"), ("clip", "/embed")):
        expected, found = [
            (await ask.post(f"/instances/{instance}{route}", {"inputs": inputs})).ok for inputs in (images, documents)
        ]
        assert found == expected
        assert expected[0] != expected[1]
    ranked = [
        (await ask.post("/instances/pages/rerank", {"query": TEXT, "texts": texts})).ok for texts in (images, documents)
    ]
    assert ranked[0] == ranked[1]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (page_of(), "`inputs.0.data`: the PDF has 2 pages, and an input is one of them: give its number as `page`"),
        (page_of(page=3), "`inputs.0.data`: the PDF has 2 pages, and `page` is 3"),
        (page_of(page=0), "inputs.0.page: must be the number of a page, from 1 on, and is '0'"),
        (page_of(b"no document", page=1), "the PDF is broken, or no PDF"),
        ({"type": "image", "data": page_of()["data"]}, "/embed and /rerank take"),
    ],
)
async def test_what_is_no_page_is_refused_with_the_way_out(ask: Asking, item: dict[str, Any], said: str) -> None:
    told = await ask.post("/instances/pages/embed_all", {"inputs": [item]})
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()


async def test_sies_bytes_in_msgpack_and_texts_beside_them(ask: Asking) -> None:
    body = {"items": [{"id": "a", "images": [{"data": FILES[0], "format": "png"}]}, {"text": TEXT}]}
    packed: Any = msgpack.packb(body, use_bin_type=True)
    answer = (
        await ask.post("/v1/encode/clip", packed, content_type="application/msgpack", accept="application/json")
    ).ok
    expected = await ask.own_port("clip", "/embed", {"inputs": [TYPED[0], {"type": "text", "value": TEXT}]})
    found = [one["dense"]["values"] for one in answer["items"]]
    assert (np.array(found[0], np.float32) == np.array(expected[0], np.float32)).all()
    assert np.allclose(found[1], expected[1], atol=1e-6)
    assert answer["usage"]["images"] == 1


DOCUMENTS: dict[str, list[Any]] = {
    "Jina": [{"image": one} for one in URIS],
    "vLLM": [{"content": [{"type": "image_url", "image_url": {"url": one}}]} for one in URIS],
}


@pytest.mark.parametrize("form", DOCUMENTS)
async def test_pages_are_ranked_by_their_best_matches_and_pictures_by_their_cosine(ask: Asking, form: str) -> None:
    query, pages = await of_query(ask), [await matrix(ask, row) for row in range(len(FILES))]
    best = [float((query @ page.T).max(axis=1).sum()) for page in pages]
    vectors = np.array(await ask.own_port("clip", "/embed", {"inputs": [{"type": "text", "value": TEXT}, *TYPED]}))
    for model, expected in (("pages", best), ("clip", list(vectors[1:] @ vectors[0]))):
        body = {"model": model, "query": TEXT, "documents": DOCUMENTS[form], "top_n": 2, "return_documents": False}
        results = (await ask.post("/v1/rerank", body)).ok["results"]
        assert [one["index"] for one in results] == np.argsort(expected)[::-1][:2].tolist()
        assert np.allclose([one["relevance_score"] for one in results], sorted(expected)[:0:-1], rtol=1e-4)


async def test_texts_alone_are_ranked_as_beside_images(ask: Asking) -> None:
    """By the cosines of CLIP's vectors."""
    query, *documents = vectors = np.array(await ask.own_port("clip", "/embed", {"inputs": ["a", "fog", "the fox"]}))
    ranked = await ask.own_port("clip", "/rerank", {"query": "a", "texts": ["fog", "the fox"], "return_text": True})
    body = {"model": "clip", "query": "a", "documents": ["fog", {"text": "the fox"}], "max_tokens_per_doc": 9}
    results = (await ask.post("/v1/rerank", body)).ok["results"]
    for row, text in enumerate(["fog", "the fox"]):
        assert next(one for one in ranked if one["index"] == row)["text"] == text
        for found in (ranked, results):
            [score] = [one.get("score", one.get("relevance_score")) for one in found if one["index"] == row]
            assert score == pytest.approx(float(query @ documents[row]), abs=1e-5)
    assert vectors.shape[0] == 3


async def test_teis_rerank_takes_items_of_a_type(ask: Asking) -> None:
    """A page model by best matches, CLIP by cosine; the query may be an image too."""
    query, pages = await of_query(ask), [await matrix(ask, row) for row in range(len(FILES))]
    best = [float((query @ page.T).max(axis=1).sum()) for page in pages]
    body = {"query": TEXT, "texts": TYPED, "return_text": True}
    for ranked in ((await ask.post("/instances/pages/rerank", body)).ok, await ask.own_port("pages", "/rerank", body)):
        assert [one["index"] for one in ranked] == np.argsort(best)[::-1].tolist()
        assert np.allclose([one["score"] for one in ranked], sorted(best)[::-1], rtol=1e-4)
        assert [one["text"] for one in ranked] == [TYPED[one["index"]] for one in ranked]
    [first, second] = await ask.own_port("clip", "/rerank", {"query": TYPED[1], "texts": [TEXT, TYPED[1]]})
    assert first == {"index": 1, "score": pytest.approx(1.0, abs=1e-5)}
    assert second["index"] == 0


async def test_sies_score_of_a_query_against_pages(ask: Asking) -> None:
    items = [{"id": str(row), "images": [{"data": one}]} for row, one in enumerate(PLAIN)]
    answer = (await ask.post("/v1/score/pages", {"query": {"text": TEXT}, "items": items})).ok
    query = await of_query(ask)
    best = [float((query @ (await matrix(ask, row)).T).max(axis=1).sum()) for row in range(len(FILES))]
    assert [one["item_id"] for one in answer["scores"]] == [str(row) for row in np.argsort(best)[::-1]]
    assert answer["usage"]["images"] == len(FILES)


async def test_sies_score_takes_an_image_as_its_query(ask: Asking) -> None:
    items = [{"id": "page", "images": [{"data": PLAIN[1]}]}, {"id": "text", "text": TEXT}]
    answer = (await ask.post("/v1/score/clip", {"query": {"images": [{"data": PLAIN[1]}]}, "items": items})).ok
    first, second = answer["scores"]
    assert (first["item_id"], first["score"]) == ("page", pytest.approx(1.0, abs=1e-5))
    vectors = await ask.own_port("clip", "/embed", {"inputs": [TYPED[1], {"type": "text", "value": TEXT}]})
    assert second["score"] == pytest.approx(float(np.dot(*vectors)), abs=1e-5)
    assert answer["usage"]["images"] == 2


IMAGE = {"data": PLAIN[0]}


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/v1/encode/clip", {"items": [{"text": "a", "images": [IMAGE]}]}, "items.0: needs texts or one image"),
        ("/v1/encode/clip", {"items": [{"images": [IMAGE, IMAGE]}]}, "as separate inputs"),
        ("/v1/encode/clip", {"items": [{"text": "a"}, {"images": [{"data": "!"}]}]}, "`items.1.images.0.data`"),
        ("/v1/encode/dense", {"items": [{"images": [IMAGE]}]}, "only text is supported by the model"),
        ("/v1/encode/dense", {"items": [{"video": {}}]}, "items.0: video and documents are not supported"),
        ("/v1/rerank", {"model": "reranker", "query": "a", "documents": DOCUMENTS["Jina"]}, "only text is supported"),
        ("/v1/rerank", {"model": "pages", "query": "a", "documents": ["b", *DOCUMENTS["Jina"]]}, "send an image"),
        ("/v1/rerank", {"model": "pages", "query": "a", "documents": ["b", "c"]}, "send an image"),
        ("/instances/pages/rerank", {"query": "a", "texts": ["b", "c"]}, "send an image"),
        ("/instances/dinov2/rerank", {"query": "a", "texts": ["b", "c"]}, "send an image"),
        ("/embed", {"model": "pages", "inputs": [TYPED[0]]}, "one vector per text"),
        ("/pooling", {"model": "dense", "messages": chat(DOCUMENTS["vLLM"][0]["content"][0])}, "only text is"),
        ("/pooling", {"model": "judge", "messages": chat({"type": "text", "text": "a"})}, "send `input`"),
        ("/pooling", {"model": "pages", "messages": chat(), "truncate_prompt_tokens": 9}, "is not for requests with"),
        ("/pooling", {"model": "pages", "messages": chat({"type": "video_url"})}, "messages.0.content.0: only parts"),
        ("/instances/reranker/rerank", {"query": "a", "texts": TYPED}, "texts.0.data: only text is supported"),
        ("/instances/pages/rerank", {"query": "a", "texts": [{"type": "image", "data": "!"}]}, "`texts.0.data`"),
        ("/instances/clip/rerank", {"query": {"type": "video"}, "texts": ["a"]}, "query.type: 'video' is not served"),
        (
            "/instances/clip/rerank",
            {"query": "a", "texts": TYPED, "truncation_direction": "Left"},
            "truncation_direction: Left is not for requests with images",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_refusals_name_the_item_and_the_way_out(ask: Asking, path: str, body: dict[str, Any], said: str) -> None:
    told = await ask.post(path if path != "/embed" else "/instances/pages/embed", body)
    assert 400 <= told.status < 500, told
    assert said in told.body.decode()
