"""Every route of TEI on a model of every kind: the clauses of the contract that need a model."""

from __future__ import annotations

import base64
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.conformance.words import (
    NO_EMBED_ALL,
    NO_NORMALIZE,
    NOT_CLASSIFIER,
    NOT_EMBEDDING,
    NOT_RERANKER,
    NOT_SPLADE,
    PASSAGES,
    QUERY,
    TEXT,
    WITH_FLOATS,
)
from tests.support import models
from tests.support.worker_process import WorkerProcess
from tests.worker.tei_client import COST_HEADERS, TeiClient

from teimgr.wire.frames import Method

BUILD: dict[str, Callable[[Path], Path]] = {
    "embedding": lambda folder: models.build("bert", folder, prompts={"query": "query: "}),
    "m3": models.build_m3,
    "sparse": lambda folder: models.build_splade("bert", folder),
    "multi-vector": lambda folder: models.build_multi_vector("bert", folder),
    "reranker": lambda folder: models.build_cross_encoder("bert", folder),
    "classifier": lambda folder: models.build_classifier("bert", folder),
}


class Fleet(dict[str, TeiClient]):
    """A client for a worker of each kind of model."""


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, WorkerProcess]]:
    """One worker per kind, which come up beside one another."""
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(
                WorkerProcess(build(tmp_path_factory.mktemp("m")), served_model_name=f"my-{kind}")
            )
            for kind, build in BUILD.items()
        }


@pytest.fixture
async def fleet(workers: dict[str, WorkerProcess]) -> AsyncIterator[Fleet]:
    """A client for each worker; they are ready."""
    fleet = Fleet()
    for kind, worker in workers.items():
        link = await worker.link()
        await link.state(link.post(Method.WATCH), "ready")
        link.close()
        await link.closed()
        fleet[kind] = TeiClient(worker)
    yield fleet
    for client in fleet.values():
        await client.session.close()


# §1.1, §1.15: /info of each kind, and its task where none is named.


@pytest.mark.parametrize(
    ("kind", "model_type"),
    [
        ("embedding", {"embedding": {"pooling": "mean"}}),
        ("m3", {"embedding": {"pooling": "cls"}}),
        ("sparse", {"embedding": {"pooling": "splade"}}),
        (
            "classifier",
            {
                "classifier": {
                    "id2label": {"0": "anger", "1": "joy", "2": "surprise"},
                    "label2id": {"anger": 0, "joy": 1, "surprise": 2},
                }
            },
        ),
        ("reranker", {"reranker": {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}}),
    ],
)
async def test_info_says_the_kind_as_tei_does(fleet: Fleet, kind: str, model_type: dict[str, Any]) -> None:
    info = (await fleet[kind].ask("GET", "/info")).json

    assert info["model_type"] == model_type
    assert info["served_model_name"] == f"my-{kind}"


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    [
        ("embedding", "/embed", {"inputs": TEXT}),
        ("m3", "/embed", {"inputs": TEXT}),
        ("sparse", "/embed_sparse", {"inputs": TEXT}),
        ("multi-vector", "/embed_all", {"inputs": TEXT}),
        ("classifier", "/predict", {"inputs": TEXT}),
        ("reranker", "/rerank", {"query": QUERY, "texts": PASSAGES}),
    ],
)
async def test_the_default_task_is_that_of_the_kind(fleet: Fleet, kind: str, path: str, body: Any) -> None:
    expected = await fleet[kind].post(path, body)
    assert expected.status == 200, expected

    for default in ("/", "/invocations"):
        told = await fleet[kind].post(default, body)
        assert (told.status, told.text) == (200, expected.text)
        assert set(COST_HEADERS) <= {name.lower() for name in told.headers}


LONG = "text " * 200_000
SENTENCES = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
RANKED = {"query": "a", "texts": ["b"]}


