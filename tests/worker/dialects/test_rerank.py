"""Reranking in the dialects of Cohere, Jina, vLLM and Infinity."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

QUERY = "the quick fox"
DOCUMENTS = ["fog by the harbour", "a quick brown fox", "lamps", "the quick fox"]


async def expected(ask: Asking, **options: Any) -> list[tuple[int, float]]:
    """Index and score of each document, best first, by the instance's own port."""
    body = {"query": QUERY, "texts": DOCUMENTS} | options
    return [(one["index"], one["score"]) for one in await ask.own_port("reranker", "/rerank", body)]


def ranks(answer: Any) -> list[tuple[int, float]]:
    return [(one["index"], pytest.approx(one["relevance_score"], abs=1e-6)) for one in answer["results"]]


def request(**more: Any) -> dict[str, Any]:
    return {"model": "reranker", "query": QUERY, "documents": DOCUMENTS} | more


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/vllm/v1/rerank", "/jina/v1/rerank"])
async def test_the_scores_are_those_of_the_instances_port(ask: Asking, path: str) -> None:
    answer = (await ask.post(path, request())).ok

    assert ranks(answer) == await expected(ask)
    assert answer["model"] == "reranker"
    tokens = sum([await ask.tokens("reranker", [QUERY, text]) - 1 for text in DOCUMENTS])
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(("path", "version"), [("/v1/rerank", "1"), ("/v2/rerank", "2")])
async def test_coheres_meta_bills_searches(ask: Asking, path: str, version: str) -> None:
    answer = (await ask.post(path, request(documents=DOCUMENTS * 26))).ok

    assert answer["meta"]["api_version"] == {"version": version}
    assert answer["meta"]["billed_units"] == {"search_units": 2}
    assert answer["meta"]["tokens"] == {"input_tokens": answer["usage"]["total_tokens"]}
    assert answer["id"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_top_n_keeps_the_best(ask: Asking, path: str) -> None:
    assert ranks((await ask.post(path, request(top_n=2))).ok) == (await expected(ask))[:2]
    assert len((await ask.post(path, request(top_n=99))).ok["results"]) == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("path", "chosen", "by_default"),
    [
        ("/v1/rerank", {}, False),
        ("/v1/rerank", {"x_teimgr_dialect": "jina"}, True),
        ("/v1/rerank", {"x_teimgr_dialect": "vllm"}, True),
        ("/v1/rerank", {"x_teimgr_dialect": "sie"}, False),
        ("/jina/v1/rerank", {}, True),
        ("/vllm/rerank", {}, True),
    ],
)
async def test_documents_come_back_where_asked_or_where_the_dialect_does_so(
    ask: Asking, path: str, chosen: dict[str, str], by_default: bool
) -> None:
    plain = (await ask.post(path, request(), **chosen)).ok["results"]
    with_them = (await ask.post(path, request(return_documents=True), **chosen)).ok["results"]
    without = (await ask.post(path, request(return_documents=False), **chosen)).ok["results"]

    assert all(("document" in one) == by_default for one in plain)
    assert all(one["document"] == {"text": DOCUMENTS[one["index"]]} for one in with_them)
    assert not any("document" in one for one in without)


async def test_infinitys_documents_are_plain_texts(ask: Asking) -> None:
    answer = (await ask.post("/rerank", request(return_documents=True))).ok

    assert answer["object"] == "rerank"
    assert answer["id"].startswith("infinity-")
    assert [one["document"] for one in answer["results"]] == [DOCUMENTS[one["index"]] for one in answer["results"]]


@pytest.mark.parametrize("path", ["/rerank", "/vllm/rerank", "/v1/rerank", "/v2/rerank", "/jina/v1/rerank"])
async def test_documents_that_were_not_asked_for_have_no_key(ask: Asking, path: str) -> None:
    results = (await ask.post(path, request(return_documents=False))).ok["results"]
    assert all(set(one) == {"index", "relevance_score"} for one in results)


