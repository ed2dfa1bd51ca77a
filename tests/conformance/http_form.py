"""§1.1–1.4 and §1.17: routes, what a body may be, the form of failures, authentication."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.conformance.case import PORT, Http
from tests.conformance.checks import as_told, contains, holds, shaped, shortest_floats, starts
from tests.conformance.words import (
    API_KEY,
    EMPTY,
    FULL,
    LONG,
    LONG_TOKENS,
    MAX_CHARACTERS,
    NO_EMBED_ALL,
    NO_NORMALIZE,
    NO_VECTOR,
    NOT_CLASSIFIER,
    NOT_EMBEDDING,
    NOT_RERANKER,
    NOT_SPLADE,
    ORIGIN,
    PASSAGES,
    QUERY,
    TEXT,
    WIDTH,
    WITH_FLOATS,
    too_long,
    too_many,
    too_wide,
)

# What stands before the routes belongs to the port: the daemon has its own.
ALONE = (PORT,)

SIMILAR = {"inputs": {"source_sentence": "a", "sentences": ["b"]}}
RANKED = {"query": "a", "texts": ["b"]}
BODIES: dict[str, Any] = {
    "/embed": {"inputs": "a"},
    "/embed_all": {"inputs": "a"},
    "/embed_sparse": {"inputs": "a"},
    "/predict": {"inputs": "a"},
    "/rerank": RANKED,
    "/similarity": SIMILAR,
    "/tokenize": {"inputs": "a"},
    "/decode": {"ids": [5]},
    "/v1/embeddings": {"input": "a"},
    "/embeddings": {"input": "a"},
    "/vertex": {"instances": [{"inputs": "a"}]},
    "/": {"inputs": "a"},
    "/invocations": {"inputs": "a"},
}
ON_OPENAI = ("/v1/embeddings", "/embeddings")


def refused(clause: str, instance: str, path: str, body: Any, status: int, error: str, kind: str) -> Http:
    """A failure in TEI's words, in the form of the route."""
    told = {"message": error, "code": status, "type": kind} if path in ON_OPENAI else {"error": error}
    return Http(clause, instance, path, body, status, told if path in ON_OPENAI else told | {"error_type": kind})


def invalid(clause: str, instance: str, path: str, body: Any, error: str) -> Http:
    return refused(clause, instance, path, body, 422, error, "Validation")


def empty(clause: str, instance: str, path: str, body: Any, error: str = EMPTY) -> Http:
    return refused(clause, instance, path, body, 400, error, "Empty")


def wrong_kind(clause: str, instance: str, path: str, body: Any, error: str) -> Http:
    return refused(clause, instance, path, body, 424, error, "Backend")


def routes() -> Iterator[Http]:
    """§1.1"""
    for path in ("/", "/health", "/ping"):
        yield Http("1.1 public routes", "embedding", path, verb="GET", answer=b"", surfaces=ALONE)
    for path in ("/", "/health", "/ping", "/metrics", "/info", "/docs/", "/api-doc/openapi.json"):
        yield Http("1.1 GET routes answer HEAD", "embedding", path, verb="HEAD", answer=b"", surfaces=ALONE)
    for verb, path in (("GET", "/embed"), ("POST", "/info"), ("PUT", "/"), ("DELETE", "/embed"), ("GET", "/vertex")):
        yield Http("1.1 wrong method", "embedding", path, verb=verb, status=405, answer=b"", surfaces=ALONE)
    for verb, path in (("GET", "/no"), ("POST", "/embed/"), ("POST", "/v1/rerank"), ("GET", "/v1/models")):
        yield Http("1.1 unknown path", "embedding", path, verb=verb, status=404, answer=b"", surfaces=ALONE)
    for instance, path, body in (
        ("embedding", "/embed", {"inputs": TEXT}),
        ("m3", "/embed", {"inputs": TEXT}),
        ("static", "/embed", {"inputs": TEXT}),
        ("sparse", "/embed_sparse", {"inputs": TEXT}),
        ("multi-vector", "/embed_all", {"inputs": TEXT}),
        ("classifier", "/predict", {"inputs": TEXT}),
        ("reranker", "/rerank", {"query": QUERY, "texts": PASSAGES}),
    ):
        for default in ("/", "/invocations"):
            yield Http("1.1 default task", instance, default, body, answer=as_told(path, body))
    document = holds(
        lambda told: (
            told["openapi"] == "3.0.3"
            and set(told["paths"]) >= {"/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity"}
            and set(told["paths"]) >= {"/tokenize", "/decode", "/v1/embeddings", "/info", "/health", "/metrics"}
            and set(told["components"]["schemas"]["ErrorType"]["enum"])
            >= {"Unhealthy", "Backend", "Overloaded", "Validation", "Tokenizer", "Empty"}
        )
    )
    clause = "1.1 OpenAPI document and page"
    yield Http(clause, "embedding", "/api-doc/openapi.json", verb="GET", answer=document, surfaces=ALONE)
    yield Http(clause, "embedding", "/docs/", verb="GET", answer=contains("/embed_sparse"), surfaces=ALONE)