@pytest.mark.parametrize(
    ("kind", "path", "body", "error"),
    [
        *(
            (kind, path, body, NOT_EMBEDDING)
            for kind in ("classifier", "reranker")
            for path, body in (
                ("/embed", {"inputs": "a"}),
                ("/embed_all", {"inputs": "a"}),
                ("/similarity", SENTENCES),
            )
        ),
        *((kind, "/embed_sparse", {"inputs": "a"}, NOT_SPLADE) for kind in ("classifier", "reranker", "embedding")),
        *((kind, "/predict", {"inputs": "a"}, NOT_CLASSIFIER) for kind in ("embedding", "sparse", "multi-vector")),
        *((kind, "/rerank", RANKED, NOT_RERANKER) for kind in ("embedding", "sparse", "classifier")),
        ("sparse", "/embed", {"inputs": "a"}, NO_NORMALIZE),
        ("sparse", "/embed_all", {"inputs": "a"}, NO_EMBED_ALL),
    ],
)
async def test_a_wrong_kind_is_424_in_teis_words(fleet: Fleet, kind: str, path: str, body: Any, error: str) -> None:
    told = await fleet[kind].post(path, body)

    assert told.error == (424, {"error": error, "error_type": "Backend"})
    assert not set(COST_HEADERS) & {name.lower() for name in told.headers}


async def test_a_wrong_kind_on_the_openai_routes_has_their_body(fleet: Fleet) -> None:
    for kind, error in (("classifier", NOT_EMBEDDING), ("sparse", NO_NORMALIZE)):
        for path in ("/v1/embeddings", "/embeddings"):
            told = await fleet[kind].post(path, {"input": "a"})
            assert told.error == (424, {"message": error, "code": 424, "type": "Backend"})


# §1.4: the fault that is reported where there are several.


@pytest.mark.parametrize(
    ("kind", "path", "body", "status", "error", "type"),
    [
        ("embedding", "/rerank", {"query": "a", "texts": []}, 400, "`texts` cannot be empty", "Empty"),
        ("embedding", "/rerank", {"query": "a", "texts": ["b"] * 33}, 424, NOT_RERANKER, "Backend"),
        (
            "reranker",
            "/rerank",
            {"query": "a", "texts": ["b"] * 33},
            422,
            "batch size 33 > maximum allowed batch size 32",
            "Validation",
        ),
        (
            "classifier",
            "/embed",
            {"inputs": ["b"] * 33},
            422,
            "batch size 33 > maximum allowed batch size 32",
            "Validation",
        ),
        ("classifier", "/embed", {"inputs": ""}, 424, NOT_EMBEDDING, "Backend"),
        (
            "classifier",
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": []}},
            400,
            "`inputs.sentences` cannot be empty",
            "Empty",
        ),
        (
            "embedding",
            "/similarity",
            {"inputs": {"source_sentence": "a", "sentences": ["b"] * 32}},
            422,
            "batch size 33 > maximum allowed batch size 32",
            "Validation",
        ),
        (
            "reranker",
            "/rerank",
            {"query": "", "texts": ["b", ""]},
            400,
            "Input validation error: `inputs` cannot be empty",
            "Empty",
        ),
        (
            "classifier",
            "/predict",
            {"inputs": [["a"], ["", ""]]},
            400,
            "Input validation error: `inputs` cannot be empty",
            "Empty",
        ),
        (
            "embedding",
            "/embed",
            {"inputs": ["fog", "rain " * 200, ""], "truncate": False},
            422,
            "Input validation error: `inputs` must have less than 96 tokens. Given: 402",
            "Validation",
        ),
        (
            "embedding",
            "/embed",
            {"inputs": ["fog", "", "rain " * 200], "truncate": False},
            400,
            "Input validation error: `inputs` cannot be empty",
            "Empty",
        ),
        (
            "embedding",
            "/embed",
            {"inputs": "fog", "dimensions": 33},
            422,
            "Input validation error: `dimensions` should be smaller than the maximum embedding dimension.",
            "Validation",
        ),
        ("embedding", "/tokenize", {"inputs": []}, 400, "`inputs` cannot be empty", "Empty"),
        (
            "embedding",
            "/tokenize",
            {"inputs": ""},
            400,
            "Input validation error: `inputs` cannot be empty",
            "Empty",
        ),
        *(
            (
                "embedding",
                "/decode",
                {"ids": ids},
                400,
                "Input validation error: `input_ids` cannot be empty",
                "Empty",
            )
            for ids in ([], [[5], []])
        ),
        *(
            (
                "embedding",
                path,
                body,
                422,
                "batch size 33 > maximum allowed batch size 32",
                "Validation",
            )
            for path, body in (("/tokenize", {"inputs": ["a"] * 33}), ("/decode", {"ids": [[5]] * 33}))
        ),
    ],
)
async def test_the_fault_that_is_told(
    fleet: Fleet, kind: str, path: str, body: Any, status: int, error: str, type: str
) -> None:
    assert (await fleet[kind].post(path, body)).error == (status, {"error": error, "error_type": type})


