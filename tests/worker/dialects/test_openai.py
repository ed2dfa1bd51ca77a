"""OpenAI's embeddings and models on the daemon's port."""

from __future__ import annotations

import base64
import gzip
import json
from typing import Any

import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

from teimgr.spec import LoadedModel, WorkerSpec
from teimgr.worker.dialects.openai import OpenAIEmbeddingsRequest
from teimgr.worker.http_inference import BadRequest, ServedModel

PATH = "/v1/embeddings"
TEXTS = ["the quick fox", "fog by the harbour"]


def embeddings(answer: Any) -> np.ndarray:
    return np.array([one["embedding"] for one in answer["data"]], np.float32)


async def test_texts_have_the_vectors_of_the_instances_port(ask: Asking) -> None:
    answer = (await ask.post(PATH, {"model": "dense", "input": TEXTS})).ok

    assert np.allclose(embeddings(answer), await ask.vectors("dense", TEXTS), atol=1e-6)
    assert {key: answer[key] for key in ("object", "model")} == {"object": "list", "model": "dense"}
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", 0), ("embedding", 1)]
    tokens = await ask.tokens("dense", TEXTS)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


async def test_base64_is_little_endian_float32(ask: Asking) -> None:
    plain = embeddings((await ask.post(PATH, {"model": "dense", "input": TEXTS})).ok)
    coded = (await ask.post(PATH, {"model": "dense", "input": TEXTS, "encoding_format": "base64"})).ok

    decoded = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]]
    assert np.allclose(decoded, plain, atol=1e-6)


@pytest.mark.parametrize(("ids", "rows"), [([5, 6, 7], 1), ([[5, 6, 7], [8, 9]], 2)])
async def test_token_ids_are_inputs(ask: Asking, ids: Any, rows: int) -> None:
    answer = (await ask.post(PATH, {"model": "dense", "input": ids})).ok

    assert len(answer["data"]) == rows
    assert np.allclose(embeddings(answer), await ask.vectors("dense", ids), atol=1e-6)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, ids if rows > 1 else [ids]))


async def test_dimensions_are_the_leading_ones_at_length_one(ask: Asking) -> None:
    answer = (await ask.post(PATH, {"model": "dense", "input": "fog", "dimensions": 8})).ok

    assert np.allclose(embeddings(answer), await ask.vectors("dense", ["fog"], dimensions=8), atol=1e-6)


async def test_a_model_has_many_names(ask: Asking, fleet: dict[str, Any]) -> None:
    names = ("dense", "text-embedding-3-small", "ada", str(fleet["dense"]))
    answers = [(await ask.post(PATH, {"model": name, "input": "fog", "user": "u", "x": 1})).ok for name in names]

    assert all(np.array_equal(embeddings(one), embeddings(answers[0])) for one in answers)
    assert [one["model"] for one in answers] == list(names)


@pytest.mark.parametrize(
    ("body", "status", "code", "param", "said"),
    [
        ({"model": "dnse", "input": "fog"}, 404, "model_not_found", "model", "did you mean"),
        ({"model": "dead", "input": "fog"}, 404, "model_not_found", "model", "The model 'dead' does not exist"),
        ({"input": "fog"}, 400, None, "model", "Say which model: the running ones are 'dense', 'm3'"),
        ({"model": "idle", "input": "fog"}, 503, "model_not_ready", None, "is not running (status: stopped)"),
        ({"model": "dense"}, 400, None, "input", "is missing"),
        ({"model": "dense", "input": [1, "a"]}, 400, None, "input", "did not match"),
        ({"model": "dense", "input": ""}, 400, None, None, "cannot be an empty string"),
        ({"model": "dense", "input": []}, 400, None, None, "cannot be an empty"),
        ({"model": "dense", "input": ["fog", ""]}, 400, None, None, "cannot be an empty"),
        ({"model": "dense", "input": ["fog"] * 2049}, 400, None, None, "2049"),
        ({"model": "dense", "input": "fog", "dimensions": 33}, 400, None, None, "`dimensions` should be smaller"),
        ({"model": "dense", "input": [10**9]}, 400, None, None, "vocabulary"),
        ({"model": "reranker", "input": "fog"}, 400, None, None, "Model is not an embedding model"),
        (b"{", 400, None, "model", "Say which model"),
        (b'{"model": "dense", ', 400, None, None, "The body is not valid JSON"),
        ([], 400, None, "model", "Say which model"),
    ],
)
async def test_errors_are_openais(
    ask: Asking, body: Any, status: int, code: str | None, param: str | None, said: str
) -> None:
    told = await ask.post(PATH, body)

    error = told.json["error"]
    assert (told.status, error["code"], error["param"]) == (status, code, param), error
    assert said in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "retry-after" not in told.headers  # an operator decides when a stopped instance runs again


