"""Bodies of the TEI routes (tei.md §1.2, §1.5): what is read, how the rest is refused, what is asked of the engine."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from teimgr.engine.job import Output, Pair
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError, WrongModelKind
from teimgr.spec import LoadedModel, WorkerSpec
from teimgr.worker.calls import over_limit
from teimgr.worker.dialects.tei import (
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
)
from teimgr.worker.http_inference import (
    TEI_BODY,
    BadRequest,
    Body,
    InferenceRequest,
    JobSpec,
    ServedModel,
    check_content_type,
    parse,
)

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
    spec = asked(kind, body, **terms)
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


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b'{"inputs": "\\ud800"}', b'{"inputs": NaN}', b"[" * 900])
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
            {"inputs": "a", "truncation_direction": None},
            {"inputs": "a", "truncation_direction": "LEFT"},
            {"inputs": "a", "truncate": 1},
            {"inputs": "a", "prompt_name": 1},
            {"inputs": "a", "dimensions": -1},
            {"inputs": "a", "dimensions": 1.5},
            {"inputs": "a", "dimensions": 2**32},
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
    (OpenAICompatRequest, {"input": "a", "encoding_format": None}),
    (OpenAICompatRequest, {"input": "a", "encoding_format": "Base64"}),
    (OpenAICompatRequest, {"input": "a", "model": 1}),
    (TeiVertexRequest, {}),
    (TeiVertexRequest, {"instances": {}}),
]


@pytest.mark.parametrize(("kind", "body"), WRONG, ids=[f"{kind.__name__}-{body}" for kind, body in WRONG])
def test_json_of_another_shape_is_422(kind: type[Body], body: Any) -> None:
    status, text = refusal(kind, body)

    assert status == 422
    assert text.startswith(NO_SHAPE)


def test_the_text_says_where_the_fault_is() -> None:
    assert refusal(TeiEmbedRequest, {"inputs": "a", "dimensions": "b"})[1].startswith(NO_SHAPE + "dimensions: ")
    assert refusal(TeiEmbedRequest, {"inputs": [["a"]]})[1] == NO_SHAPE + "inputs: data did not match any of its forms"


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
        ([2**32 - 1], [[2**31 - 1]]),
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
def test_a_bad_instance_of_vertex_is_a_failure_with_a_place(instance: Any) -> None:
    body = read(TeiVertexRequest, {"instances": [{"inputs": "a"}, instance]})

    with pytest.raises(InvalidInput, match=r"^Failed to deserialize instance 1: "):
        body.requests(served().model)