async def test_an_unknown_prompt_is_named(fleet: Fleet) -> None:
    told = await fleet["embedding"].post("/embed", {"inputs": "a", "prompt_name": "passage"})

    status, body = told.error
    assert (status, body["error_type"]) == (422, "Validation")
    assert "`passage`" in body["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/embed", {"inputs": "a", "prompt_name": LONG}),
        ("/embed", {"inputs": "a", "truncation_direction": LONG}),
        ("/embed", {"inputs": "a", "normalize": LONG}),
        ("/embed", {"inputs": "a", LONG: 1, "truncate": 5}),
        ("/v1/embeddings", {"input": "a", "encoding_format": LONG}),
        ("/v1/embeddings", {"input": "a", "dimensions": LONG}),
        ("/jina/v1/embeddings", {"input": "a", "embedding_type": LONG}),
        ("/cohere/v2/embed", {"texts": ["a"], "embedding_types": [LONG]}),
        ("/vllm/v1/embeddings", {"input": "a", "truncate_prompt_tokens": LONG}),
        ("/voyage/v1/embeddings", {"input": "a", "output_dtype": LONG}),
    ],
    ids=lambda given: str(given)[:40],
)
async def test_a_refusal_quotes_little_of_a_long_text(fleet: Fleet, path: str, body: Any) -> None:
    told = await fleet["embedding"].post(path, body)

    assert 400 <= told.status < 500, told.text[:200]
    assert len(told.text) < 40_000


# §1.6: what an answer cost.


@pytest.mark.parametrize(
    ("kind", "path", "body", "characters"),
    [
        ("embedding", "/embed", {"inputs": "Zürich 东京"}, 9),
        ("embedding", "/embed", {"inputs": ["fog", [101, 5, 6]]}, 6),
        ("embedding", "/similarity", SENTENCES, 2),
        ("embedding", "/v1/embeddings", {"input": ["fog", "dog"]}, 6),
        ("reranker", "/rerank", {"query": "ab", "texts": ["c", "def"]}, 8),
        ("classifier", "/predict", {"inputs": ["ab", "c"]}, 3),
    ],
)
async def test_eight_headers_say_the_cost(fleet: Fleet, kind: str, path: str, body: Any, characters: int) -> None:
    told = await fleet[kind].post(path, body)

    assert told.status == 200, told
    assert told.cost["x-compute-characters"] == characters
    assert told.cost["x-compute-tokens"] > 0
    assert set(told.cost) == set(COST_HEADERS) - {"x-compute-type"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "a"}),
        ("/decode", {"ids": [5]}),
        ("/vertex", {"instances": [{"inputs": "a"}]}),
        ("/embed", {"inputs": ""}),
        ("/embed", {}),
    ],
)
async def test_these_answers_say_no_cost(fleet: Fleet, path: str, body: Any) -> None:
    told = await fleet["embedding"].post(path, body)

    assert not set(COST_HEADERS) & {name.lower() for name in told.headers}


