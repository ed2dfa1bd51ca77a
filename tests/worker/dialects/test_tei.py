"""TEI's routes: on the daemon's port as on the instance's own; bodies (tei.md §1.2, §1.5), what is read, how the rest
is refused, what the engine gets; answers from finished jobs, in cases that no small model produces.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import orjson
import pytest
from tests.worker.dialects.dialect_client import Asking

from teimgr.engine.job import InferOptions, Job, Lane, Output, Pair, SparseRow
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError, WrongModelKind
from teimgr.spec import LoadedModel, WorkerSpec
from teimgr.worker.calls import number_count, over_limit
from teimgr.worker.dialects.tei import (
    TEI_BODY,
    DecodeRequest,
    OpenAICompatRequest,
    TeiEmbedAllRequest,
    TeiEmbedRequest,
    TeiEmbedSparseRequest,
    TeiPredictRequest,
    TeiRerankRequest,
    TeiSimilarityRequest,
    TeiVertexRequest,
    TokenizeRequest,
    per_token,
    ranks,
    similarities,
    sparse,
)
from teimgr.worker.http_inference import (
    BadRequest,
    Body,
    InferenceRequest,
    JobSpec,
    ServedModel,
    TooManyInputs,
    check_content_type,
    parse,
)

COST_HEADERS = (
    *("x-compute-type", "x-compute-time", "x-compute-characters", "x-compute-tokens"),
    *("x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time"),
)
TEXTS = ["the quick fox", "fog by the harbour"]
ASKED: list[tuple[str, str, Any]] = [
    ("dense", "/embed", {"inputs": TEXTS, "prompt_name": "query"}),
    ("dense", "", {"inputs": TEXTS}),
    ("dense", "/", {"inputs": "fog", "parameters": {}}),
    ("dense", "/invocations", {"inputs": "fog"}),
    ("dense", "/embed_all", {"inputs": TEXTS}),
    ("dense", "/similarity", {"inputs": {"source_sentence": "fog", "sentences": TEXTS}}),
    ("dense", "/v1/embeddings", {"input": TEXTS, "model": "anything"}),
    ("dense", "/embeddings", {"input": "fog"}),
    ("splade", "/embed_sparse", {"inputs": TEXTS}),
    ("colbert", "/embed_all", {"inputs": TEXTS}),
    ("reranker", "/rerank", {"query": "a fox", "texts": TEXTS, "return_text": True}),
    ("classifier", "/predict", {"inputs": [["fog"], ["rain", "snow"]]}),
]
WITHOUT_COST: list[tuple[str, str, Any]] = [
    ("dense", "/tokenize", {"inputs": TEXTS}),
    ("dense", "/decode", {"ids": [[5, 6, 7], [8]]}),
    ("dense", "/vertex", {"instances": [{"inputs": "fog"}, {"inputs": TEXTS}]}),
]


@pytest.mark.parametrize(("instance", "path", "body"), [*ASKED, *WITHOUT_COST])
async def test_answers_are_those_of_the_own_port(ask: Asking, instance: str, path: str, body: Any) -> None:
    told = await ask.post(f"/instances/{instance}{path}", body)

    expected = await ask.own_port(instance, path or "/", body)
    assert flat(told.ok) == pytest.approx(flat(expected), abs=1e-5)
    costs = [name for name in COST_HEADERS if name in told.headers]
    assert costs == ([] if (instance, path, body) in WITHOUT_COST else list(COST_HEADERS))


def flat(value: Any) -> list[Any]:
    """Every leaf of a JSON value, in order."""
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in (key, *flat(inner))]
    if isinstance(value, list):
        return [leaf for inner in value for leaf in flat(inner)]
    return [value]


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        (
            "/instances/classifie/embed",
            {"inputs": "fog"},
            404,
            {"error": "Instance 'classifie' not found; did you mean 'classifier'?", "error_type": "Validation"},
        ),
        (
            "/instances/idle/embed",
            {"inputs": "fog"},
            503,
            {"error": "Instance 'idle' is not running (status: stopped)", "error_type": "Unhealthy"},
        ),
    ],
)
async def test_errors_are_teis(ask: Asking, path: str, body: Any, status: int, expected: dict[str, Any]) -> None:
    told = await ask.post(path, body)

    assert (told.status, told.json) == (status, expected)


async def test_the_manager_keeps_its_own_routes(ask: Asking) -> None:
    assert (await ask.get("/instances/dense")).ok["name"] == "dense"
    assert "lines" in (await ask.get("/instances/dense/logs")).ok
    refused = await ask.get("/instances/dense/embed")
    assert (refused.status, refused.json["code"]) == (405, "METHOD_NOT_ALLOWED")
    assert (await ask.post("/instances/nobody/start", {})).json["code"] == "INSTANCE_NOT_FOUND"


async def test_a_large_answer_is_whole(ask: Asking) -> None:
    rows = (await ask.post("/instances/dense/embed_all", {"inputs": ["rain " * 96] * 31 + ["fog rain " * 48]})).ok

    assert np.shape(rows) == (32, 96, 32)
    assert rows[0] != rows[31]


NO_SHAPE = "Failed to deserialize the JSON body into the target type: "


def served(kind: str = "embedding", **terms: Any) -> ServedModel:
    model = LoadedModel(
        model_id="m",
        model_sha=None,
        dtype="float32",
        device="cpu",
        kind=kind,
        pooling="mean",
        dimension=4,
        max_input_length=64,
        max_batch_tokens=1024,
        batching="packed",
        labels=("a", "b"),
    )
    return ServedModel(model, WorkerSpec(name="i", model_id="m", **terms))


def read(kind: type[Body], body: Any) -> Any:
    return parse(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), TEI_BODY)


def asked(kind: type[InferenceRequest], body: Any, model: str = "embedding", **terms: Any) -> JobSpec:
    spec = read(kind, body).job(served(model, **terms))
    assert isinstance(spec, JobSpec)
    return spec


def over(kind: type[InferenceRequest], body: Any, **terms: Any) -> str | None:
    try:
        spec = asked(kind, body, **terms)
    except TooManyInputs as error:
        return error.message
    return over_limit(len(spec.inputs), spec.limit)


def plain(inputs: Any) -> list[Any]:
    """Inputs with their ids as lists."""
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in inputs]


def refusal(kind: type[Body], body: Any) -> tuple[int, str]:
    with pytest.raises(BadRequest) as caught:
        read(kind, body)
    return caught.value.status, caught.value.message


@pytest.mark.parametrize("content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_another_content_type_is_415(content_type: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_content_type(content_type)

    assert (caught.value.status, caught.value.message) == (
        415,
        "Expected request with `Content-Type: application/json`",
    )


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"]
)
def test_every_json_content_type_is_read(content_type: str) -> None:
    check_content_type(content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b'{"inputs": "a", "truncation_direction": null}',
        b'{"inputs": "\\ud800"}',
        b'{"inputs": NaN}',
        b"[" * 900,
    ],
)
def test_what_is_no_json_is_400(body: bytes) -> None:
    status, text = refusal(TeiEmbedRequest, body)

    assert status == 400
    assert text.startswith("Failed to parse the request body as JSON: ")


WRONG: list[tuple[type[Body], Any]] = [
    *(
        (TeiEmbedRequest, body)
        for body in (
            {},
            [],
            {"inputs": None},
            {"inputs": 5},
            {"inputs": {"a": "b"}},
            {"inputs": [1, "a"]},
            {"inputs": ["a", 1]},
            {"inputs": ["a", None]},
            {"inputs": [["a", "b"]]},
            {"inputs": [[1], [2.5]]},
            {"inputs": [-1]},
            {"inputs": [1.0]},
            {"inputs": [True]},
            {"inputs": [2**32]},
            {"inputs": [10**30]},
            {"inputs": "a", "normalize": None},
            {"inputs": "a", "normalize": "true"},
            {"inputs": "a", "normalize": 1},
            {"inputs": "a", "truncation_direction": "LEFT"},
            {"inputs": "a", "truncate": 1},
            {"inputs": "a", "prompt_name": 1},
            {"inputs": "a", "dimensions": -1},
            {"inputs": "a", "dimensions": 1.5},
            {"inputs": "a", "dimensions": 2**64},
            {"inputs": "a", "dimensions": True},
        )
    ),
    *(
        (TeiPredictRequest, {"inputs": inputs})
        for inputs in ([], ["a", "b", "c"], [[]], [["a"], []], [["a", "b", "c"]], ["a", ["b"]], [["a"], "b"], [1], 1)
    ),
    (TeiPredictRequest, {"inputs": "a", "raw_scores": None}),
    (TeiRerankRequest, {"query": "a"}),
    (TeiRerankRequest, {"texts": ["a"]}),
    (TeiRerankRequest, {"query": None, "texts": ["a"]}),
    (TeiRerankRequest, {"query": "a", "texts": "b"}),
    (TeiRerankRequest, {"query": "a", "texts": [["b"]]}),
    (TeiRerankRequest, {"query": "a", "texts": ["b"], "return_text": None}),
    (TeiSimilarityRequest, {"inputs": "a"}),
    (TeiSimilarityRequest, {"inputs": {"source_sentence": "a", "sentences": "b"}}),
    (TeiSimilarityRequest, {"inputs": {"sentences": ["b"]}}),
    (TeiSimilarityRequest, {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "parameters": []}),
    (TokenizeRequest, {"inputs": [1]}),
    (TokenizeRequest, {"inputs": [["a"]]}),
    (TokenizeRequest, {"inputs": "a", "add_special_tokens": None}),
    (DecodeRequest, {"ids": "a"}),
    (DecodeRequest, {"ids": 5}),
    (DecodeRequest, {"ids": [[1], 2]}),
    (DecodeRequest, {"ids": [1], "skip_special_tokens": None}),
    (OpenAICompatRequest, {"inputs": "a"}),
    (OpenAICompatRequest, {"input": "a", "encoding_format": "Base64"}),
    (OpenAICompatRequest, {"input": "a", "model": 1}),
    (TeiVertexRequest, {}),
    (TeiVertexRequest, {"instances": {}}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=[f"{kind.__name__}-{body}" for kind, body in WRONG])
def test_json_of_another_shape_is_422(kind: type[Body], body: Any) -> None:
    assert refusal(kind, body)[0] == 422


def test_the_text_says_where_the_fault_is() -> None:
    found = "inputs: data did not match any variant of untagged enum Input at line 1 column 19"
    assert refusal(TeiEmbedRequest, {"inputs": [["a"]]})[1] == NO_SHAPE + found


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("text", ["text"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([], [[]]),
        (["a", "b"], ["a", "b"]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        ([[]], [[]]),
        (["a", [1, 2]], ["a", [1, 2]]),
        ([[1, 2], "a"], [[1, 2], "a"]),
        ([2**32 - 1], [[-1]]),
    ],
)
def test_the_first_form_that_matches_an_input_wins(inputs: Any, expected: list[Any]) -> None:
    for kind in (TeiEmbedRequest, TeiEmbedAllRequest, TeiEmbedSparseRequest):
        assert plain(asked(kind, {"inputs": inputs}).inputs) == expected
    assert plain(asked(OpenAICompatRequest, {"input": inputs}).inputs) == expected


def test_ids_are_int32() -> None:
    [ids] = asked(TeiEmbedRequest, {"inputs": [1, 2]}).inputs

    assert isinstance(ids, np.ndarray)
    assert ids.dtype == np.int32


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ("a", ["a"]),
        (["a"], ["a"]),
        (["a", "b"], [Pair("a", "b")]),
        ([["a"]], ["a"]),
        ([["a"], ["b", "c"]], ["a", Pair("b", "c")]),
    ],
)
def test_lists_of_strings_are_pairs_to_predict(inputs: Any, expected: list[Any]) -> None:
    assert asked(TeiPredictRequest, {"inputs": inputs}, "classifier").inputs == expected


def test_a_rerank_is_a_pair_per_text() -> None:
    spec = asked(TeiRerankRequest, {"query": "q", "texts": ["a", "", "a"]}, "reranker")

    assert spec.inputs == [Pair("q", "a"), Pair("q", ""), Pair("q", "a")]
    assert spec.options.outputs == {Output.SCORES}


def test_similarity_asks_for_vectors_as_they_are() -> None:
    body = {"inputs": {"source_sentence": "s", "sentences": ["a", "b"]}}
    spec = asked(TeiSimilarityRequest, body | {"parameters": {"prompt_name": "query", "unknown": 1}})

    assert spec.inputs == ["s", "a", "b"]
    assert spec.options.normalize is False
    assert spec.options.prompt_name == "query"
    assert asked(TeiSimilarityRequest, body | {"parameters": None}).options.truncate is True


@pytest.mark.parametrize("auto_truncate", [True, False])
def test_null_leaves_truncation_to_the_instance(auto_truncate: bool) -> None:
    for body in ({"inputs": "a"}, {"inputs": "a", "truncate": None}):
        assert asked(TeiEmbedRequest, body, auto_truncate=auto_truncate).options.truncate is auto_truncate
    assert asked(OpenAICompatRequest, {"input": "a"}, auto_truncate=auto_truncate).options.truncate is auto_truncate
    assert asked(TeiEmbedRequest, {"inputs": "a", "truncate": not auto_truncate}).options.truncate is not auto_truncate


def test_the_defaults_are_teis() -> None:
    options = asked(TeiEmbedRequest, {"inputs": "a", "prompt_name": None, "dimensions": None}).options

    assert (options.normalize, options.dimensions, options.prompt_name, options.truncation_left) == (
        True,
        None,
        None,
        False,
    )


@pytest.mark.parametrize(("name", "left"), [("left", True), ("Left", True), ("right", False), ("Right", False)])
def test_the_four_names_of_a_direction(name: str, left: bool) -> None:
    assert asked(TeiEmbedRequest, {"inputs": "a", "truncation_direction": name}).options.truncation_left is left


def test_unknown_fields_are_passed_over() -> None:
    for kind in (TeiEmbedRequest, TeiPredictRequest):
        assert asked(kind, {"inputs": "a", "parameters": {}, "nested": {"a": [None]}}).inputs == ["a"]


def test_all_embeddings_of_a_late_interaction_model_are_its_token_vectors() -> None:
    assert asked(TeiEmbedAllRequest, {"inputs": "a"}, "multi-vector").options.outputs == {Output.MULTI_VECTOR}
    assert asked(TeiEmbedAllRequest, {"inputs": "a"}).options.outputs == {Output.TOKENS}


@pytest.mark.parametrize(
    ("kind", "body", "model", "error"),
    [
        (TeiRerankRequest, {"query": "q", "texts": []}, "embedding", EmptyInput("`texts` cannot be empty")),
        (
            TeiRerankRequest,
            {"query": "q", "texts": ["a"] * 40},
            "classifier",
            WrongModelKind("Backend error: model is not a re-ranker model"),
        ),
        (
            TeiSimilarityRequest,
            {"inputs": {"source_sentence": "s", "sentences": []}},
            "classifier",
            EmptyInput("`inputs.sentences` cannot be empty"),
        ),
    ],
)
def test_what_is_refused_before_the_inputs_are_counted(
    kind: type[InferenceRequest], body: Any, model: str, error: TeimgrError
) -> None:
    with pytest.raises(type(error)) as caught:
        asked(kind, body, model)
    assert caught.value.message == error.message


@pytest.mark.parametrize(
    ("kind", "body", "limit", "inputs"),
    [
        (TeiEmbedRequest, {"inputs": ["a"] * 33}, 32, 33),
        (TeiPredictRequest, {"inputs": [["a"]] * 33}, 32, 33),
        (TeiSimilarityRequest, {"inputs": {"source_sentence": "s", "sentences": ["a"] * 32}}, 32, 33),
        (OpenAICompatRequest, {"input": ["a"] * 2049}, 2048, 2049),
    ],
)
def test_one_input_too_many(kind: type[InferenceRequest], body: Any, limit: int, inputs: int) -> None:
    assert over(kind, body) == f"batch size {inputs} > maximum allowed batch size {limit}"


def test_as_many_inputs_as_allowed() -> None:
    assert over(TeiEmbedRequest, {"inputs": ["a"] * 32}) is None
    assert over(OpenAICompatRequest, {"input": ["a"] * 2048}) is None
    assert over(OpenAICompatRequest, {"input": ["a"] * 4096}, max_client_batch_size=4096) is None


@pytest.mark.parametrize(
    ("model", "instance", "kind"),
    [
        ("embedding", {"inputs": "a"}, TeiEmbedRequest),
        ("sparse", {"inputs": "a"}, TeiEmbedSparseRequest),
        ("multi-vector", {"inputs": "a"}, TeiEmbedAllRequest),
        ("classifier", {"inputs": ["a", "b"]}, TeiPredictRequest),
        ("reranker", {"inputs": "a"}, TeiPredictRequest),
        ("reranker", {"query": "q", "texts": ["a"]}, TeiRerankRequest),
        ("embedding", {"query": "q", "texts": ["a"]}, TeiRerankRequest),
    ],
)
def test_an_instance_of_vertex_is_read_by_the_models_kind(
    model: str, instance: Any, kind: type[InferenceRequest]
) -> None:
    body = read(TeiVertexRequest, {"instances": [instance], "parameters": {}})

    assert [type(one) for one in body.requests(served(model).model)] == [kind]


@pytest.mark.parametrize("instance", [5, None, "a", {}, {"inputs": 5}, {"query": "q", "texts": 5}])
def test_a_bad_instance_of_vertex_is_an_input_that_breaks_a_rule(instance: Any) -> None:
    body = read(TeiVertexRequest, {"instances": [{"inputs": "a"}, instance]})

    with pytest.raises(InvalidInput):
        body.requests(served().model)


def finished(inputs: int) -> Job:
    return Job(["a"] * inputs, InferOptions(), Lane.INTERACTIVE)


def test_a_zero_vector_is_like_nothing() -> None:
    """TEI divides by its length and answers NaN."""
    job = finished(4)
    job.vectors = np.array([[3, 4], [0, 0], [6, 8], [-3, -4]], np.float32)

    assert orjson.loads(similarities(job)) == [0.0, 1.0, -1.0]

    job.vectors = np.array([[0, 0], [1, 0]], np.float32)
    assert orjson.loads(similarities(job)) == [0.0]


def test_vectors_whose_squares_are_beyond_32_bits_have_a_cosine() -> None:
    job = finished(2)
    job.vectors = np.array([[1e30, 1e30], [1e30, 0]], np.float32)

    assert np.isclose(orjson.loads(similarities(job))[0], 0.5**0.5)


def test_of_equal_scores_the_higher_index_comes_first() -> None:
    job = finished(4)
    job.scores = np.array([[0.5], [0.9], [0.5], [0.1]], np.float32)

    ranked = orjson.loads(ranks(["a", "b", "c", "d"], job))

    assert [(rank["index"], rank["text"]) for rank in ranked] == [(1, "b"), (2, "c"), (0, "a"), (3, "d")]


def test_numbers_are_written_as_32_bits() -> None:
    job = finished(1)
    job.sparse = [SparseRow(np.array([3, 70_000], np.uint32), np.array([0.020964134, 1 / 3], np.float32))]
    job.tokens_of = [np.arange(6, dtype=np.float32).reshape(3, 2)[:, :1] / 10]  # not contiguous

    assert sparse(job) == b'[[{"index":3,"value":0.020964134},{"index":70000,"value":0.33333334}]]'
    assert per_token(job) == b"[[[0.0],[0.2],[0.4]]]"
    assert number_count(job) == 5


async def test_a_token_classifier_predicts_entities(ask: Asking) -> None:
    texts = ["The quick brown fox in Zürich", "fog"]
    each = [(await ask.post("/instances/entities/predict", {"inputs": text})).json for text in texts]
    batch = await ask.post("/instances/entities/predict", {"inputs": [[text] for text in texts]})
    tokens = await ask.post("/instances/entities/predict", {"inputs": texts[0], "aggregation_strategy": "none"})
    root = await ask.post("/instances/entities/", {"inputs": texts[0]})

    assert batch.json == each
    assert root.json == each[0]
    assert tokens.json
    assert set(tokens.json[0]) == {"entity", "score", "index", "word", "start", "end"}
    for one in each[0]:
        assert set(one) == {"entity_group", "score", "word", "start", "end"}
        assert texts[0][one["start"] : one["end"]] == one["word"]


@pytest.mark.parametrize(
    ("name", "path", "body", "why"),
    [
        ("entities", "/predict", {"inputs": [["a", "b"]]}, "cannot be pairs"),
        ("entities", "/predict", {"inputs": "a", "raw_scores": True}, "raw_scores"),
        ("entities", "/embed", {"inputs": "a"}, "not an embedding model"),
        ("entities", "/embed_all", {"inputs": "a"}, "not an embedding model"),
        ("classifier", "/predict", {"inputs": "a", "aggregation_strategy": "simple"}, "is for token classifiers"),
    ],
)
async def test_what_a_token_classifier_is_not_asked(ask: Asking, name: str, path: str, body: Any, why: str) -> None:
    told = await ask.post(f"/instances/{name}{path}", body)

    assert told.status in (413, 422, 424)
    assert why in told.json["error"]
