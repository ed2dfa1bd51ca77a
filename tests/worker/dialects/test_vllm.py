"""vLLM's pooling routes, and what Infinity has under the same paths."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

TEXTS = ["the quick fox", "fog by the harbour", "lamps"]


async def probabilities(ask: Asking, texts: list[str], **options: Any) -> list[dict[str, float]]:
    """Every label's score by the instance's own port."""
    told = await ask.own_port("classifier", "/predict", {"inputs": [[text] for text in texts]} | options)
    return [{one["label"]: one["score"] for one in row} for row in told]


def scores(answer: Any) -> list[float]:
    assert [one["index"] for one in answer["data"]] == list(range(len(answer["data"])))
    return [one["score"] for one in answer["data"]]


@pytest.mark.parametrize(
    "sides",
    [("queries", "documents"), ("queries", "items"), ("text_1", "text_2"), ("data_1", "data_2")],
)
async def test_a_score_is_the_rerankers_for_each_pair(ask: Asking, sides: tuple[str, str]) -> None:
    first, second = sides
    answer = (await ask.post("/score", {"model": "reranker", first: "a fox", second: TEXTS})).ok

    told = await ask.own_port("reranker", "/rerank", {"query": "a fox", "texts": TEXTS})
    expected = [one["score"] for one in sorted(told, key=lambda one: one["index"])]
    assert np.allclose(scores(answer), expected, atol=1e-6)
    assert (answer["object"], answer["model"]) == ("list", "reranker")
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0


async def test_texts_are_paired_one_by_one(ask: Asking) -> None:
    answer = (await ask.post("/v1/score", {"model": "reranker", "text_1": TEXTS, "text_2": TEXTS[::-1]})).ok

    singles = [
        scores((await ask.post("/v1/score", {"model": "reranker", "text_1": one, "text_2": two})).ok)[0]
        for one, two in zip(TEXTS, TEXTS[::-1], strict=True)
    ]
    assert np.allclose(scores(answer), singles, atol=1e-6)


async def test_an_embedding_models_score_is_the_cosine(ask: Asking) -> None:
    answer = (await ask.post("/score", {"model": "dense", "text_1": "a fox", "text_2": TEXTS})).ok

    vectors = await ask.vectors("dense", ["a fox", *TEXTS])
    assert np.allclose(scores(answer), vectors[1:] @ vectors[0], atol=1e-5)
    assert answer["usage"]["total_tokens"] == await ask.tokens("dense", ["a fox", *TEXTS])


async def test_a_late_interaction_models_score_is_the_sum_of_best_matches(ask: Asking) -> None:
    answer = (await ask.post("/score", {"model": "colbert", "text_1": "a fox", "text_2": TEXTS})).ok

    body = {"inputs": ["a fox"], "prompt_name": "query"}
    query = np.array((await ask.own_port("colbert", "/embed_all", body))[0])
    documents = [np.array(one) for one in await ask.own_port("colbert", "/embed_all", {"inputs": TEXTS})]
    assert np.allclose(scores(answer), [(query @ one.T).max(axis=1).sum() for one in documents], atol=1e-4)


async def test_a_splade_models_score_is_the_product(ask: Asking) -> None:
    answer = (await ask.post("/score", {"model": "splade", "text_1": "a fox", "text_2": TEXTS})).ok

    told = await ask.own_port("splade", "/embed_sparse", {"inputs": ["a fox", *TEXTS]})
    query, *documents = [{entry["index"]: entry["value"] for entry in row} for row in told]
    expected = [sum(query[index] * row.get(index, 0) for index in query) for row in documents]
    assert np.allclose(scores(answer), expected, rtol=1e-4)


async def test_classes_have_probabilities(ask: Asking) -> None:
    answer = (await ask.post("/classify", {"model": "classifier", "input": TEXTS})).ok

    expected = await probabilities(ask, TEXTS)
    for row, (one, labels) in enumerate(zip(answer["data"], expected, strict=True)):
        assert (one["index"], one["num_classes"]) == (row, 3)
        assert one["label"] == max(labels, key=lambda label: labels[label])
        assert sorted(one["probs"]) == pytest.approx(sorted(labels.values()), abs=1e-6)
    assert answer["usage"]["prompt_tokens"] == await ask.tokens("classifier", TEXTS)


@pytest.mark.parametrize(
    ("path", "more", "chosen"),
    [
        ("/infinity/classify", {}, {}),
        ("/classify", {"raw_scores": False}, {}),
        ("/classify", {}, {"x_teimgr_dialect": "infinity"}),
    ],
)
async def test_infinitys_classes_are_all_labels_best_first(
    ask: Asking, path: str, more: dict[str, Any], chosen: dict[str, str]
) -> None:
    answer = (await ask.post(path, {"model": "classifier", "input": TEXTS} | more, **chosen)).ok

    assert answer["object"] == "classify"
    for row, expected in zip(answer["data"], await probabilities(ask, TEXTS), strict=True):
        assert {one["label"]: pytest.approx(one["score"], abs=1e-6) for one in row} == expected
        assert [one["score"] for one in row] == sorted((one["score"] for one in row), reverse=True)


async def test_infinitys_raw_scores_are_logits(ask: Asking) -> None:
    answer = (await ask.post("/infinity/classify", {"model": "classifier", "input": TEXTS, "raw_scores": True})).ok

    for row, expected in zip(answer["data"], await probabilities(ask, TEXTS, raw_scores=True), strict=True):
        assert {one["label"]: pytest.approx(one["score"], abs=1e-6) for one in row} == expected


async def test_infinitys_embeddings_are_openais_with_more_fields(ask: Asking) -> None:
    answer = (await ask.post("/embeddings", {"model": "dense", "input": TEXTS, "dimensions": 0})).ok

    assert np.allclose([one["embedding"] for one in answer["data"]], await ask.vectors("dense", TEXTS), atol=1e-6)
    assert answer["id"].startswith("infinity-")
    assert answer["usage"]["prompt_tokens"] == await ask.tokens("dense", TEXTS)
    nested = (await ask.post("/embeddings", {"model": "colbert", "input": TEXTS})).ok
    expected = await ask.own_port("colbert", "/embed_all", {"inputs": TEXTS})
    assert np.allclose(nested["data"][2]["embedding"], expected[2], atol=1e-5)


@pytest.mark.parametrize(
    ("model", "task", "path"),
    [
        ("dense", None, "/embed"),
        ("dense", "token_embed", "/embed_all"),
        ("colbert", None, "/embed_all"),
    ],
)
async def test_what_is_pooled_is_what_tei_gives(ask: Asking, model: str, task: str | None, path: str) -> None:
    body = {"model": model, "input": TEXTS} | ({} if task is None else {"task": task})
    answer = (await ask.post("/pooling", body)).ok

    for one, expected in zip(answer["data"], await ask.own_port(model, path, {"inputs": TEXTS}), strict=True):
        assert one["object"] == "pooling"
        assert np.allclose(one["data"], expected, atol=1e-5)


@pytest.mark.parametrize("path", ["/vllm/v1/embeddings", "/pooling"])
async def test_vectors_have_the_length_and_the_dimensions_asked_for(ask: Asking, path: str) -> None:
    async def found(**more: Any) -> Any:
        data = (await ask.post(path, {"model": "dense", "input": TEXTS} | more)).ok["data"]
        return [one["embedding"] if "embedding" in one else one["data"] for one in data]

    unscaled = await ask.vectors("dense", TEXTS, normalize=False)
    assert not np.allclose(np.linalg.norm(unscaled, axis=1), 1, atol=0.1)
    for name in ("normalize", "use_activation"):
        assert np.allclose(await found(**{name: False}), unscaled, atol=1e-5)
    assert np.allclose(await found(dimensions=8), await ask.vectors("dense", TEXTS, dimensions=8), atol=1e-6)


@pytest.mark.parametrize("older", ["activation", "softmax"])
async def test_older_names_of_use_activation_count(ask: Asking, older: str) -> None:
    body = {"model": "classifier", "input": TEXTS}
    logits = (await ask.post("/classify", body | {"use_activation": False})).ok["data"]
    assert (await ask.post("/classify", body | {older: False})).ok["data"] == logits
    pooled = (await ask.post("/pooling", body | {older: False})).ok["data"]
    assert np.allclose([one["data"] for one in pooled], [one["probs"] for one in logits], atol=1e-6)


async def test_pooling_in_base64(ask: Asking) -> None:
    body = {"model": "dense", "input": TEXTS, "encoding_format": "base64"}
    data = (await ask.post("/pooling", body)).ok["data"]

    decoded = [np.frombuffer(base64.b64decode(one["data"]), "<f4") for one in data]
    assert np.allclose(decoded, await ask.vectors("dense", TEXTS), atol=1e-6)


async def test_a_classifier_pools_to_its_scores(ask: Asking) -> None:
    data = (await ask.post("/pooling", {"model": "classifier", "input": TEXTS})).ok["data"]

    expected = (await ask.post("/classify", {"model": "classifier", "input": TEXTS})).ok["data"]
    assert np.allclose([one["data"] for one in data], [one["probs"] for one in expected], atol=1e-6)


async def test_what_is_too_long_is_refused_unless_it_may_be_cut(ask: Asking) -> None:
    long = "fog and rain " * 100
    refused = await ask.post("/pooling", {"model": "dense", "input": long})
    most = (await ask.post("/pooling", {"model": "dense", "input": long, "truncate_prompt_tokens": -1})).ok
    few = (await ask.post("/pooling", {"model": "dense", "input": [long], "truncate_prompt_tokens": 10})).ok
    ids = (await ask.post("/pooling", {"model": "dense", "input": [5] * 300, "truncate_prompt_tokens": 7})).ok

    assert (refused.status, refused.json["error"]["code"]) == (400, 400)
    assert refused.json["error"]["type"] == "BadRequestError"
    assert most["usage"]["prompt_tokens"] == 96
    assert few["usage"]["prompt_tokens"] == 10
    assert ids["usage"]["prompt_tokens"] == 7


async def test_a_text_that_special_tokens_make_too_long_is_cut(ask: Asking) -> None:
    text = "fog and rain " * 2
    count = await ask.tokens("dense", [text])
    for limit in range(count - 4, count):
        body = {"model": "dense", "input": text, "truncate_prompt_tokens": limit}
        assert (await ask.post("/pooling", body)).ok["usage"]["prompt_tokens"] == limit


LONG = "fog and rain " * 100
ROUTES_OF_TEXTS = {
    "/v1/embeddings": ("dense", "input", {}),
    "/pooling": ("dense", "input", {}),
    "/classify": ("classifier", "input", {}),
    "/score": ("reranker", "text_2", {"text_1": "a fox"}),
    "/v1/score": ("dense", "documents", {"queries": "a fox"}),
    "/rerank": ("reranker", "documents", {"query": "a fox"}),
    "/v1/rerank": ("reranker", "documents", {"query": "a fox"}),
    "/v2/rerank": ("reranker", "documents", {"query": "a fox"}),
}


@pytest.mark.parametrize("path", ROUTES_OF_TEXTS)
async def test_one_rule_for_what_is_too_long_in_vllms_own_words(ask: Asking, path: str) -> None:
    model, field, more = ROUTES_OF_TEXTS[path]
    body = {"model": model, field: ["fog", LONG, "rain"]} | more

    refused = await ask.post(f"/vllm{path}", body)
    cut = await ask.post(f"/vllm{path}", body | {"truncate_prompt_tokens": -1})

    error = refused.json["error"]
    assert (refused.status, error["code"], error["type"]) == (400, 400, "BadRequestError")
    assert error["message"].startswith("This model's maximum context length is 96 tokens. However, you requested ")
    assert error["message"].endswith(" tokens in the input. Please reduce the length of the input. (input 1)")
    assert cut.status == 200


async def test_a_rerank_with_vllms_fields_has_its_rule_and_words_at_the_root_too(ask: Asking) -> None:
    body = {"model": "reranker", "query": "a fox", "documents": ["fog", LONG]}

    refused = await ask.post("/rerank", body | {"truncation_side": "left"})
    assert (refused.status, refused.json["error"]["type"]) == (400, "BadRequestError")
    assert "maximum context length" in refused.json["error"]["message"]
    assert (await ask.post("/rerank", body)).status == 200  # Infinity cuts
    logits = (await ask.post("/rerank", body | {"use_activation": False, "truncate_prompt_tokens": -1})).ok
    raw = (await ask.post("/rerank", body | {"raw_scores": True})).ok
    assert [one["relevance_score"] for one in logits["results"]] == pytest.approx(
        [one["relevance_score"] for one in raw["results"]]
    )
    assert logits["results"][0]["document"].keys() == {"text"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "dense", "input": ["fog", "a", ""]}),
        ("/v1/embeddings", {"model": "dense", "input": [[5], [6], [10**9]]}),
        ("/v1/embeddings", {"model": "dense", "input": [[5], [6], []]}),
        ("/v1/embeddings", {"model": "dense", "input": ["a", LONG[:20], LONG], "truncation": False}),
        ("/embeddings", {"model": "dense", "input": ["fog", "a", ""]}),
        ("/v2/embed", {"model": "dense", "texts": ["a", "b", LONG], "truncate": "NONE", "input_type": "search_query"}),
        ("/v2/embed", {"model": "dense", "texts": ["a", "b", ""], "input_type": "search_query"}),
        ("/voyage/v1/embeddings", {"model": "dense", "input": ["a", "b", LONG], "truncation": False}),
        ("/jina/v1/embeddings", {"model": "dense", "input": ["a", "b", ""]}),
        ("/pooling", {"model": "dense", "input": [[5], [6], []]}),
        ("/classify", {"model": "classifier", "input": ["a", "b", ""]}),
        ("/v1/classify", {"model": "classifier", "inputs": ["a", "b", ""]}),
        ("/score", {"model": "reranker", "text_1": "a", "text_2": ["a", "b", ""]}),
        ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["a", "b", LONG], "truncation": False}),
        ("/v1/embeddings", {"model": "dense", "input": ["a", "b", None]}),
        ("/v1/embeddings", {"model": "dense", "input": [[1], [2], [-3]]}),
        ("/v1/embeddings", {"model": "dense", "input": ["a", "b", 7]}),
        ("/v1/embeddings", {"model": "dense", "input": ["a", "b", {"text": 7}]}),
        ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["a", "b", 7]}),
        ("/embeddings", {"model": "dense", "input": ["a", "b", 7]}),
        ("/v1/embed", {"model": "dense", "texts": ["a", "b", 7], "input_type": "search_query"}),
        ("/v1/encode/dense", {"items": [{"text": "a"}, {"text": "b"}, {"text": 7}]}),
        ("/v1/encode/dense", {"items": [{"text": "a"}, {"text": "b"}, {"text": ""}]}),
    ],
)
async def test_a_refused_text_is_named_by_its_index(ask: Asking, path: str, body: Any) -> None:
    told = await ask.post(path, body)

    assert told.status in (400, 422)
    assert b"(input 2)" in told.body or b".2" in told.body, told.body


@pytest.mark.parametrize(
    ("path", "head", "place"),
    [
        ("/v1/embeddings", '{"model": "dense", "input": ', "input.1: "),
        ("/embeddings", '{"model": "dense", "input": ', "input.1: "),
        ("/pooling", '{"model": "dense", "input": ', "input.1: "),
        ("/v2/embed", '{"model": "dense", "input_type": "search_query", "texts": ', "texts.1: "),
        ("/v1/rerank", '{"model": "reranker", "query": "a", "documents": ', "documents.1: "),
        ("/voyage/v1/embeddings", '{"model": "dense", "input": ', "input.1: "),
    ],
)
async def test_half_an_emoji_is_named_by_its_index(ask: Asking, path: str, head: str, place: str) -> None:
    for many in (1, 20_000):  # parsed whole, and in pieces
        rest = ', "fog"' * many
        told = await ask.post(path, f'{head}["fog", "cut \\ud83d"{rest}]}}'.encode())
        assert told.status == 400
        assert f"{place}the text is half of a surrogate pair, \\\\ud83d" in told.body.decode()
    tei = await ask.post("/instances/dense/embed", b'{"inputs": ["fog", "cut \\ud83d"]}')
    assert (tei.status, tei.headers["x-teimgr-input"]) == (400, "1")
    assert tei.body.startswith(b"Failed to parse the request body as JSON: ")
    assert b"hex escape at line 1 column" in tei.body


async def test_tei_says_the_index_in_a_header(ask: Asking) -> None:
    for path, inputs in (
        ("/instances/dense/embed", {"inputs": ["fog", "a", ""]}),
        ("/instances/dense/embed", {"inputs": ["fog", "a", LONG], "truncate": False}),
        ("/instances/dense/v1/embeddings", {"input": ["fog", "a", ""]}),
        ("/instances/reranker/rerank", {"query": "a", "texts": ["fog", "a", LONG], "truncate": False}),
        ("/instances/classifier/predict", {"inputs": [["fog"], ["a"], [""]]}),
    ):
        told = await ask.post(path, inputs)
        assert (told.status, told.headers.get("x-teimgr-input")) in ((422, "2"), (400, "2")), (path, told)
        assert b"(input" not in told.body
    alone = await ask.post("/instances/dense/embed", {"inputs": ""})
    assert "x-teimgr-input" not in alone.headers


async def test_pairs_are_cut_in_the_document(ask: Asking) -> None:
    body = {"model": "reranker", "text_1": "a fox", "text_2": ["fog " * 60, "fog " * 50], "truncate_prompt_tokens": 20}
    answer = (await ask.post("/score", body)).ok

    assert 30 <= answer["usage"]["prompt_tokens"] <= 40
    assert scores(answer)[0] == pytest.approx(scores(answer)[1], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("/score", {"model": "reranker", "text_1": "a"}, 400, "documents: is missing"),
        ("/score", {"model": "reranker", "text_1": ["a", "b"], "text_2": ["c"]}, 400, "1:1, 1:N or N:N"),
        ("/score", {"model": "reranker", "text_1": "a", "text_2": []}, 400, "`text_2` cannot be empty"),
        ("/score", {"model": "classifier", "text_1": "a", "text_2": "b"}, 400, "does not do scoring"),
        ("/score", {"model": "reranke", "text_1": "a", "text_2": "b"}, 404, "did you mean"),
        ("/classify", {"model": "dense", "input": "a"}, 400, "does not do classification"),
        ("/classify", {"model": "classifier", "input": [""]}, 400, "cannot have an empty text"),
        ("/pooling", {"model": "dense", "input": "a", "task": "token_classify"}, 400, "not supported"),
        ("/pooling", {"model": "dense", "input": "a", "task": "x"}, 400, "task"),
        ("/pooling", {"model": "colbert", "input": "a", "dimensions": 8}, 400, "dimensions: is only for task embed"),
        ("/pooling", {"model": "dense", "input": "a", "add_special_tokens": False}, 400, "add_special_tokens: false"),
        ("/classify", {"model": "classifier", "input": "a", "add_special_tokens": False}, 400, "add_special_tokens"),
        (
            "/vllm/v1/embeddings",
            {"model": "dense", "input": "a", "add_special_tokens": False},
            400,
            "add_special_tokens",
        ),
        ("/pooling", {"model": "dense", "input": "a fox", "truncate_prompt_tokens": 0}, 400, "at least 1"),
        ("/pooling", {"model": "dense", "input": "a fox", "truncate_prompt_tokens": 2}, 400, "no token"),
        ("/pooling", {"model": "dense"}, 400, "input: is missing"),
        ("/embeddings", {"model": "dense", "input": "a", "modality": "image"}, 400, "input.0: only text is supported"),
    ],
)
async def test_errors_have_the_field_of_openais(ask: Asking, path: str, body: Any, status: int, said: str) -> None:
    told = await ask.post(path, body)

    error = told.json["error"]
    assert (told.status, error["code"]) == (status, status), error
    assert said in error["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
async def test_vectors_in_bytes(ask: Asking, path: str) -> None:
    unit = await ask.vectors("dense", TEXTS)
    body = {"model": "dense", "input": TEXTS}
    told = await ask.post(path, body | {"encoding_format": "bytes", "embed_dtype": "float16", "endianness": "big"})
    metadata = json.loads(told.headers["metadata"])
    assert (told.status, told.headers["content-type"]) == (200, "application/octet-stream")
    assert metadata["usage"]["prompt_tokens"] == await ask.tokens("dense", TEXTS)
    for one, row in zip(metadata["data"], unit, strict=True):
        found = np.frombuffer(told.body[one["start"] : one["end"]], ">f2")
        assert (one["embed_dtype"], one["endianness"], one["shape"]) == ("float16", "big", list(found.shape))
        assert np.allclose(found.astype(np.float32), row, atol=1e-3)

    only = await ask.post(path, body | {"encoding_format": "bytes_only"})
    assert "metadata" not in only.headers
    assert np.allclose(np.frombuffer(only.body, np.float32).reshape(unit.shape), unit, atol=1e-6)


@pytest.mark.parametrize(("path", "key"), [("/v1/embeddings", "embedding"), ("/vllm/pooling", "data")])
@pytest.mark.parametrize(("endianness", "order"), [("big", ">"), ("little", "<")])
@pytest.mark.parametrize(("embed_dtype", "code"), [("float16", "f2"), ("float32", "f4")])
async def test_base64_has_the_element_type_and_the_byte_order_asked_for(
    ask: Asking, path: str, key: str, endianness: str, order: str, embed_dtype: str, code: str
) -> None:
    how = {"encoding_format": "base64", "embed_dtype": embed_dtype, "endianness": endianness}
    data = (await ask.post(path, {"model": "dense", "input": TEXTS} | how)).ok["data"]
    found = [np.frombuffer(base64.b64decode(one[key]), order + code) for one in data]
    assert np.allclose(np.array(found, np.float32), await ask.vectors("dense", TEXTS), atol=1e-3)
    assert np.shape(found) == (3, 32)


async def test_vectors_per_token_in_base64_have_the_type_asked_for(ask: Asking) -> None:
    body = {"model": "colbert", "input": TEXTS}
    plain = (await ask.post("/pooling", body)).ok["data"]
    how = {"encoding_format": "base64", "embed_dtype": "float16", "endianness": "big"}
    for one, other in zip(plain, (await ask.post("/pooling", body | how)).ok["data"], strict=True):
        found = np.frombuffer(base64.b64decode(other["data"]), ">f2").astype(np.float32)
        assert np.allclose(found, np.ravel(one["data"]), atol=1e-3)


async def test_bytes_describe_a_bounded_number_of_inputs(ask: Asking) -> None:
    body = {"model": "dense", "input": ["fog"] * 65, "encoding_format": "bytes"}
    refused = await ask.post("/v1/embeddings", body)
    assert (refused.status, "use bytes_only" in refused.json["error"]["message"]) == (400, True)
    assert len((await ask.post("/v1/embeddings", body | {"encoding_format": "bytes_only"})).body) == 65 * 32 * 4


async def test_tokens_and_back(ask: Asking) -> None:
    [spans] = await ask.own_port("dense", "/tokenize", {"inputs": "the quick fox"})
    told = (await ask.post("/tokenize", {"model": "dense", "prompt": "the quick fox", "return_token_strs": True})).ok
    ids = [span["id"] for span in spans]
    assert (told["tokens"], told["count"], told["max_model_len"]) == (ids, len(ids), 96)
    [begin, *parts, end] = told["token_strs"]
    assert (begin, end) == (spans[0]["text"], spans[-1]["text"])
    assert "".join(parts) == "the quick fox"
    [whole] = await ask.own_port("dense", "/decode", {"ids": ids, "skip_special_tokens": False})
    assert (await ask.post("/detokenize", {"model": "dense", "tokens": ids})).ok == {"prompt": whole}
    refused = await ask.post("/detokenize", {"model": "dense", "tokens": [1] * 9601})
    assert (refused.status, "at most 9600" in refused.json["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("more", "document"),
    [
        ({}, "fog"),
        ({"truncate_prompt_tokens": -1}, {"text": "fog"}),
        ({"truncate_prompt_tokens": 12, "truncation_side": "left"}, {"text": "fog"}),
        ({"max_tokens_per_doc": 5}, {"text": "fog"}),
    ],
)
async def test_rerank_tells_infinity_and_vllm_apart(ask: Asking, more: dict[str, Any], document: Any) -> None:
    body = {"model": "reranker", "query": "rain", "documents": ["fog"], "return_documents": True}
    [result] = (await ask.post("/rerank", body | more)).ok["results"]
    assert result["document"] == document
    [of_vllm] = (await ask.post("/vllm/rerank", body | more)).ok["results"]
    assert of_vllm["document"] == {"text": "fog"}


async def test_an_instruction_for_a_reranker_is_refused_by_name(ask: Asking) -> None:
    body = {"model": "reranker", "query": "rain", "documents": ["fog"], "instruction": "find"}
    refused = await ask.post("/vllm/rerank", body)
    assert (refused.status, refused.json["error"]["message"]) == (400, "instruction: is not supported")


async def test_a_token_classifier_pools_a_probability_per_label_and_token(ask: Asking) -> None:
    text = "The quick brown fox"
    tokens = (await ask.post("/tokenize", {"model": "entities", "prompt": text})).json["count"]
    for body in ({}, {"task": "token_classify"}):
        rows = (await ask.post("/pooling", {"model": "entities", "input": text, **body})).json["data"][0]["data"]
        assert np.shape(rows) == (tokens, 5)
        np.testing.assert_allclose(np.sum(rows, axis=1), 1.0, atol=1e-5)
    logits = await ask.post("/pooling", {"model": "entities", "input": text, "use_activation": False})
    assert np.min(logits.json["data"][0]["data"]) < 0
    refused = await ask.post("/pooling", {"model": "entities", "input": text, "task": "embed"})
    assert (refused.status, b"token classifier" in refused.body) == (400, True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": TEXTS}),
        ("/v1/embeddings", {"input": [{"text": "a"}]}),
        ("/v1/embeddings", {"messages": [{"role": "user", "content": "a"}]}),
        ("/pooling", {"input": TEXTS}),
        ("/pooling", {"messages": [{"role": "user", "content": "a"}]}),
    ],
)
async def test_texts_without_the_padding_that_a_model_was_trained_with_are_refused(
    ask: Asking, path: str, body: dict[str, Any]
) -> None:
    """Of a SigLIP, whose vector would be another; elsewhere padding changes nothing."""
    for padding, status in (("do_not_pad", 400), ("max_length", 200), (None, 200)):
        told = await ask.post(path, {"model": "naflex", **body, "padding": padding})
        assert told.status == status, told
    assert (
        "padding: do_not_pad is not supported"
        in (await ask.post(path, {"model": "naflex", **body, "padding": "do_not_pad"})).body.decode()
    )
    assert (await ask.post(path, {"model": "clip", **body, "padding": "do_not_pad"})).status == 200
