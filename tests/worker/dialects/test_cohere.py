"""Cohere's embedding, versions 1 and 2."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import orjson
import pytest
from tests.support.rest_listener import MODEL
from tests.worker.dialects.dialect_client import Asking

from teimgr.engine.job import InferOptions, Job, Lane
from teimgr.spec import WorkerSpec
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import http_inference
from teimgr.worker.dialects import cohere

TEXTS = ["the quick fox", "fog by the harbour"]


def request(**more: Any) -> dict[str, Any]:
    return {"model": "dense", "texts": TEXTS, "input_type": "search_document"} | more


async def test_version_2_answers_by_type(ask: Asking) -> None:
    answer = (await ask.post("/v2/embed", request())).ok

    assert list(answer["embeddings"]) == ["float"]
    vectors = await ask.vectors("dense", TEXTS, prompt_name="document")
    assert np.allclose(answer["embeddings"]["float"], vectors, atol=1e-6)
    assert answer["texts"] == TEXTS
    assert answer["response_type"] == "embeddings_by_type"
    tokens = await ask.tokens("dense", [f"document: {text}" for text in TEXTS])
    assert answer["meta"] == {"api_version": {"version": "2"}, "billed_units": {"input_tokens": tokens}}


async def test_version_1_answers_with_floats_unless_types_are_asked_for(ask: Asking) -> None:
    plain = (await ask.post("/v1/embed", request())).ok
    typed = (await ask.post("/v1/embed", request(embedding_types=["float"]))).ok

    assert plain["response_type"] == "embeddings_floats"
    assert typed["response_type"] == "embeddings_by_type"
    assert plain["meta"]["api_version"] == {"version": "1"}
    assert np.allclose(plain["embeddings"], typed["embeddings"]["float"], atol=1e-6)


@pytest.mark.parametrize(
    ("input_type", "prompt"),
    [("search_query", "query"), ("search_document", "document"), ("classification", None), (None, None)],
)
async def test_the_input_type_chooses_the_prompt(ask: Asking, input_type: str | None, prompt: str | None) -> None:
    answer = (await ask.post("/v2/embed", request(input_type=input_type))).ok

    vectors = await ask.vectors("dense", TEXTS, prompt_name=prompt)
    assert np.allclose(answer["embeddings"]["float"], vectors, atol=1e-6)


async def test_every_type_in_one_call(ask: Asking) -> None:
    types = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    told = (await ask.post("/v2/embed", request(embedding_types=types))).ok["embeddings"]

    assert list(told) == types
    vectors = np.array(told["float"], np.float32)
    for name in ("int8", "uint8", "binary", "ubinary"):
        assert np.array_equal(told[name], converted(vectors, Precision(name))), name
    assert np.array_equal([np.frombuffer(base64.b64decode(one), "<f4") for one in told["base64"]], vectors)


def test_a_type_that_is_named_again_and_again_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(cohere, "_as_type", lambda vectors, name: made.append(name))
    body = cohere.CohereEmbedRequest(texts=["fog"], embedding_types=["int8", "base64", "int8"] * 100)
    job = Job(["fog"], InferOptions(), Lane.BULK)
    job.vectors = np.ones((1, 4), np.float32)

    served = http_inference.ServedModel(MODEL, WorkerSpec(name="i", model_id="m", port=1))
    encode = cohere._job("2", body, ["fog"], served).encode
    assert encode is not None
    assert list(orjson.loads(encode(job))["embeddings"]) == made == ["int8", "base64"]


async def test_an_output_dimension_is_obeyed(ask: Asking) -> None:
    answer = (await ask.post("/v2/embed", request(output_dimension=8))).ok

    vectors = await ask.vectors("dense", TEXTS, prompt_name="document", dimensions=8)
    assert np.allclose(answer["embeddings"]["float"], vectors, atol=1e-6)


async def test_values_are_converted_as_pydantic_does(ask: Asking) -> None:
    """As vLLM reads the same bodies."""
    exact = (await ask.post("/v2/embed", request(output_dimension=8, max_tokens=20))).ok
    lenient = (await ask.post("/v2/embed", request(output_dimension="8", max_tokens=20.0))).ok
    assert lenient["embeddings"] == exact["embeddings"]
    refused = await ask.post("/v2/embed", request(output_dimension="all"))
    assert (refused.status, refused.json["message"].partition(":")[0]) == (400, "output_dimension")


async def test_truncation_is_at_the_end_the_start_or_refused(ask: Asking) -> None:
    long = ["the quick brown fox " * 30 + "lamps and fog by the harbour " * 20]

    async def embedded(**more: Any) -> Any:
        return (await ask.post("/v2/embed", request(texts=long, **more))).ok["embeddings"]["float"]

    for truncate, direction in (("END", "right"), ("START", "left"), (None, "right")):
        vectors = await ask.vectors("dense", long, prompt_name="document", truncation_direction=direction)
        assert np.allclose(await embedded(truncate=truncate), vectors, atol=1e-6)
    refused = await ask.post("/v2/embed", request(texts=long, truncate="NONE"))
    assert (refused.status, list(refused.json)) == (400, ["message"])
    assert "must have less than" in refused.json["message"]


async def test_texts_are_cut_to_the_tokens_asked_for(ask: Asking) -> None:
    head, tail = [await ask.tokens("dense", [f"document: {text}"]) for text in ("fog fog", "rain rain")]
    cut = (await ask.post("/v2/embed", request(texts=["fog fog rain rain"], max_tokens=head))).ok
    short = (await ask.post("/v2/embed", request(texts=["fog fog"]))).ok
    left = (await ask.post("/v2/embed", request(texts=["fog fog rain rain"], max_tokens=tail, truncate="START"))).ok
    end = (await ask.post("/v2/embed", request(texts=["rain rain"]))).ok

    assert cut["embeddings"] == short["embeddings"]
    assert left["embeddings"] == end["embeddings"]
    whole = request(texts=["fog fog", "fog fog rain rain"], max_tokens=head, truncate="NONE")
    refused = await ask.post("/v2/embed", whole)
    assert (refused.status, refused.json["message"]) == (400, f"`max_tokens` is {head} (input 1)")
    assert (await ask.post("/v2/embed", whole | {"texts": ["fog fog"]})).ok["embeddings"] == short["embeddings"]


async def test_inputs_may_be_contents_of_texts(ask: Asking) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    answer = (await ask.post("/v2/embed", request(texts=None, inputs=inputs))).ok

    assert answer["embeddings"] == (await ask.post("/v2/embed", request())).ok["embeddings"]
    for more in ({"texts": []}, {"texts": [], "images": []}):
        assert (await ask.post("/v2/embed", request(inputs=inputs, **more))).ok["embeddings"] == answer["embeddings"]
    assert (await ask.post("/v2/embed", request(inputs=[]))).ok["embeddings"] == answer["embeddings"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"texts": []}, "`texts` cannot be empty"),
        ({"inputs": [{"content": [{"type": "text", "text": "fog"}]}]}, "inputs: contradicts texts; send one of them"),
        ({"input_type": "reply"}, "input_type: the model has no prompt for 'reply'; there are: query, document"),
        ({"max_tokens": 2}, "max_tokens: 2 leave no token of the text"),
        ({"texts": ["fog", ""]}, "`texts` cannot have an empty text"),
        ({"texts": None, "images": ["data:image/png;base64,"]}, "images.0: only text is supported by the model"),
        ({"embedding_types": ["float4"]}, "embedding_types"),
        ({"output_dimension": 0}, "positive"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"model": "classifier"}, "Model is not an embedding model"),
        (
            {"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {}}]}]},
            "inputs.0.content.0: a part of type image_url needs `image_url` with `url`",
        ),
    ],
)
async def test_errors_are_coheres(ask: Asking, more: dict[str, Any], said: str) -> None:
    told = await ask.post("/v2/embed", request(**more))

    assert (told.status, list(told.json)) == (400, ["message"])
    assert said in told.json["message"]


async def test_tokens_and_back(ask: Asking) -> None:
    [spans] = await ask.own_port("dense", "/tokenize", {"inputs": "the quick fox", "add_special_tokens": False})
    told = (await ask.post("/v1/tokenize", {"model": "dense", "text": "the quick fox"})).ok
    assert told["tokens"] == [span["id"] for span in spans]
    assert told["token_strings"] == ["the", " quic", "k", " fox"]
    assert (await ask.post("/v1/detokenize", {"model": "dense", "tokens": told["tokens"]})).ok[
        "text"
    ] == "the quick fox"


async def test_a_classifier_classifies_in_coheres_and_in_infinitys_form(ask: Asking) -> None:
    texts = ["the quick fox", "fog"]
    probs = [one["probs"] for one in (await ask.post("/classify", {"model": "classifier", "input": texts})).ok["data"]]
    told = (await ask.post("/v1/classify", {"model": "classifier", "inputs": texts})).ok["classifications"]
    assert [one["input"] for one in told] == texts
    for one, expected in zip(told, probs, strict=True):
        confidences = [label["confidence"] for label in one["labels"].values()]
        assert confidences == pytest.approx(expected, abs=1e-6)
        assert one["prediction"] == [*one["labels"]][int(np.argmax(expected))]
        assert one["confidence"] == pytest.approx(max(expected), abs=1e-6)
    infinity = (await ask.post("/v1/classify", {"model": "classifier", "input": texts})).ok
    assert infinity["object"] == "classify"
    refused = await ask.post("/v1/classify", {"model": "classifier", "inputs": texts, "examples": [{"text": "a"}]})
    assert (refused.status, refused.json["message"][:25]) == (400, "examples: is not supported"[:25])


async def test_a_key_is_checked_and_health_is_infinitys(ask: Asking) -> None:
    assert (await ask.post("/v1/check-api-key", {})).ok["valid"] is True
    assert (await ask.get("/v1/health")).ok["unix"] > 1e9
