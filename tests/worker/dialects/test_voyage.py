"""Voyage's and Jina's fields: honoured on their own paths and on the shared ones, or refused by name."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
from tests.support.models.dual_encoders import file_of, noise
from tests.worker.dialects.dialect_client import Asking

TEXTS = ["the quick fox", "fog by the harbour"]
PATHS = ["/v1/embeddings", "/voyage/v1/embeddings"]
LONG = "fog and rain " * 100


def embeddings(answer: Any) -> np.ndarray:
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


@pytest.mark.parametrize("path", PATHS)
async def test_a_dimension_and_an_element_type_are_honoured(ask: Asking, path: str) -> None:
    unit = await ask.vectors("dense", TEXTS, dimensions=8)
    cut = (await ask.post(path, {"model": "dense", "input": TEXTS, "output_dimension": 8})).ok
    assert np.allclose(embeddings(cut), unit, atol=1e-6)
    assert cut["usage"]["total_tokens"] == await ask.tokens("dense", TEXTS)
    eighth = {"model": "dense", "input": TEXTS, "output_dimension": 8}
    bits = (await ask.post(path, eighth | {"output_dtype": "ubinary"})).ok
    assert embeddings(bits).tolist() == np.packbits(unit > 0, axis=-1).tolist()
    coded = (await ask.post(path, eighth | {"output_dtype": "int8", "encoding_format": "base64"})).ok
    found = [np.frombuffer(base64.b64decode(one["embedding"]), np.int8) for one in coded["data"]]
    assert np.allclose(np.array(found) / 127.5, unit, atol=0.013)  # steps of 1/127.5


@pytest.mark.parametrize(
    ("fields", "prompt"),
    [
        ({"input_type": "query"}, "query"),
        ({"input_type": "document"}, "document"),
        ({"input_type": "search_query"}, "query"),
        ({"task": "retrieval.passage"}, "document"),
        ({"input_type": None}, None),
    ],
)
async def test_a_role_chooses_the_models_prompt(ask: Asking, fields: dict[str, Any], prompt: str | None) -> None:
    found = embeddings((await ask.post(PATHS[0], {"model": "dense", "input": TEXTS} | fields)).ok)
    assert np.allclose(found, await ask.vectors("dense", TEXTS, prompt_name=prompt), atol=1e-6)


async def test_truncation_may_be_refused(ask: Asking) -> None:
    for fields in ({"truncation": False}, {"truncate": False}, {"truncate": "NONE"}):
        refused = await ask.post(PATHS[0], {"model": "dense", "input": LONG} | fields)
        assert (refused.status, "96" in refused.json["error"]["message"]) == (400, True), refused
    for fields in ({"truncation": True}, {"truncate": "END"}):
        assert (await ask.post(PATHS[0], {"model": "dense", "input": LONG} | fields)).ok
    few = (await ask.post(PATHS[0], {"model": "dense", "input": LONG, "truncate_prompt_tokens": 10})).ok
    assert few["usage"]["prompt_tokens"] == 10


async def test_jinas_encoding_is_honoured(ask: Asking) -> None:
    unit = await ask.vectors("dense", TEXTS)
    coded = (await ask.post(PATHS[0], {"model": "dense", "input": TEXTS, "embedding_type": "base64"})).ok
    found = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]]
    assert np.allclose(np.array(found), unit, atol=1e-6)
    bits = (await ask.post(PATHS[0], {"model": "dense", "input": TEXTS, "embedding_type": "binary"})).ok
    assert embeddings(bits).shape == (2, 4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"output_dtype": "int4"}, "output_dtype: "),
        ({"embedding_types": ["int8"]}, "embedding_types: is Cohere's"),
        ({"late_chunking": True}, "late_chunking: is not supported"),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages: contradict `input`; send one of the two"),
        (
            {"input_type": "text-matching"},
            "input_type: the model has no prompt for 'text-matching'; there are: query, document",
        ),
        ({"dimensions": 8, "output_dimension": 9}, "output_dimension: contradicts dimensions"),
        ({"embedding_type": "binary", "output_dtype": "int8"}, "embedding_type: contradicts output_dtype"),
        ({"encoding_format": "bytes_only", "output_dtype": "int8"}, "output_dtype: is not for encoding_format bytes"),
        ({"encoding_format": "bytes", "embedding_type": "binary"}, "embedding_type: is not for encoding_format bytes"),
        ({"encoding_format": "bytes", "embedding_type": "base64"}, "embedding_type: is not for encoding_format bytes"),
        ({"embed_dtype": "float16", "output_dtype": "int8"}, "embed_dtype: contradicts output_dtype"),
        ({"return_multivector": True}, "return_multivector: is not supported; /pooling has vectors per token"),
        (
            {"task": "retrieval.reply"},
            "task: the model has no prompt for 'retrieval.reply'; there are: query, document",
        ),
        ({"normalized": False, "output_dtype": "int8"}, "output_dtype: int8 is for vectors of length 1"),
        ({"normalized": False, "embedding_type": "uint8"}, "embedding_type: uint8 is for vectors of length 1"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(ask: Asking, fields: dict[str, Any], says: str) -> None:
    refused = await ask.post(PATHS[0], {"model": "dense", "input": "fog"} | fields)
    assert (refused.status, refused.json["error"]["param"]) == (400, says.partition(":")[0])
    assert says in refused.json["error"]["message"]


async def test_errors_of_its_own_paths_have_its_form(ask: Asking) -> None:
    refused = await ask.post(PATHS[1], {"model": "nothing", "input": "fog"})
    assert (refused.status, list(refused.json)) == (404, ["detail"])


@pytest.mark.parametrize("path", ["/v1/rerank", "/voyage/v1/rerank", "/rerank"])
async def test_top_k_ranks_in_voyages_form(ask: Asking, path: str) -> None:
    body = {"model": "reranker", "query": "rain", "documents": [*TEXTS, "rain"]}
    union = (await ask.post("/v1/rerank", body)).ok["results"]
    ranked = (await ask.post(path, body | {"top_k": 2, "return_documents": True})).ok
    expected = [{**one, "document": body["documents"][one["index"]]} for one in union[:2]]
    assert ranked["data"] == expected
    assert (ranked["object"], set(ranked["usage"])) == ("list", {"prompt_tokens", "total_tokens"})
    whole = (await ask.post(path, body | {"top_k": None})).ok
    assert [list(one) for one in whole["data"]] == [["index", "relevance_score"]] * 3


MULTIMODAL = "/v1/multimodalembeddings"
URI = f"data:image/png;base64,{base64.b64encode(file_of(noise(60, 40))).decode()}"
IMAGE = {"type": "image_base64", "image_base64": URI}
SAID = {"type": "text", "text": TEXTS[0]}


@pytest.mark.parametrize("path", [MULTIMODAL, f"/voyage{MULTIMODAL}"])
async def test_contents_of_a_text_or_an_image_have_the_vectors_of_other_routes(ask: Asking, path: str) -> None:
    inputs = [{"content": [IMAGE]}, {"content": [{"type": "image_url", "image_url": URI}]}, {"content": [SAID]}]
    answer = (await ask.post(path, {"model": "clip", "inputs": inputs})).ok
    image = {"type": "image", "data": URI.partition(",")[2]}
    expected = np.array(await ask.own_port("clip", "/embed", {"inputs": [image, image, TEXTS[0]]}), np.float32)
    found = embeddings(answer)
    assert (found[:2] == expected[:2]).all()
    assert np.allclose(found[2], expected[2], atol=1e-6)
    tokens = await ask.tokens("clip", TEXTS[:1])
    usage = {"text_tokens": tokens, "image_pixels": 2 * 60 * 40, "video_pixels": 0, "total_tokens": tokens + 2 * 5}
    assert answer["usage"] == usage
    # As its client asks for them.
    coded = {"model": "clip", "inputs": inputs[:1], "encoding_format": "base64", "output_dimension": 8}
    [one] = (await ask.post(path, coded | {"input_type": "query", "truncation": True, "output_dtype": None})).ok["data"]
    cut = expected[0, :8] / np.linalg.norm(expected[0, :8])
    assert np.allclose(np.frombuffer(base64.b64decode(one["embedding"]), "<f4"), cut, atol=1e-6)


async def test_a_content_of_both_has_one_vector_of_a_model_that_reads_both(ask: Asking) -> None:
    answer = (await ask.post(MULTIMODAL, {"model": "chat", "inputs": [{"content": [IMAGE, SAID]}]})).ok
    message = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": URI}}, SAID]}]
    same = (await ask.post("/v1/embeddings", {"model": "chat", "messages": message})).ok
    assert np.allclose(embeddings(answer), embeddings(same), atol=1e-6)
    assert answer["usage"]["image_pixels"] == 60 * 40
    assert answer["usage"]["total_tokens"] == same["usage"]["prompt_tokens"] == answer["usage"]["text_tokens"] + 6


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([{"content": [IMAGE, SAID]}], "one at a time"),
        ([{"content": [{"type": "video_url", "video_url": "http://a/b.mp4"}]}], "inputs.0.content.0: only parts of"),
        ([{"content": []}], "inputs.0.content: needs texts and images"),
        ([{"text": "fog"}], "inputs.0.content: must be a text or a list of parts"),
        ([{"content": [{"type": "image_url", "image_url": "http://a/b.png"}]}], "is a link"),
        ([{"content": [SAID]}] * 1001, "batch size 1001 > maximum allowed batch size 1000"),
    ],
    ids=range(6),
)
async def test_contents_that_cannot_be_embedded_are_refused_by_name(ask: Asking, inputs: Any, says: str) -> None:
    refused = await ask.post(MULTIMODAL, {"model": "clip", "inputs": inputs})
    assert (refused.status, list(refused.json)) == (400, ["detail"])
    assert says in refused.json["detail"]