async def test_without_a_model_the_route_says_which_instance_fits(ask: Asking) -> None:
    pair = {"query": "fog", "documents": ["fog", "rain"]}
    told, body = await ask.post("/classify", {"input": "fog"}), {"input": "fog", "model": "classifier"}
    assert told.ok == (await ask.post("/classify", body)).ok | {
        name: told.ok[name] for name in ("id", "created", "model") if name in told.ok
    }
    assert told.ok.get("model") in (None, "classifier")  # no path of the host
    for path, body in (
        ("/rerank", pair),
        ("/v1/rerank", pair),
        ("/v2/rerank", pair | {"model": None}),
        ("/vllm/rerank", pair),
        ("/v1/score", {"text_1": "fog", "text_2": "rain"}),
    ):
        told = await ask.post(path, body)
        assert told.status == 400
        assert b"Say which model: the running ones are 'reranker', 'judge'" in told.body
    for path, body in (("/v1/embeddings", {"input": "fog"}), ("/v2/embed", {"texts": ["fog"], "input_type": "query"})):
        told = await ask.post(path, body)
        assert told.status == 400
        assert b"Say which model: the running ones are 'dense', 'm3'" in told.body
        assert b"reranker" not in told.body


async def test_a_body_over_the_limit_is_refused_and_the_connection_goes_on(ask: Asking) -> None:
    told = await ask.post(PATH, {"model": "dense", "input": "a" * (5 * 2**20)})

    assert told.status == 413
    assert "4194304" in told.json["error"]["message"]
    assert (await ask.post(PATH, {"model": "dense", "input": "fog"})).status == 200


async def test_a_body_that_is_not_said_to_be_json_is_refused(ask: Asking) -> None:
    told = await ask.post(PATH, b'{"model": "dense", "input": "fog"}', content_type="text/plain")

    assert (told.status, told.json["error"]["type"]) == (415, "invalid_request_error")


async def test_a_large_body_names_its_model_at_the_end(ask: Asking) -> None:
    texts = ["fog and rain " * 40] * 1000
    answer = (await ask.post(PATH, {"input": texts, "encoding_format": "base64", "model": "dense"})).ok

    assert len(answer["data"]) == 1000
    assert answer["usage"]["total_tokens"] == 1000 * 96


async def test_the_list_of_models_is_what_a_model_may_say(ask: Asking, fleet: dict[str, Any]) -> None:
    models = (await ask.get("/v1/models")).ok

    assert models["object"] == "list"
    ids = [one["id"] for one in models["data"]]
    assert ids == sorted(ids)
    assert {"dense", "idle", "ada", str(fleet["m3"])} <= set(ids)
    assert "dead" not in ids
    assert all(one["object"] == "model" and isinstance(one["created"], int) for one in models["data"])
    assert (await ask.get("/v1/models/ada")).ok["root"] == str(fleet["dense"])
    missing = await ask.get("/v1/models/nothing")
    assert (missing.status, missing.json["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (PATH, {"model": "dense", "input": "fog"}),
        ("/v1/rerank", {"model": "reranker", "query": "a", "documents": ["b"]}),
        ("/embeddings", {"model": "dense", "input": "fog"}),
        ("/pooling", {"model": "dense", "input": "fog"}),
    ],
)
async def test_a_body_without_a_type_is_json_but_not_for_tei(ask: Asking, path: str, body: Any) -> None:
    assert (await ask.post(path, body, content_type="")).ok
    assert (await ask.post("/instances/dense/embed", {"inputs": "fog"}, content_type="")).status == 415
    assert (await ask.post(path, body, content_type="text/plain")).status == 415


async def test_a_compressed_body_is_refused_as_such(ask: Asking) -> None:
    body = gzip.compress(json.dumps({"model": "dense", "input": "fog"}).encode())
    refused = await ask.post(PATH, body, content_encoding="gzip")
    assert refused.status == 400
    assert refused.json["error"]["message"] == "The body is compressed (Content-Encoding: gzip); send it uncompressed"


async def test_unknown_paths_answer_in_openais_form(ask: Asking) -> None:
    told = await ask.post("/v1/images", {})
    assert (told.status, told.json["error"]["code"]) == (404, "unknown_url")
    told = await ask.get(PATH)
    assert (told.status, told.headers["allow"], told.json["error"]["param"]) == (405, "POST", None)