# §1.2: 32-bit floats in the fewest digits.


@pytest.mark.parametrize(
    ("kind", "path", "body"),
    WITH_FLOATS,
)
async def test_floats_have_the_fewest_digits_that_are_the_same_32_bits(
    fleet: Fleet, kind: str, path: str, body: Any
) -> None:
    told = await fleet[kind].post(path, body)
    numbers = re.findall(r"-?\d+\.\d+(?:e-?\d+)?", told.text)

    assert numbers
    for number in numbers:
        assert orjson.dumps(np.float32(number), option=orjson.OPT_SERIALIZE_NUMPY).decode() == number


# §1.2: the size and the content type of a body.


async def test_two_million_bytes_are_read_and_no_more(fleet: Fleet) -> None:
    start, end = b'{"inputs": "', b'"}'
    fits = start + b"a " * ((2_000_000 - len(start) - len(end)) // 2) + end
    assert len(fits) == 2_000_000

    assert (await fleet["embedding"].post("/embed", fits)).status == 200
    for path in ("/embed", "/tokenize", "/v1/embeddings", "/vertex"):
        told = await fleet["embedding"].post(path, fits + b" ")
        assert (told.status, told.media_type) == (413, "text/plain")
        assert told.text == "Failed to buffer the request body: length limit exceeded"


@pytest.mark.parametrize("path", ["/embed", "/rerank", "/decode", "/v1/embeddings", "/vertex", "/"])
async def test_a_body_must_be_said_to_be_json(fleet: Fleet, path: str) -> None:
    told = await fleet["embedding"].ask("POST", path, b"{}", {"content-type": "text/plain"})

    assert (told.status, told.media_type) == (415, "text/plain")
    assert told.text == "Expected request with `Content-Type: application/json`"


# §1.5, §4.4: ids.


async def test_ids_are_the_text_they_came_from(fleet: Fleet) -> None:
    client = fleet["embedding"]
    [tokens] = await client.ok("/tokenize", {"inputs": "the quick fox"})
    ids = [token["id"] for token in tokens]
    expected = await client.ok("/embed", {"inputs": ["the quick fox", "fog"]})

    for inputs in (ids, [ids], [ids, "fog"]):
        vectors = await client.ok("/embed", {"inputs": inputs})
        assert np.allclose(vectors, expected[: len(vectors)], atol=1e-5)
    openai = await client.ok("/v1/embeddings", {"input": [ids, ids]})
    assert np.allclose([row["embedding"] for row in openai["data"]], [expected[0]] * 2, atol=1e-5)


@pytest.mark.parametrize("inputs", [[], [[]], ["fog", []]])
async def test_no_ids_are_nothing_to_work_on(fleet: Fleet, inputs: Any) -> None:
    told = await fleet["embedding"].post("/embed", {"inputs": inputs})

    assert told.error == (400, {"error": "Input validation error: `inputs` cannot be empty", "error_type": "Empty"})


# §1.8, §1.9: other forms of vectors.


async def test_every_token_has_its_hidden_state(fleet: Fleet) -> None:
    client = fleet["embedding"]
    told = await client.post("/embed_all", {"inputs": ["fog", "the quick brown fox"]})
    rows = [np.array(one, np.float32) for one in told.json]

    assert sum(map(len, rows)) == told.cost["x-compute-tokens"]
    means = await client.ok("/embed", {"inputs": ["fog", "the quick brown fox"], "normalize": False})
    assert np.allclose([one.mean(axis=0) for one in rows], means, atol=1e-5)


async def test_a_late_interaction_model_gives_its_own_vectors_for_all_embeddings(fleet: Fleet) -> None:
    [vectors] = await fleet["multi-vector"].ok("/embed_all", {"inputs": "the quick brown fox"})

    assert np.shape(vectors)[1] == models.TOKEN_WIDTH
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


@pytest.mark.parametrize("kind", ["sparse", "m3"])
async def test_sparse_entries_ascend_and_are_not_zero(fleet: Fleet, kind: str) -> None:
    told = await fleet[kind].ok("/embed_sparse", {"inputs": ["the quick fox", "fog"]})

    assert len(told) == 2
    for entries in told:
        assert all(list(entry) == ["index", "value"] for entry in entries)
        indices = [entry["index"] for entry in entries]
        assert indices == sorted(set(indices))
        assert all(entry["value"] > 0 for entry in entries)


async def test_a_sparse_vector_is_the_dense_one_without_zeros(fleet: Fleet) -> None:
    [entries] = await fleet["sparse"].ok("/embed_sparse", {"inputs": TEXT})
    [dense] = await fleet["sparse"].ok("/embed", {"inputs": TEXT, "normalize": False})

    assert [entry["index"] for entry in entries] == np.flatnonzero(dense).tolist()
    assert np.allclose([entry["value"] for entry in entries], np.array(dense)[np.flatnonzero(dense)], rtol=1e-4)


# §1.10, §1.11: scores.


async def test_a_list_of_two_strings_is_a_pair_and_a_list_of_lists_a_batch(fleet: Fleet) -> None:
    client = fleet["classifier"]
    pair = await client.ok("/predict", {"inputs": ["fog", "rain"]})
    single = await client.ok("/predict", {"inputs": "fog"})
    batch = await client.ok("/predict", {"inputs": [["fog"], ["fog", "rain"]]})

    assert [one["label"] for one in await client.ok("/predict", {"inputs": ["fog"]})] == [
        one["label"] for one in single
    ]
    assert list(pair[0]) == ["score", "label"]
    for told, expected in zip(batch, (single, pair), strict=True):
        assert [one["label"] for one in told] == [one["label"] for one in expected]
        assert np.allclose([one["score"] for one in told], [one["score"] for one in expected], atol=1e-5)
    assert len(await client.ok("/predict", {"inputs": [["fog"]]})) == 1


async def test_all_labels_are_told_best_first_and_raw_scores_are_logits(fleet: Fleet) -> None:
    client = fleet["classifier"]
    scores = {one["label"]: one["score"] for one in await client.ok("/predict", {"inputs": TEXT})}
    logits = {one["label"]: one["score"] for one in await client.ok("/predict", {"inputs": TEXT, "raw_scores": True})}

    assert set(scores) == set(models.LABELS)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)
    assert list(logits) == list(scores)
    powers = np.exp(list(logits.values()))
    assert np.allclose(list(scores.values()), powers / powers.sum(), atol=1e-5)


