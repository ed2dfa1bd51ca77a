"""SIE's typed vectors and scores, in JSON and in msgpack."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

from teimgr.wire.quantisation import Precision, converted
from teimgr.worker.dialects import sie

TEXTS = ["the quick fox", "fog by the harbour"]
INTEGERS = {"output_dtype": "int8"}
UNSCALED = {"options": {"normalize": False}}
ITEMS = [{"id": "a", "text": TEXTS[0]}, {"text": TEXTS[1]}]


def numpy_of(value: dict[Any, Any]) -> Any:
    """What msgpack-numpy makes of a map."""
    if b"nd" not in value:
        return value
    return np.frombuffer(value[b"data"], np.dtype(value[b"type"])).reshape(value[b"shape"])


async def encode(ask: Asking, model: str, *types: str, **params: Any) -> list[dict[str, Any]]:
    body = {"items": ITEMS, "params": {"output_types": list(types)} | params}
    told = (await ask.post(f"/v1/encode/{model}", body)).ok
    items: list[dict[str, Any]] = told["items"]
    return items


async def test_three_kinds_of_vectors_in_one_call_are_those_of_single_calls(ask: Asking) -> None:
    body = {"items": ITEMS, "params": {"output_types": ["dense", "sparse", "multivector"]}}
    answer = (await ask.post("/v1/encode/m3", body)).ok

    assert [one.get("id") for one in answer["items"]] == ["a", None]
    dense = [one["dense"] for one in answer["items"]]
    assert np.allclose([one["values"] for one in dense], await ask.vectors("m3", TEXTS), atol=1e-6)
    assert all((one["dims"], one["dtype"]) == (32, "float32") for one in dense)
    expected = await ask.own_port("m3", "/embed_sparse", {"inputs": TEXTS})
    for one, entries in zip(answer["items"], expected, strict=True):
        assert one["sparse"]["indices"] == [entry["index"] for entry in entries]
        assert np.allclose(one["sparse"]["values"], [entry["value"] for entry in entries], atol=1e-6)
    alone = await encode(ask, "m3", "multivector")
    for one, single in zip(answer["items"], alone, strict=True):
        assert list(single) == (["id", "multivector"] if "id" in one else ["multivector"])
        assert one["multivector"]["num_tokens"] == len(one["multivector"]["values"])
        assert np.allclose(one["multivector"]["values"], single["multivector"]["values"], atol=1e-6)
    assert answer["usage"] == {"input_tokens": await ask.tokens("m3", TEXTS)}
    assert set(answer["timing"]) == {"total_ms", "queue_ms", "tokenization_ms", "inference_ms"}


def test_an_output_that_is_named_again_and_again_is_made_once() -> None:
    params = sie.EncodeParams(output_types=["sparse", "dense", "sparse"] * 100)
    assert params.outputs == ("sparse", "dense")


async def test_msgpack_is_answered_in_msgpack_with_arrays(ask: Asking) -> None:
    body = {"items": ITEMS, "params": {"output_types": ["dense", "sparse", "multivector"]}}
    kind = "application/msgpack"
    packed = msgpack.packb(body, use_bin_type=True)
    told = await ask.post("/v1/encode/m3", packed, content_type=kind, accept=kind)

    assert (told.status, told.headers["content-type"]) == (200, kind)
    answer = msgpack.unpackb(told.body, raw=False, object_hook=numpy_of)
    plain = (await ask.post("/v1/encode/m3", body)).ok
    for one, other in zip(answer["items"], plain["items"], strict=True):
        assert one["dense"]["values"].dtype == np.float32
        for name in ("dense", "sparse", "multivector"):
            assert np.allclose(one[name]["values"], other[name]["values"], atol=1e-6)


@pytest.mark.parametrize(
    ("headers", "kind"),
    [
        ({}, "application/json"),
        ({"accept": "application/msgpack"}, "application/msgpack"),
        ({"content_type": "application/json", "accept": "application/json"}, "application/json"),
    ],
)
async def test_the_form_of_the_answer_is_the_one_accepted(ask: Asking, headers: dict[str, str], kind: str) -> None:
    told = await ask.post("/v1/encode/dense", {"items": ITEMS}, **headers)

    assert (told.status, told.headers["content-type"]) == (200, kind)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "uint8", "binary"])
async def test_the_numbers_have_the_type_asked_for(ask: Asking, dtype: str) -> None:
    kind = Precision.UBINARY if dtype == "binary" else Precision(dtype)
    plain, typed = (
        await encode(ask, "m3", "dense", "multivector"),
        await encode(ask, "m3", "dense", "multivector", output_dtype=dtype),
    )

    for name in ("dense", "multivector"):
        for one, other in zip(plain, typed, strict=True):
            assert other[name]["dtype"] == dtype
            exact = converted(np.array(one[name]["values"], np.float32), kind)
            got = np.array(other[name]["values"], np.float64)
            assert np.allclose(got, exact.astype(np.float64), atol=1e-3 if dtype == "float16" else 1e-6)


async def test_is_query_chooses_the_prompt_or_the_role(ask: Asking) -> None:
    for is_query, name in ((True, "query"), (False, "document")):
        items = await encode(ask, "dense", "dense", options={"is_query": is_query})
        vectors = await ask.vectors("dense", TEXTS, prompt_name=name)
        assert np.allclose([one["dense"]["values"] for one in items], vectors, atol=1e-6)
        tokens = await encode(ask, "colbert", "multivector", options={"is_query": is_query})
        expected = await ask.own_port("colbert", "/embed_all", {"inputs": TEXTS, "prompt_name": name})
        assert np.allclose(tokens[1]["multivector"]["values"], expected[1], atol=1e-5)


async def test_a_model_may_be_named_by_its_id(ask: Asking, fleet: dict[str, Any]) -> None:
    by_id = (await ask.post(f"/v1/encode/{fleet['dense']}", {"items": ITEMS})).ok

    assert by_id["items"] == (await ask.post("/v1/encode/ada", {"items": ITEMS})).ok["items"]


@pytest.mark.parametrize("model", ["reranker", "dense", "splade", "colbert"])
async def test_scores_are_sorted_and_ranked(ask: Asking, model: str) -> None:
    body = {"query": {"id": "q", "text": "a fox"}, "items": [*ITEMS, {"text": "a fox"}]}
    answer = (await ask.post(f"/v1/score/{model}", body)).ok

    scores = answer["scores"]
    assert answer["query_id"] == "q"
    assert [one["rank"] for one in scores] == [0, 1, 2]
    assert {one["item_id"] for one in scores} == {"a", "item-1", "item-2"}
    assert [one["score"] for one in scores] == sorted((one["score"] for one in scores), reverse=True)
    assert answer["usage"]["input_tokens"] > 0
    assert answer["usage"]["pairs"] == 3


async def test_the_rerankers_scores_are_teis(ask: Asking) -> None:
    body = {"query": {"text": "a fox"}, "items": ITEMS}
    told = (await ask.post("/v1/score/reranker", body)).ok["scores"]

    expected = await ask.own_port("reranker", "/rerank", {"query": "a fox", "texts": TEXTS})
    assert [one["score"] for one in told] == pytest.approx([one["score"] for one in expected], abs=1e-6)


async def test_entities_and_classes_are_those_of_predict(ask: Asking) -> None:
    answer = (await ask.post("/v1/extract/entities", {"items": ITEMS})).ok
    expected = await ask.own_port("entities", "/predict", {"inputs": [[text] for text in TEXTS]})
    for item, found in zip(answer["items"], expected, strict=True):
        assert [(one["text"], one["label"], one["start"], one["end"]) for one in item["entities"]] == [
            (one["word"], one["entity_group"], one["start"], one["end"]) for one in found
        ]
        assert item["relations"] == item["classifications"] == item["objects"] == []
    assert [item["id"] for item in answer["items"]] == ["a", "item-1"]

    params = {"labels": ["joy"], "options": {"threshold": 0.0}}
    told = (await ask.post("/v1/extract/classifier", {"items": ITEMS, "params": params})).ok["items"]
    classes = await ask.own_port("classifier", "/predict", {"inputs": [[text] for text in TEXTS]})
    for item, found in zip(told, classes, strict=True):
        [joy] = item["classifications"]
        assert joy["label"] == "joy"
        assert joy["score"] == pytest.approx(next(one["score"] for one in found if one["label"] == "joy"), abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "code", "said"),
    [
        ("/v1/encode/nothing", {"items": ITEMS}, 404, "MODEL_NOT_FOUND", "does not exist"),
        ("/v1/encode/idle", {"items": ITEMS}, 503, "MODEL_NOT_LOADED", "not running"),
        ("/v1/encode/dense", {"items": []}, 400, "INVALID_INPUT", "`items` cannot be empty"),
        ("/v1/encode/dense", {"items": [{"images": []}]}, 400, "INVALID_INPUT", "items.0: must have a text"),
        ("/v1/encode/dense", {"items": [{"text": "a"}], "params": {"output_types": ["sparse"]}}, 400, None, "SPLADE"),
        ("/v1/encode/dense", {"items": ITEMS, "params": {"instruction": "x" * 5000}}, 400, None, "instruction"),
        ("/v1/encode/dense", {"items": ITEMS, "params": {"options": {"lora_id": "x"}}}, 400, None, "lora_id"),
        (
            "/v1/encode/dense",
            {"items": ITEMS, "params": INTEGERS | UNSCALED},
            400,
            None,
            "int8 is for vectors of length 1",
        ),
        ("/v1/encode/splade", {"items": ITEMS, "params": INTEGERS}, 400, None, "int8 is for vectors of length 1"),
        ("/v1/encode/dense", {"items": ITEMS, "params": {"options": {"output_dtype": [1]}}}, 400, None, "output_dtype"),
        ("/v1/encode/dense", {"items": ITEMS, "params": {"options": {"profile": "x"}}}, 400, None, "options.profile"),
        (
            "/v1/encode/dense",
            {"items": ITEMS, "params": {"options": {"is_query": "false"}}},
            400,
            None,
            "true or false",
        ),
        ("/v1/encode/dense", {"items": ITEMS, "params": {"options": {"normalize": 0}}}, 400, None, "true or false"),
        ("/v1/extract/entities", {"items": ITEMS, "params": {"options": {"profile": "x"}}}, 400, None, "profile"),
        ("/v1/encode/dense", {}, 400, "INVALID_INPUT", "items"),
        ("/v1/extract/dense", {"items": ITEMS}, 400, None, "not a classifier"),
        ("/v1/extract/entities", {"items": ITEMS, "params": {"labels": ["CAT"]}}, 400, None, "LOC, PER"),
        ("/v1/extract/entities", {"items": ITEMS, "params": {"options": {"threshold": 2}}}, 400, None, "threshold"),
        ("/v1/extract/entities", {"items": ITEMS, "params": {"output_schema": {"a": 1}}}, 400, None, "output_schema"),
        ("/v1/score/classifier", {"query": {"text": "a"}, "items": ITEMS}, 400, None, "does not do scoring"),
    ],
)
async def test_errors_are_sies(ask: Asking, path: str, body: Any, status: int, code: str | None, said: str) -> None:
    told = await ask.post(path, body)

    detail = told.json["detail"]
    assert (told.status, detail["code"]) == (status, code or "INVALID_INPUT"), detail
    assert said in detail["message"]
    assert "retry-after" not in told.headers


@pytest.mark.parametrize("body", [b"\xc1", b"", b"\x81\xa5items", b"\x91" * 3000, b"\xdd\xff\xff\xff\xff"])
async def test_what_is_no_msgpack_is_refused(ask: Asking, body: bytes) -> None:
    told = await ask.post("/v1/encode/dense", body, content_type="application/msgpack")

    assert (told.status, told.json["detail"]["code"]) == (400, "INVALID_INPUT")


async def test_an_instruction_may_be_a_text(ask: Asking) -> None:
    body = {"items": [{"text": "fog"}], "params": {"instruction": "find the weather"}}
    [item] = (await ask.post("/v1/encode/dense", body)).ok["items"]
    expected = await ask.vectors("dense", ["find the weather fog"])
    assert np.allclose(item["dense"]["values"], expected[0], atol=1e-6)
    named = (await ask.post("/v1/encode/dense", {"items": [{"text": "fog"}], "params": {"instruction": "query"}})).ok
    expected = await ask.vectors("dense", ["fog"], prompt_name="query")
    assert np.allclose(named["items"][0]["dense"]["values"], expected[0], atol=1e-6)


async def test_a_stopped_instance_is_not_worth_another_attempt(ask: Asking) -> None:
    told = await ask.post("/v1/encode/idle", {"items": [{"text": "fog"}]})
    assert (told.status, told.json["error"]["code"]) == (503, "MODEL_NOT_LOADED")
    assert "retry-after" not in told.headers