def bodies() -> Iterator[Http]:
    """§1.2"""
    start, end = b'{"inputs": "', b'"}'
    fits = start + b"a " * ((2_000_000 - len(start) - len(end)) // 2) + end
    assert len(fits) == 2_000_000
    over = "Failed to buffer the request body: length limit exceeded"
    yield Http("1.2 body limit", "embedding", "/embed", fits, answer=shaped(1, WIDTH), surfaces=ALONE)
    for path in ("/embed", "/tokenize", "/v1/embeddings", "/vertex", "/"):
        yield Http("1.2 body limit", "embedding", path, fits + b" ", status=413, answer=over, surfaces=ALONE)
    small = b'{"inputs": "' + b"a" * 20_000 + b'"}'
    yield Http("1.2 body limit", "strict", "/embed", small, status=413, answer=over, surfaces=ALONE)
    for path, body in BODIES.items():
        said = "Expected request with `Content-Type: application/json`"
        for kind in ("text/plain", "application/x-www-form-urlencoded"):
            header = {"content-type": kind}
            yield Http("1.2 content type", "embedding", path, body, 415, said, headers=header)
        broken = starts("Failed to parse the request body as JSON: ")
        yield Http("1.2 broken JSON", "embedding", path, b'{"inputs"', 400, broken)
        shape = starts("Failed to deserialize the JSON body into the target type: ")
        for wrong in ({}, [], 5):
            yield Http("1.2 wrong shape", "embedding", path, wrong, 422, shape)
    for kind in ("application/json; charset=utf-8", "application/vnd.some+json", "Application/JSON"):
        header = {"content-type": kind}
        yield Http("1.2 content type", "embedding", "/embed", {"inputs": "a"}, 200, shaped(1, WIDTH), headers=header)
    yield Http("1.2 broken JSON", "embedding", "/embed", b'{"inputs": "\xff"}', 400, broken)
    for path, instance, more in (
        ("/embed", "embedding", {"parameters": {}, "options": {"wait_for_model": True}}),
        ("/predict", "classifier", {"parameters": {"top_k": 1}}),
        ("/rerank", "reranker", {"top_n": 1}),
        ("/similarity", "embedding", {"parameters": {"other": 1}}),
        ("/v1/embeddings", "embedding", {"extra_body": 1}),
    ):
        same = as_told(path, BODIES[path])
        yield Http("1.2 unknown fields", instance, path, BODIES[path] | more, answer=same)
    yield from nulls()
    for ids in ([-1], [1.5], [2**32], [1.0], [True]):
        yield Http("1.2 numbers", "embedding", "/embed", {"inputs": ids}, 422, shape)
        yield Http("1.2 numbers", "embedding", "/decode", {"ids": ids}, 422, shape)
    for dimensions in (-1, 1.5, "8", 2**64):
        yield Http("1.2 numbers", "embedding", "/embed", {"inputs": "a", "dimensions": dimensions}, 422, shape)
    for instance, path, body in WITH_FLOATS:
        yield Http("1.2 floats", instance, path, body, answer=shortest_floats)


def nulls() -> Iterator[Http]:
    """§1.2: fields that take null, and all the others."""
    broken = starts("Failed to parse the request body as JSON: ")
    shape = starts("Failed to deserialize the JSON body into the target type: ")
    taken: tuple[tuple[str, str, dict[str, Any]], ...] = (
        ("/embed", "embedding", {"truncate": None, "prompt_name": None, "dimensions": None}),
        ("/embed_all", "embedding", {"truncate": None, "prompt_name": None}),
        ("/embed_sparse", "sparse", {"truncate": None, "prompt_name": None}),
        ("/predict", "classifier", {"truncate": None}),
        ("/rerank", "reranker", {"truncate": None}),
        ("/similarity", "embedding", {"parameters": None}),
        ("/similarity", "embedding", {"parameters": {"truncate": None, "prompt_name": None}}),
        ("/tokenize", "embedding", {"prompt_name": None}),
        ("/v1/embeddings", "embedding", {"model": None, "user": None, "dimensions": None}),
    )
    for path, instance, more in taken:
        yield Http("1.2 null", instance, path, BODIES[path] | more, answer=as_told(path, BODIES[path]))
    refusing: tuple[tuple[str, str, str], ...] = (
        ("/embed", "embedding", "inputs"),
        ("/embed", "embedding", "normalize"),
        ("/embed", "embedding", "truncation_direction"),
        ("/predict", "classifier", "raw_scores"),
        ("/rerank", "reranker", "query"),
        ("/rerank", "reranker", "raw_scores"),
        ("/rerank", "reranker", "return_text"),
        ("/tokenize", "embedding", "add_special_tokens"),
        ("/decode", "embedding", "skip_special_tokens"),
        ("/v1/embeddings", "embedding", "encoding_format"),
    )
    for path, instance, name in refusing:
        # To TEI's parser a name that is not a string is a fault of syntax.
        status, words = (400, broken) if name in ("truncation_direction", "encoding_format") else (422, shape)
        yield Http("1.2 null", instance, path, BODIES[path] | {name: None}, status, words)


def faults() -> Iterator[Http]:
    """§1.3 and §1.4: the exact words."""
    yield empty("1.3 error body", "embedding", "/embed", {"inputs": ""})
    for path in ON_OPENAI:
        yield empty("1.3 error body of the OpenAI routes", "embedding", path, {"input": ""})
        body = {"input": "a", "dimensions": 0}
        error = "Input validation error: `dimensions` should be positive"
        yield invalid("1.3 error body of the OpenAI routes", "embedding", path, body, error)
    yield from nothing()
    for path, name, instance in (
        ("/embed", "inputs", "embedding"),
        ("/embed_all", "inputs", "embedding"),
        ("/embed_sparse", "inputs", "sparse"),
        ("/tokenize", "inputs", "embedding"),
    ):
        yield invalid("1.4 too many inputs", instance, path, {name: ["a"] * 33}, too_many(33))
    yield invalid("1.4 too many inputs", "embedding", "/decode", {"ids": [[5]] * 33}, too_many(33))
    yield invalid("1.4 too many inputs", "classifier", "/predict", {"inputs": [["a"]] * 33}, too_many(33))
    yield invalid("1.4 too many inputs", "reranker", "/rerank", {"query": "a", "texts": ["b"] * 33}, too_many(33))
    body: Any = {"inputs": {"source_sentence": "a", "sentences": ["b"] * 32}}
    yield invalid("1.4 too many inputs", "embedding", "/similarity", body, too_many(33))
    yield invalid("1.4 too many inputs", "embedding", "/v1/embeddings", {"input": ["a"] * 2049}, too_many(2049, 2048))
    yield invalid("1.4 too many inputs", "strict", "/embed", {"inputs": ["a"] * 5}, too_many(5, 4))
    yield Http("1.4 too many inputs", "embedding", "/embed", {"inputs": ["a"] * 32}, answer=shaped(32, WIDTH))
    yield from lengths()
    clause = "1.4 prompt of a model without prompts"
    none = (
        "`default-prompt-name` is set to `query` but no prompts were found in the Sentence Transformers configuration"
    )
    for instance, path in (("cls", "/embed"), ("cls", "/embed_all"), ("sparse", "/embed_sparse"), ("cls", "/tokenize")):
        body = {"inputs": "a", "prompt_name": "query"}
        yield invalid(clause, instance, path, body, f"Input validation error: {none}")
    unknown = (
        "Input validation error: `default-prompt-name` is set to `passage` but it was not found in the Sentence "
        'Transformers prompts. Available prompts: ["query"]'
    )
    for path in ("/embed", "/embed_all", "/tokenize"):
        body = {"inputs": "a", "prompt_name": "passage"}
        yield invalid("1.4 unknown prompt", "embedding", path, body, unknown)
    body = SIMILAR | {"parameters": {"prompt_name": "passage"}}
    yield invalid("1.4 unknown prompt", "embedding", "/similarity", body, unknown)
    positive = "Input validation error: `dimensions` should be positive"
    smaller = "Input validation error: `dimensions` should be smaller than the maximum embedding dimension."
    for dimensions, error in ((0, positive), (WIDTH + 1, smaller)):
        body = {"inputs": "a", "dimensions": dimensions}
        yield invalid("1.4 dimensions", "embedding", "/embed", body, error)
        body = {"input": "a", "dimensions": dimensions}
        yield invalid("1.4 dimensions", "embedding", "/v1/embeddings", body, error)
    body = {"inputs": "a", "dimensions": WIDTH}
    yield Http("1.4 dimensions", "embedding", "/embed", body, answer=shaped(1, WIDTH, unit=True))


def nothing() -> Iterator[Http]:
    """§1.4: the rows of `Empty`."""
    for instance, path in (("embedding", "/embed"), ("embedding", "/embed_all"), ("sparse", "/embed_sparse")):
        yield empty("1.4 empty text", instance, path, {"inputs": ""})
        yield empty("1.4 empty text", instance, path, {"inputs": ["fog", ""]})
        yield empty("1.4 empty list", instance, path, {"inputs": []})
        yield empty("1.4 empty ids", instance, path, {"inputs": [[]]})
        yield empty("1.4 empty ids", instance, path, {"inputs": ["fog", []]})
    for path in ON_OPENAI:
        for nought in ("", []):
            yield empty("1.4 empty list" if nought == [] else "1.4 empty text", "embedding", path, {"input": nought})
    yield empty("1.4 empty text", "classifier", "/predict", {"inputs": ""})
    yield empty("1.4 empty pair", "classifier", "/predict", {"inputs": ["", ""]})
    yield empty("1.4 empty pair", "classifier", "/predict", {"inputs": [["a"], ["", ""]]})
    yield empty("1.4 empty pair", "reranker", "/rerank", {"query": "", "texts": ["b", ""]})
    yield empty("1.4 tokenize nothing", "embedding", "/tokenize", {"inputs": []}, "`inputs` cannot be empty")
    yield empty("1.4 tokenize nothing", "embedding", "/tokenize", {"inputs": ""})
    body: Any = {"query": "a", "texts": []}
    yield empty("1.4 rerank nothing", "reranker", "/rerank", body, "`texts` cannot be empty")
    body = {"inputs": {"source_sentence": "a", "sentences": []}}
    yield empty("1.4 similarity of nothing", "embedding", "/similarity", body, "`inputs.sentences` cannot be empty")
    for ids in ([], [[]], [[5], []]):
        error = "Input validation error: `input_ids` cannot be empty"
        yield empty("1.4 decode nothing", "embedding", "/decode", {"ids": ids}, error)


def lengths() -> Iterator[Http]:
    """§1.4: the longest that is taken, and one more."""
    one_more = FULL + "a"
    for path, instance in (("/embed", "embedding"), ("/embed_all", "embedding"), ("/embed_sparse", "sparse")):
        body: Any = {"inputs": one_more, "truncate": False}
        yield invalid("1.4 too many tokens", instance, path, body, too_long(97))
        body = {"inputs": ["fog", LONG], "truncate": False}
        yield invalid("1.4 too many tokens", instance, path, body, too_long(LONG_TOKENS))
        body = {"inputs": FULL, "truncate": False}
        yield Http("1.4 exactly the most tokens", instance, path, body, told={"x-compute-tokens": "96"})
    body = {"inputs": LONG, "truncate": False}
    yield invalid("1.4 too many tokens", "classifier", "/predict", body, too_long(LONG_TOKENS))
    body = {"query": "fog", "texts": ["fog", LONG], "truncate": False}
    yield Http("1.4 too many tokens", "reranker", "/rerank", body, 422, contains("must have less than 96 tokens"))
    body = {**SIMILAR, "inputs": {"source_sentence": "a", "sentences": [LONG]}, "parameters": {"truncate": False}}
    yield invalid("1.4 too many tokens", "embedding", "/similarity", body, too_long(LONG_TOKENS))
    yield invalid("1.4 too many tokens", "strict", "/embed", {"inputs": LONG}, too_long(LONG_TOKENS))
    yield invalid("1.4 too many tokens", "strict", "/v1/embeddings", {"input": LONG}, too_long(LONG_TOKENS))
    clause = "1.4 too many characters"
    for path in ("/embed", "/embed_all", "/tokenize"):
        body = {"inputs": "a" * (MAX_CHARACTERS + 1), "truncate": False}
        yield invalid(clause, "embedding", path, body, too_wide(MAX_CHARACTERS + 1))
    body = {"inputs": "é" * (MAX_CHARACTERS + 1), "truncate": False}
    yield invalid(clause, "embedding", "/embed", body, too_wide(MAX_CHARACTERS + 1))
    body = {"inputs": "a " * (MAX_CHARACTERS // 2), "truncate": False}
    yield invalid(clause, "embedding", "/embed", body, too_long(MAX_CHARACTERS // 2 + 2))
    body = {"inputs": "a" * (MAX_CHARACTERS + 1), "truncate": True}
    yield Http(clause, "embedding", "/embed", body, answer=shaped(1, WIDTH))


# What a route says to a kind that it is not for; None where it serves.
EMBEDDINGS = ("embedding", "m3", "static", "decoder")
SCORERS = ("classifier", "reranker")
WRONG: dict[str, dict[str, str]] = {
    "/embed": {**dict.fromkeys(SCORERS, NOT_EMBEDDING), "sparse": NO_NORMALIZE, "multi-vector": NO_VECTOR},
    "/embed_all": {**dict.fromkeys(SCORERS, NOT_EMBEDDING), "sparse": NO_EMBED_ALL},
    "/similarity": {**dict.fromkeys(SCORERS, NOT_EMBEDDING), "multi-vector": NO_VECTOR},
    "/v1/embeddings": {**dict.fromkeys(SCORERS, NOT_EMBEDDING), "sparse": NO_NORMALIZE, "multi-vector": NO_VECTOR},
    "/embeddings": {**dict.fromkeys(SCORERS, NOT_EMBEDDING), "sparse": NO_NORMALIZE, "multi-vector": NO_VECTOR},
    "/embed_sparse": dict.fromkeys((*SCORERS, "embedding", "static", "decoder", "multi-vector"), NOT_SPLADE),
    "/predict": dict.fromkeys((*EMBEDDINGS, "sparse", "multi-vector"), NOT_CLASSIFIER),
    "/rerank": dict.fromkeys((*EMBEDDINGS, "sparse", "multi-vector", "classifier"), NOT_RERANKER),
}


def kinds() -> Iterator[Http]:
    """§1.4: routes on kinds they are not for, and which of several faults is told."""
    for path, refusals in WRONG.items():
        for instance, error in refusals.items():
            yield wrong_kind("1.4 wrong kind", instance, path, BODIES[path], error)
    clause = "1.4 order of checks"
    yield empty(clause, "embedding", "/rerank", {"query": "a", "texts": []}, "`texts` cannot be empty")
    yield wrong_kind(clause, "embedding", "/rerank", {"query": "a", "texts": ["b"] * 33}, NOT_RERANKER)
    yield wrong_kind(clause, "classifier", "/embed", {"inputs": []}, NOT_EMBEDDING)  # one input, of no ids
    yield invalid(clause, "classifier", "/embed", {"inputs": ["b"] * 33}, too_many(33))
    yield wrong_kind(clause, "classifier", "/embed", {"inputs": ""}, NOT_EMBEDDING)
    body: Any = {"inputs": {"source_sentence": "a", "sentences": []}}
    yield empty(clause, "classifier", "/similarity", body, "`inputs.sentences` cannot be empty")
    body = {"inputs": {"source_sentence": "a", "sentences": ["b"] * 32}}
    yield invalid(clause, "classifier", "/similarity", body, too_many(33))
    clause = "1.4 lowest index"
    body = {"inputs": ["fog", LONG, ""], "truncate": False}
    yield invalid(clause, "embedding", "/embed", body, too_long(LONG_TOKENS))
    body = {"inputs": ["fog", "", LONG], "truncate": False}
    yield empty(clause, "embedding", "/embed", body)
    body = {"inputs": [["fog"], ["", ""], [LONG]], "truncate": False}
    yield empty(clause, "classifier", "/predict", body)


def guards() -> Iterator[Http]:
    """§1.17"""
    right = {"authorization": f"Bearer {API_KEY}"}
    wrong = ({}, *({"authorization": text} for text in (API_KEY, "Bearer", "Bearer no", f"bearer {API_KEY}")))
    clause = "1.17 API key"
    for verb, path in (("POST", "/embed"), ("POST", "/"), ("POST", "/vertex"), ("POST", "/tokenize"), ("GET", "/info")):
        body = None if verb == "GET" else BODIES[path]
        for headers in wrong:
            closed: dict[str, Any] = {"headers": headers, "told": {"www-authenticate": None}, "surfaces": ALONE}
            yield Http(clause, "locked", path, body, 401, b"", verb, **closed)
        yield Http(clause, "locked", path, body, verb=verb, headers=right, surfaces=ALONE)
    for path in ("/", "/health", "/ping", "/metrics", "/docs/", "/api-doc/openapi.json"):
        yield Http(clause, "locked", path, verb="GET", surfaces=ALONE)
    yield Http(clause, "locked", "/docs", verb="GET", status=303, answer=b"", surfaces=ALONE)
    clause = "1.17 CORS"
    asks = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    told = {"access-control-allow-methods": "GET,POST", "access-control-allow-headers": "content-type"}
    every, only = {"access-control-allow-origin": "*"}, {"access-control-allow-origin": ORIGIN}
    none = {"access-control-allow-origin": None}
    for path in ("/embed", "/info"):
        for instance, allowed in (("embedding", every), ("locked", only)):
            known: dict[str, Any] = {"headers": asks, "told": told | allowed, "surfaces": ALONE}
            yield Http(clause, instance, path, None, 200, b"", "OPTIONS", **known)
    stranger = asks | {"origin": "https://other.example"}
    yield Http(clause, "locked", "/embed", None, 200, b"", "OPTIONS", stranger, none, ALONE)
    yield Http(clause, "locked", "/health", verb="GET", headers={"origin": ORIGIN}, told=only, surfaces=ALONE)
    yield Http(clause, "locked", "/health", verb="GET", headers={"origin": "x"}, told=none, surfaces=ALONE)
    yield Http(clause, "embedding", "/embed", {"inputs": "a"}, told=every, surfaces=ALONE)


def cases() -> Iterator[Http]:
    for table in (routes, bodies, faults, kinds, guards):
        yield from table()