@pytest.mark.parametrize("path", ["/rerank", "/vllm/rerank", "/v1/rerank"])
async def test_values_are_converted_as_pydantic_does(ask: Asking, path: str) -> None:
    exact = (await ask.post(path, request(top_n=2, return_documents=True))).ok["results"]
    for odd in ({"top_n": "2", "return_documents": "true"}, {"top_n": 2.0, "return_documents": 1}):
        assert (await ask.post(path, request(**odd))).ok["results"] == exact
    refused = await ask.post(path, request(top_n=2.5))
    assert (refused.status, refused.json.get("error", refused.json)["message"][:6]) == (400, "top_n:")


async def test_infinitys_raw_scores_are_logits(ask: Asking) -> None:
    assert ranks((await ask.post("/rerank", request(raw_scores=True))).ok) == await expected(ask, raw_scores=True)


@pytest.mark.parametrize(
    ("documents", "more"),
    [
        ([{"text": text, "id": 7} for text in DOCUMENTS], {}),
        ([{"a": text, "b": None} for text in DOCUMENTS], {"rank_fields": ["b", "a"]}),
        ([{"content": [{"type": "text", "text": text}]} for text in DOCUMENTS], {}),
    ],
)
async def test_documents_may_be_objects(ask: Asking, documents: Any, more: dict[str, Any]) -> None:
    answer = (await ask.post("/v1/rerank", request(documents=documents, return_documents=True, **more))).ok

    assert ranks(answer) == await expected(ask)
    assert all(one["document"] == documents[one["index"]] for one in answer["results"])


@pytest.mark.parametrize(
    ("documents", "fields", "refusal"),
    [
        ([{"a": "fog"}], ["a"] * 2, "rank_fields: a field is named twice"),
        ([{"a": "fog"}], [f"a{number}" for number in range(101)], "rank_fields: must have at most 100 items, not 101"),
        ([{"a": "fog"}, {"a": [[0] * 10_000]}], ["a"], "documents.1.a: is not a text and has more than 10000 values"),
    ],
    ids=["twice", "many", "long"],
)
async def test_fields_make_no_texts_longer_than_the_body(
    ask: Asking, documents: Any, fields: list[str], refusal: str
) -> None:
    refused = await ask.post("/v1/rerank", request(documents=documents, rank_fields=fields))
    assert refused.status == 400
    assert refusal in str(refused.json)


async def test_documents_are_cut_to_the_tokens_asked_for(ask: Asking) -> None:
    short = ["the quick fox", "the quick fox"]
    tokens = await ask.tokens("reranker", short[:1]) - 2
    long = ["the quick fox " * 10, "the quick fox and fog by the harbour"]
    answer = (await ask.post("/v2/rerank", request(documents=long, max_tokens_per_doc=tokens))).ok
    cut = (await ask.post("/v2/rerank", request(documents=short))).ok

    assert ranks(answer) == ranks(cut)
    assert answer["usage"] == cut["usage"]


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (request(documents=[]), 400, "`documents` cannot be empty"),
        (request(documents=[{"image": "x"}]), 400, "documents.0: only text is supported by the model reranker"),
        (request(documents=None), 400, "documents"),
        (request(model="dense"), 400, "kind embedding and does not do reranking"),
        (request(model="rerankr"), 404, "did you mean 'reranker'"),
        (request(model="idle"), 503, "is not running"),
        (request(top_n=-1), 400, "top_n"),
        (request(query="", documents=[""]), 400, "cannot be empty"),
    ],
)
@pytest.mark.parametrize(("path", "key"), [("/v2/rerank", "message"), ("/jina/v1/rerank", "detail")])
async def test_errors_are_coheres_and_jinas(
    ask: Asking, path: str, key: str, body: Any, status: int, said: str
) -> None:
    told = await ask.post(path, body)

    assert told.status == status, told
    assert list(told.json) == [key]
    assert said in told.json[key]


async def test_infinity_has_400_for_an_unknown_model(ask: Asking) -> None:
    told = await ask.post("/rerank", request(model="rerankr"))

    assert (told.status, told.json["error"]["code"]) == (400, 400)
    assert "did you mean" in told.json["error"]["message"]


async def test_equal_scores_keep_their_order(ask: Asking) -> None:
    answer = (await ask.post("/v2/rerank", request(documents=["fog"] * 5))).ok

    assert [one["index"] for one in answer["results"]] == [0, 1, 2, 3, 4]
    assert np.ptp([one["relevance_score"] for one in answer["results"]]) < 1e-6