async def test_the_list_of_models_serves_every_client(ask: Asking) -> None:
    listed = (await ask.get("/v1/models")).ok
    cards = {card["name"]: card for card in listed["models"]}
    assert listed["models"] == listed["data"]
    dense, m3, reranker, idle = (cards[name] for name in ("dense", "m3", "reranker", "idle"))
    assert (dense["state"], dense["loaded"], dense["max_model_len"]) == ("loaded", True, 96)
    assert (dense["outputs"], dense["dims"], dense["endpoints"]) == (["dense"], {"dense": 32}, ["embed"])
    assert (set(m3["outputs"]), m3["dims"]["dense"]) == ({"dense", "sparse", "multivector"}, 32)
    assert (reranker["outputs"], reranker["capabilities"], reranker["dims"]) == (["score"], ["rerank"], {})
    assert (idle["state"], idle["loaded"]) == ("available", False)
    assert cards["ada"]["state"] == "loaded"
    of_infinity = (await ask.get("/infinity/models")).ok["data"]
    assert {card["owned_by"] for card in of_infinity} == {"infinity"}
    assert all("stats" in card for card in of_infinity)


@pytest.mark.parametrize("prefix", ["/jina", "/vllm", "/infinity", "/voyage", "/cohere"])
async def test_every_prefix_has_the_models_and_errors_of_its_own_form(ask: Asking, prefix: str) -> None:
    names = [card["id"] for card in (await ask.get("/v1/models")).ok["data"]]
    assert [card["id"] for card in (await ask.get(f"{prefix}/v1/models")).ok["data"]] == names
    assert (await ask.get(f"{prefix}/v1/models/dense")).ok["id"] == "dense"
    missing, unrouted = await ask.get(f"{prefix}/v1/models/nothing"), await ask.get(f"{prefix}/v1/nothing")
    assert (missing.status, unrouted.status) == (400 if prefix == "/infinity" else 404, 404)
    assert missing.json.keys() == unrouted.json.keys()
    assert "code" not in missing.json.get("error", {}) or isinstance(missing.json["error"]["code"], int)


async def test_prefixes_have_what_their_clients_ask_for_beside_inference(ask: Asking) -> None:
    health = await ask.get("/vllm/health")
    assert (health.status, health.body) == (200, b"")
    assert (await ask.get("/vllm/version")).ok["version"]
    assert (await ask.post("/cohere/v1/check-api-key", {})).ok["valid"] is True
    embedded = (await ask.post("/infinity/v1/embeddings", {"model": "dense", "input": "fog"})).ok
    assert embedded["id"].startswith("infinity-")


async def test_values_are_converted_as_pydantic_does_but_texts_never_become_ids(ask: Asking) -> None:
    exact = (await ask.post(PATH, {"model": "dense", "input": ["12", "7"], "dimensions": 16})).ok
    lenient = (await ask.post(PATH, {"model": "dense", "input": ["12", "7"], "dimensions": "16"})).ok
    assert lenient == exact
    assert len(exact["data"]) == 2
    refused = await ask.post(PATH, {"model": "dense", "input": "fog", "dimensions": "many"})
    assert (refused.status, refused.json["error"]["param"]) == (400, "dimensions")


def test_a_task_without_weights_is_refused_where_the_model_has_weights_by_task() -> None:
    """jina-embeddings-v3; other models take Jina's tasks as hints for their prompts."""
    tasks = ("retrieval.query", "retrieval.passage", "text-matching")

    def prompt_of(prompts: tuple[str, ...], **fields: str) -> str | None:
        model = LoadedModel(
            model_id="m",
            model_sha=None,
            dtype="float32",
            device="cpu",
            kind="embedding",
            pooling="mean",
            dimension=8,
            max_input_length=64,
            max_batch_tokens=64,
            batching="packed",
            prompts=prompts,
            default_prompt_name=None,
            outputs=("dense",),
        )
        served = ServedModel(model, WorkerSpec(name="i", model_id="m"))
        return OpenAIEmbeddingsRequest(input="a", **fields).options(served, truncate_by_default=True).prompt_name

    assert prompt_of(tasks, task="text-matching") == "text-matching"
    assert prompt_of(tasks, task="retrieval.query") == "retrieval.query"
    assert prompt_of(tasks, input_type="query") == "retrieval.query"
    assert prompt_of(tasks, input_type="search_document") == "retrieval.passage"
    assert prompt_of(("query",), task="text-matching") is None
    with pytest.raises(BadRequest, match=r"no weights for 'code.query'; there are: retrieval.query"):
        prompt_of(tasks, task="code.query")