async def test_ranks_are_sorted_and_of_equal_ones_the_later_comes_first(fleet: Fleet) -> None:
    client = fleet["reranker"]
    ranks = await client.ok("/rerank", {"query": "fog", "texts": ["rain", "fog", "rain"]})

    assert all(list(rank) == ["index", "score"] for rank in ranks)
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    scores = [rank["score"] for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    places = [rank["index"] for rank in ranks]
    if scores[places.index(0)] == scores[places.index(2)]:
        assert places.index(2) < places.index(0)


async def test_ranks_have_their_text_where_it_is_asked(fleet: Fleet) -> None:
    ranks = await fleet["reranker"].ok("/rerank", {"query": QUERY, "texts": PASSAGES, "return_text": True})

    assert all(list(rank) == ["index", "text", "score"] for rank in ranks)
    assert all(rank["text"] == PASSAGES[rank["index"]] for rank in ranks)


async def test_a_rank_is_the_prediction_of_the_pair(fleet: Fleet) -> None:
    client = fleet["reranker"]
    for raw in (False, True):
        ranks = await client.ok("/rerank", {"query": QUERY, "texts": PASSAGES, "raw_scores": raw})
        for rank in ranks:
            pair = {"inputs": [QUERY, PASSAGES[rank["index"]]], "raw_scores": raw}
            [prediction] = await client.ok("/predict", pair)
            assert rank["score"] == pytest.approx(prediction["score"], abs=1e-5)


@pytest.mark.parametrize("body", [{"query": "", "texts": ["a"]}, {"query": "a", "texts": ["", "b"]}])
async def test_one_side_of_a_pair_may_be_empty(fleet: Fleet, body: Any) -> None:
    assert len(await fleet["reranker"].ok("/rerank", body)) == len(body["texts"])


# §1.12


async def test_similarity_is_the_cosine_in_the_order_of_the_sentences(fleet: Fleet) -> None:
    client = fleet["embedding"]
    sentences = ["dog", TEXT, "the quick brown fox"]
    told = await client.ok("/similarity", {"inputs": {"source_sentence": TEXT, "sentences": sentences}})
    vectors = np.array(await client.ok("/embed", {"inputs": [TEXT, *sentences]}))

    assert np.allclose(told, vectors[1:] @ vectors[0], atol=1e-5)
    assert told[1] == pytest.approx(1, abs=1e-5)


async def test_the_parameters_of_similarity_are_obeyed(fleet: Fleet) -> None:
    inputs = {"source_sentence": "fog", "sentences": ["dog"]}
    plain = await fleet["embedding"].ok("/similarity", {"inputs": inputs, "parameters": None})
    other = await fleet["embedding"].ok("/similarity", {"inputs": inputs, "parameters": {"prompt_name": "query"}})
    told = await fleet["embedding"].post(
        "/similarity", {"inputs": inputs | {"sentences": ["rain " * 200]}, "parameters": {"truncate": False}}
    )

    assert plain != other
    assert told.status == 422


# §1.13


async def test_offsets_of_tokens_are_bytes_of_the_final_text(fleet: Fleet) -> None:
    client = fleet["embedding"]
    for body, final in (({"inputs": TEXT}, TEXT), ({"inputs": TEXT, "prompt_name": "query"}, "query: " + TEXT)):
        [tokens] = await client.ok("/tokenize", body)
        assert all(list(token) == ["id", "text", "special", "start", "stop"] for token in tokens)
        assert [(token["text"], token["start"], token["stop"]) for token in (tokens[0], tokens[-1])] == [
            ("[CLS]", None, None),
            ("[SEP]", None, None),
        ]
        for token in tokens[1:-1]:
            assert token["text"] == final.encode()[token["start"] : token["stop"]].decode(errors="replace")


async def test_tokens_are_not_truncated_and_special_ones_can_be_left_out(fleet: Fleet) -> None:
    bare, framed = [
        (await fleet["embedding"].ok("/tokenize", {"inputs": "rain " * 200, "add_special_tokens": special}))[0]
        for special in (False, True)
    ]

    assert (len(bare), len(framed)) == (400, 402)
    assert not any(token["special"] for token in bare)


async def test_what_was_tokenized_is_decoded(fleet: Fleet) -> None:
    client = fleet["embedding"]
    tokens = await client.ok("/tokenize", {"inputs": ["the quick fox", "fog"]})
    ids = [[token["id"] for token in of_text] for of_text in tokens]

    assert await client.ok("/decode", {"ids": ids}) == ["the quick fox", "fog"]
    assert await client.ok("/decode", {"ids": ids[0]}) == ["the quick fox"]
    [framed] = await client.ok("/decode", {"ids": ids[1], "skip_special_tokens": False})
    assert framed == "[CLS] fog [SEP]"


# §1.14


async def test_the_openai_form(fleet: Fleet) -> None:
    client = fleet["embedding"]
    told = await client.post("/v1/embeddings", {"input": ["fog", "the quick fox"], "model": "gpt", "user": None})
    expected = await client.ok("/embed", {"inputs": ["fog", "the quick fox"]})

    assert list(told.json) == ["object", "data", "model", "usage"]
    assert (told.json["object"], told.json["model"]) == ("list", "my-embedding")
    assert [list(row) for row in told.json["data"]] == [["object", "embedding", "index"]] * 2
    assert [(row["object"], row["index"]) for row in told.json["data"]] == [("embedding", 0), ("embedding", 1)]
    assert np.allclose([row["embedding"] for row in told.json["data"]], expected, atol=1e-6)
    tokens = told.cost["x-compute-tokens"]
    assert told.json["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_holds_the_same_floats_in_little_endian(fleet: Fleet) -> None:
    client = fleet["embedding"]
    for path in ("/v1/embeddings", "/embeddings"):
        body = {"input": [TEXT], "dimensions": 8}
        [floats] = (await client.ok(path, body | {"encoding_format": "float"}))["data"]
        [coded] = (await client.ok(path, body | {"encoding_format": "base64"}))["data"]
        vector = np.frombuffer(base64.b64decode(coded["embedding"], validate=True), "<f4")
        assert vector.shape == (8,)
        assert np.allclose(vector, floats["embedding"], atol=1e-6)
        assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5)


@pytest.mark.clause("D-client-batch")
async def test_the_openai_form_takes_2048_inputs(fleet: Fleet) -> None:
    told = await fleet["embedding"].ok("/v1/embeddings", {"input": ["fog"] * 2048, "encoding_format": "base64"})
    refused = await fleet["embedding"].post("/v1/embeddings", {"input": ["fog"] * 2049})

    assert [row["index"] for row in told["data"]] == list(range(2048))
    error = {"message": "batch size 2049 > maximum allowed batch size 2048", "code": 422, "type": "Validation"}
    assert refused.error == (422, error)


async def test_what_the_openai_form_cannot_read_is_refused_as_elsewhere(fleet: Fleet) -> None:
    told = await fleet["embedding"].post("/v1/embeddings", {"input": "a", "user": 1})

    assert (told.status, told.media_type) == (422, "text/plain")
    assert (await fleet["embedding"].post("/v1/embeddings", {"input": ""})).error == (
        400,
        {"message": "Input validation error: `inputs` cannot be empty", "code": 400, "type": "Empty"},
    )


# §1.16


@pytest.mark.parametrize(
    ("kind", "path", "instances"),
    [
        ("embedding", "/embed", [{"inputs": "fog"}, {"inputs": ["fog", "dog"], "dimensions": 4}]),
        ("sparse", "/embed_sparse", [{"inputs": "fog"}]),
        ("classifier", "/predict", [{"inputs": "fog"}, {"inputs": [["fog"]]}]),
        ("reranker", "/predict", [{"inputs": ["fog", "dog"]}]),
        ("reranker", "/rerank", [{"query": QUERY, "texts": PASSAGES}]),
    ],
)
async def test_vertex_wraps_what_the_routes_answer(fleet: Fleet, kind: str, path: str, instances: list[Any]) -> None:
    told = await fleet[kind].ok("/vertex", {"instances": instances, "parameters": {}})

    assert list(told) == ["predictions"]
    for prediction, instance in zip(told["predictions"], instances, strict=True):
        expected = await fleet[kind].ok(path, instance)
        assert np.shape(prediction) == np.shape(expected)
        assert _numbers(prediction) == pytest.approx(_numbers(expected), abs=1e-5)


async def test_the_first_instance_that_fails_fails_all(fleet: Fleet) -> None:
    instances = [{"inputs": "fog"}, {"inputs": ["dog"] * 32}, {"inputs": ""}, {"inputs": "fog", "dimensions": 0}]

    assert (await fleet["embedding"].ok("/vertex", {"instances": []})) == {"predictions": []}
    assert (await fleet["embedding"].post("/vertex", {"instances": instances})).error == (
        400,
        {"error": "Input validation error: `inputs` cannot be empty", "error_type": "Empty"},
    )
    status, body = (await fleet["embedding"].post("/vertex", {"instances": [{"inputs": 5}]})).error
    assert (status, body["error_type"]) == (422, "Validation")


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return _numbers(list(value.values()))
    if isinstance(value, list):
        return [number for one in value for number in _numbers(one)]
    return [] if isinstance(value, str) else [value]
