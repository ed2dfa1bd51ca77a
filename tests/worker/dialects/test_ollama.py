"""Ollama's routes: vectors, names, fields that are honoured, and refusals in Ollama's words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.worker.dialects.dialect_client import Asking

TEXTS = ["the quick fox", "fog by the harbour"]
LONG = "fog and rain " * 100
EMBED, EMBEDDINGS = "/api/embed", "/api/embeddings"


async def test_vectors_have_length_1_and_the_answer_is_ollamas(ask: Asking) -> None:
    one = (await ask.post(EMBED, {"model": "dense", "input": TEXTS[0]})).ok
    two = (await ask.post(EMBED, {"model": "dense:latest", "input": TEXTS, "truncate": True, "keep_alive": "5m"})).ok

    unit = await ask.vectors("dense", TEXTS)
    assert np.allclose(one["embeddings"], unit[:1], atol=1e-6)
    assert np.allclose(two["embeddings"], unit, atol=1e-6)
    assert (one["model"], two["model"]) == ("dense", "dense:latest")
    assert two["prompt_eval_count"] == await ask.tokens("dense", TEXTS)
    assert 0 < two["total_duration"] < 60e9
    assert 0 <= two["load_duration"] < two["total_duration"]


async def test_the_older_route_does_not_scale_its_vector(ask: Asking) -> None:
    found = (await ask.post(EMBEDDINGS, {"model": "dense", "prompt": TEXTS[0]})).ok
    assert set(found) == {"embedding"}
    assert np.allclose(found["embedding"], (await ask.vectors("dense", TEXTS[:1], normalize=False))[0], atol=1e-5)


@pytest.mark.parametrize("empty", [{}, {"input": ""}, {"input": []}, {"input": None}])
async def test_nothing_to_embed_is_an_empty_answer(ask: Asking, empty: dict[str, Any]) -> None:
    assert (await ask.post(EMBED, {"model": "dense"} | empty)).ok == {"model": "dense", "embeddings": []}
    assert (await ask.post(EMBEDDINGS, {"model": "dense", "prompt": empty.get("input") or ""})).ok == {"embedding": []}


@pytest.mark.parametrize("name", ["dense:latest", "registry.ollama.ai/library/dense:latest"])
async def test_openais_route_takes_ollamas_spellings_of_a_name(ask: Asking, name: str) -> None:
    one, two = [(await ask.post("/v1/embeddings", {"model": each, "input": TEXTS})).ok for each in ("dense", name)]
    assert one["data"] == two["data"]
    assert (await ask.post("/v1/embeddings", {"model": "nope:latest", "input": TEXTS})).status == 404


@pytest.mark.parametrize("name", ["dense", "dense:latest", "library/dense", "registry.ollama.ai/library/dense:latest"])
async def test_a_name_may_be_written_as_ollama_writes_it(ask: Asking, name: str) -> None:
    assert (await ask.post(EMBED, {"model": name, "input": "fog"})).ok["model"] == name
    assert (await ask.post("/api/show", {"model": name})).ok["capabilities"] == ["embedding"]


async def test_dimensions_and_truncation_are_honoured(ask: Asking) -> None:
    short = (await ask.post(EMBED, {"model": "dense", "input": TEXTS, "dimensions": 8})).ok
    assert np.allclose(short["embeddings"], await ask.vectors("dense", TEXTS, dimensions=8), atol=1e-6)
    cut = (await ask.post(EMBED, {"model": "dense", "input": LONG})).ok
    assert cut["prompt_eval_count"] == 96
    fewer = (await ask.post(EMBED, {"model": "dense", "input": LONG, "options": {"num_ctx": 10}})).ok
    assert fewer["prompt_eval_count"] == 10
    for path, body in (
        (EMBED, {"input": LONG, "truncate": False}),
        (EMBED, {"input": ["fog", LONG], "truncate": False}),
        (EMBED, {"input": ["fog", "rain " * 20], "truncate": False, "options": {"num_ctx": 10}}),
        (EMBEDDINGS, {"prompt": LONG}),
    ):
        refused = await ask.post(path, {"model": "dense", **body})
        assert refused.status == 400, refused
        assert refused.json["error"].startswith("the input length exceeds the context length"), refused


async def test_options_have_no_effect_or_are_refused_by_name(ask: Asking) -> None:
    plain = (await ask.post(EMBED, {"model": "dense", "input": "fog"})).ok["embeddings"]
    sampling = {"temperature": 0.2, "mirostat": None, "num_gpu": 1, "num_ctx": 4096, "stop": ["x"], "seed": 7}
    assert (await ask.post(EMBED, {"model": "dense", "input": "fog", "options": sampling})).ok["embeddings"] == plain
    for options, words in (
        ({"rope_frequency_base": 1e6}, "options.rope_frequency_base: is not supported"),
        ({"num_ctx": "many"}, 'option "num_ctx" must be of type integer'),
        ({"num_ctx": 0}, "options.num_ctx: must be at least 1"),
    ):
        refused = await ask.post(EMBED, {"model": "dense", "input": "fog", "options": options})
        assert (refused.status, refused.json) == (400, {"error": words})


@pytest.mark.parametrize("keep_alive", [0, -1, 300, 0.5, "5m", "1h30m", "-1s", "0", "1.5h", None])
async def test_keep_alive_is_a_number_or_a_duration(ask: Asking, keep_alive: Any) -> None:
    assert (await ask.post(EMBED, {"model": "dense", "input": "fog", "keep_alive": keep_alive})).ok


@pytest.mark.parametrize("keep_alive", [True, [], {}, "soon", "5", "-1", "", "1e3s", "9" * 60 + "h", 1e300])
async def test_another_keep_alive_is_refused(ask: Asking, keep_alive: Any) -> None:
    for path, text in ((EMBED, "input"), (EMBEDDINGS, "prompt")):
        refused = await ask.post(path, {"model": "dense", text: "fog", "keep_alive": keep_alive})
        assert refused.status == 400, refused
        assert refused.json["error"].startswith("keep_alive: "), refused


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        (EMBED, {"model": "nobody", "input": "fog"}, 404, "model 'nobody' not found"),
        (EMBEDDINGS, {"model": "nobody:7b", "prompt": "fog"}, 404, "model 'nobody:7b' not found"),
        (EMBED, {"model": "dense", "input": 7}, 400, "invalid input type"),
        (EMBED, {"model": "dense", "input": ["fog", 7]}, 400, "invalid input type"),
        (EMBED, {"model": "dense", "input": {"text": "fog"}}, 400, "invalid input type"),
        (EMBED, {"model": "dense", "input": ["fog", ""]}, 400, "`input` cannot have an empty text"),
        (EMBED, {"model": "dense", "input": "fog", "dimensions": -1}, 400, "dimensions: "),
        (EMBED, {"model": "reranker", "input": "fog"}, 400, "Model is not an embedding model"),
        (EMBEDDINGS, {"model": "dense", "input": "fog"}, 400, "input: is of /api/embed"),
        ("/api/show", {"model": "nobody"}, 404, "model 'nobody' not found"),
        ("/api/show", {}, 400, "model is required"),
        ("/api/generate", {"model": "dense", "prompt": "fog"}, 400, "the models of this server do not support g"),
        ("/api/chat", {"model": "dense", "messages": []}, 400, "the models of this server do not support chat"),
        ("/api/pull", {"model": "nobody"}, 501, "/api/pull is not supported"),
        ("/api/generate", {"model": "nobody", "keep_alive": 0}, 404, "model 'nobody' not found"),
        ("/api/generate", {"model": "dense", "prompt": "fog", "keep_alive": 0}, 400, "the models of this server do"),
        ("/api/generate", {"model": "dense", "keep_alive": False}, 400, "the models of this server do"),
        ("/api/delete", {"model": "dense"}, 405, "POST is not allowed here; allowed: DELETE"),
        ("/api/copy", {"source": "dense", "destination": "other"}, 501, "/api/copy is not supported"),
        ("/api/nothing", {}, 404, "No route /api/nothing"),
    ],
)
async def test_refusals_are_ollamas(ask: Asking, path: str, body: Any, status: int, words: str) -> None:
    told = await ask.post(path, body)
    assert (told.status, list(told.json)) == (status, ["error"]), told
    assert told.json["error"].startswith(words), told


async def test_a_body_needs_no_content_type(ask: Asking) -> None:
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert (await ask.post(EMBED, {"model": "dense", "input": "fog"}, **form)).ok
    for path in (EMBED, EMBEDDINGS, "/api/show"):
        empty = await ask.post(path, b"", **form)
        assert (empty.status, empty.json) == (400, {"error": "missing request body"})


async def test_the_lists_have_what_embeds(ask: Asking) -> None:
    tags = (await ask.get("/api/tags")).ok["models"]
    names = [each["name"] for each in tags]
    assert {"dense:latest", "m3:latest", "text-embedding-3-small:latest"} <= set(names)
    assert not {"reranker:latest", "classifier:latest", "splade:latest", "dead:latest"} & set(names)
    running = (await ask.get("/api/ps")).ok["models"]
    assert {each["model"] for each in running} == {
        f"{name}:latest" for name in ("chat", "clap", "clip", "dense", "dinov2", "m3", "naflex")
    }
    for each in tags + running:
        assert each["name"] == each["model"]
        assert len(each["digest"]) == 64
    shown = (await ask.post("/api/show", {"name": "dense"})).ok
    assert shown["model_info"]["teimgr.context_length"] == 96
    assert (await ask.get("/api/version")).ok["version"] == "0.33.0"


async def test_ollamas_own_port_is_for_inference_alone(ask: Asking) -> None:
    port = ask.daemon.settings["ollama_port"]
    home = await ask.get("/", port)
    assert (home.status, home.body) == (200, b"Ollama is running")
    assert (await ask.get("/api/tags", port)).ok == (await ask.get("/api/tags")).ok
    assert (await ask.get("/v1/models", port)).ok["data"]
    for path in ("/instances", "/metrics", "/ui/fleet", "/openapi.json"):
        assert (await ask.get(path, port)).status == 404
    assert (await ask.get("/")).body != home.body


async def test_odd_bodies_are_refused_with_a_reason(ask: Asking) -> None:
    for body, words in (
        (b"[]", "Say which model"),
        (b'"fog"', "Say which model"),
        (b'{"model": "dense", "input": "fog"', "The body is not valid JSON"),
        (b'{"model": "dense", "input": "fog \\ud83d"}', "input: the text is "),
        (b'{"model": "dense", "input": ["fog", "\\udc00"]}', "input.1: the text is "),
        (b'{"model": "dense", "input": "fog", "truncate": "no"}', "truncate: "),
        (b'{"model": "dense", "input": "fog", "options": []}', "options: "),
        (b'{"model": "dense", "input": "fog", "options": {"' + b"x" * 9000 + b'": 1}}', "options.x"),
        (b'{"model": "dense", "input": "fog", "dimensions": 99999}', "dimensions"),
        (b'{"model": "dense", "input": "fog", "keep_alive": ' + b"9" * 400 + b"}", ""),
        (b'{"model": "dense", "input": [' + b'"a",' * 10_000 + b'"a"]}', "batch size"),
        (b'{"model": "dense", "input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ""),
    ):
        told = await ask.post(EMBED, body)
        assert (told.status, list(told.json)) == (400, ["error"]), (body[:80], told)
        assert words in told.json["error"], (body[:80], told)
        assert len(told.body) < 2000
    large = await ask.post(EMBED, b'{"model": "dense", "input": "' + b"a" * (5 * 2**20) + b'"}')
    assert (large.status, list(large.json)) == (413, ["error"])


async def test_of_two_equal_keys_one_model_answers_and_is_named(ask: Asking) -> None:
    both = (b'{"model": "dense", "model": "m3", "input": "fog"}', b'{"model": "m3", "input": "fog", "model": "dense"}')
    for body in both:
        told = (await ask.post(EMBED, body)).ok
        assert told["embeddings"], told


async def test_what_is_here_is_pulled_and_what_is_asked_to_go_is_acknowledged(ask: Asking) -> None:
    for stream, kind in ((False, "application/json"), (True, "application/x-ndjson")):
        pulled = await ask.post("/api/pull", {"model": "dense", "stream": stream})
        assert (pulled.ok, pulled.headers["content-type"]) == ({"status": "success"}, kind)
    for path, empty in (("/api/generate", {}), ("/api/chat", {"messages": []})):
        told = (await ask.post(path, {"model": "dense:latest", "keep_alive": 0} | empty)).ok
        assert (told["model"], told["done"], told["done_reason"]) == ("dense:latest", True, "unload")


async def test_vectors_of_another_space_are_refused(ask: Asking) -> None:
    [space] = {each["digest"] for each in (await ask.get("/api/tags")).ok["models"] if each["name"] == "dense:latest"}
    body = {"model": "dense", "input": "fog"}
    assert (await ask.post(EMBED, body | {"expect_fingerprint": space})).ok
    refused = await ask.post(EMBED, body | {"expect_fingerprint": "0" * 64})
    assert (refused.status >= 400, list(refused.json)) == (True, ["error"])
