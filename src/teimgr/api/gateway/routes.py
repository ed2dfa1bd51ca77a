"""The inference routes with their dialects, and their OpenAPI for the daemon's document.

If several products share a path, the first dialect is the default. The header `x-teimgr-dialect` or a path prefix
(`/infinity/classify`) selects another one. Requests and schemas come from `openapi.json`, which
`worker/dialects/openapi.py` generates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from teimgr.spec import Kind
from teimgr.wire.error_bodies import (
    COHERE,
    INFINITY,
    JINA,
    OLLAMA,
    OPENAI,
    SIE,
    TEI,
    TEI_OPENAI,
    VLLM,
    VOYAGE,
    WEAVIATE,
)

if TYPE_CHECKING:
    from fastapi import FastAPI

DIALECT_HEADER = "x-teimgr-dialect"


class DialectPath(NamedTuple):
    """A POST route: `path` is Starlette's template, `inner` the path in the worker.

    `{model}` or `{name}` in the template is the model or instance; otherwise the body names it. `others` are the
    dialects that can be selected instead of `dialect`.
    """

    path: str
    dialect: str
    inner: str
    others: tuple[str, ...] = ()


PREFIXED = (JINA, VLLM, INFINITY, VOYAGE, COHERE)
"""Dialects whose paths also exist under `/<dialect>`, for clients that configure a base URL."""

MODEL_LISTS = ("/v1/models", "/infinity/models", *(f"/{dialect}/v1/models" for dialect in PREFIXED))
MODEL_CARDS = tuple(f"{path}/{{model:path}}" for path in MODEL_LISTS if path.endswith("/v1/models"))

OLLAMA_TAGS, OLLAMA_RUNNING, OLLAMA_VERSION, OLLAMA_SHOW = "/api/tags", "/api/ps", "/api/version", "/api/show"
# Weaviate's requests name no model, so the path may name an instance.
WEAVIATE_BASES = ("/weaviate", "/weaviate/{name}")


def dialect_of(path: str) -> str | None:
    """Return the dialect whose clients call such paths, even if the route does not exist; None for teimgr's own
    paths."""
    first = path[1:].partition("/")[0]
    if first in PREFIXED or first == WEAVIATE:
        return first
    if path.startswith("/api/"):
        return OLLAMA
    return OPENAI if path.startswith(("/v1/", "/v2/")) else None


OLLAMA_EMBEDDING = ("/api/embed", "/api/embeddings")
_DIALECTS_OF_PATH: dict[str, tuple[str, ...]] = {
    "/v1/embeddings": (OPENAI, JINA, VLLM, VOYAGE, INFINITY),
    "/v1/multimodalembeddings": (VOYAGE,),
    "/v1/embed": (COHERE,),
    "/v2/embed": (COHERE,),
    "/v1/rerank": (COHERE, JINA, VLLM, VOYAGE, INFINITY),
    "/v2/rerank": (COHERE, VLLM),
    "/rerank": (INFINITY, VLLM),
    **dict.fromkeys(("/embeddings", "/embeddings_image", "/embeddings_audio"), (INFINITY,)),
    "/classify": (VLLM, INFINITY),
    "/v1/classify": (COHERE, INFINITY),
    "/v1/tokenize": (COHERE,),
    "/v1/detokenize": (COHERE,),
    "/tokenize": (VLLM,),
    "/detokenize": (VLLM,),
    "/pooling": (VLLM,),
    "/score": (VLLM,),
    "/v1/score": (VLLM,),
    **dict.fromkeys(OLLAMA_EMBEDDING, (OLLAMA,)),
}
_DENSE = (Kind.EMBEDDING.value,)
_EMBEDDING, _RERANKING = (Kind.EMBEDDING.value, Kind.MULTI_VECTOR.value), (Kind.RERANKER.value,)
_KINDS_OF_PATH: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("/v1/embeddings", "/v1/embed", "/v2/embed", "/embeddings"), _EMBEDDING),
    **dict.fromkeys(("/embeddings_image", "/embeddings_audio"), _EMBEDDING),
    **dict.fromkeys((*OLLAMA_EMBEDDING, "/v1/multimodalembeddings"), _DENSE),
    "/vectors": _DENSE,
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), _RERANKING),
    **dict.fromkeys(("/classify", "/v1/classify"), (Kind.CLASSIFIER.value, Kind.RERANKER.value)),
    **dict.fromkeys(("/score", "/v1/score"), (*_RERANKING, *_EMBEDDING, Kind.SPARSE.value)),
}


def kinds_of(inner: str) -> tuple[str, ...]:
    """Return what an instance must serve to get a request without a model, in order of preference; empty: anything."""
    return _KINDS_OF_PATH.get(inner, ())


_INSTANCE = "/instances/{name}"
_TEI = (
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity", "/tokenize", "/decode"),
    *("/vertex", "/invocations", "/"),
)


INFO = DialectPath(_INSTANCE + "/info", TEI, "/info")
"""The only GET route answered by a worker; it is not inference."""


class InferenceCall(NamedTuple):
    """A parsed target: route, the `name` or `model` in its path, and query."""

    path: DialectPath
    named: Mapping[str, str] = MappingProxyType({})
    query: str = ""


def paths() -> Iterator[DialectPath]:
    """Yield every route: shared paths, dialect-prefixed paths, Weaviate, SIE, TEI under /instances/{name}."""
    for path, (first, *others) in _DIALECTS_OF_PATH.items():
        yield DialectPath(path, first, path, others=tuple(others))
        for dialect in (first, *others):
            if dialect in PREFIXED:
                yield DialectPath(f"/{dialect}{path}", dialect, path)
    for below in WEAVIATE_BASES:
        for path, inner in (("/vectors", "/vectors"), ("/vectors/", "/vectors"), ("/rerank", "/rerank")):
            yield DialectPath(below + path, WEAVIATE, inner)
    for inner in ("/v1/encode", "/v1/score", "/v1/extract"):
        yield DialectPath(inner + "/{model:path}", SIE, inner)
    for inner in _TEI:
        yield DialectPath(_INSTANCE + inner, TEI, inner)
    yield DialectPath(_INSTANCE, TEI, "/")
    for inner in ("/v1/embeddings", "/embeddings"):
        yield DialectPath(_INSTANCE + inner, TEI_OPENAI, inner)


_TAG = "inference"
_NOTES = {
    "400": "invalid request, or not supported by the model",
    "404": "unknown name; the text lists similar ones",
    "413": "the body is over the limit",
    "415": "another content type",
    "422": "invalid request (TEI)",
    "424": "inference failed, or not supported by the model (TEI)",
    "429": "too many requests; Retry-After is set",
    "503": "the instance does not run; Retry-After is set",
}


def describe(app: FastAPI) -> None:
    own = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = own()
            for path, operations in _paths().items():
                document["paths"].setdefault(path, {}).update(operations)
            document.setdefault("components", {}).setdefault("schemas", {}).update(_file()["schemas"])
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


@cache
def _file() -> dict[str, Any]:
    text = files("teimgr.api.gateway").joinpath("openapi.json").read_bytes()
    document: dict[str, Any] = orjson.loads(text)
    return document


def _paths() -> dict[str, Any]:
    ok = {"200": {"description": "OK", "content": _json({"type": "object"})}}
    not_found = {"404": _failure("unknown name")}
    paths_of: dict[str, Any] = {}
    for path in MODEL_LISTS:
        prefix = path.removesuffix("/v1/models")
        paths_of[path] = _get("Names for the `model` of a request", ok, suffix=prefix)
        if path + "/{model:path}" in MODEL_CARDS:
            unknown = not_found | ({"400": _failure("unknown name")} if prefix else {})
            paths_of[path + "/{model}"] = _get("One of them", ok | unknown, "model", suffix=prefix)
    paths_of[OLLAMA_TAGS] = _get("Ollama's list of models", ok)
    paths_of[OLLAMA_RUNNING] = _get("Ollama's list of loaded models", ok)
    paths_of[OLLAMA_VERSION] = _get("The compatible version of Ollama", ok)
    for one in paths():
        paths_of[one.path.replace(":path}", "}")] = {"post": _post(one)}
    failures = {status: _failure(_NOTES[status]) for status in ("404", "503")}
    failures["default"] = _failure("a failure")
    paths_of[INFO.path] = _get("The model and its limits, in TEI's format", ok | failures, "name")
    return paths_of


def _post(path: DialectPath) -> dict[str, Any]:
    known = _file()["operations"][path.dialect][path.inner]
    others = " or ".join(path.others)
    also = f" The header `{DIALECT_HEADER}`, or a path below `/{path.others[-1]}`, selects {others}." if others else ""
    return {
        "tags": [_TAG],
        "summary": known["summary"],
        "description": known.get("description", known["summary"] + ".") + f" In the dialect {path.dialect}.{also}",
        "operationId": f"{path.dialect}{path.path}".translate(_AS_NAME),
        "parameters": [_parameter(name) for name in ("name", "model") if f"{{{name}" in path.path],
        "requestBody": {"required": True, "content": {kind: _request(known, kind) for kind in known["types"]}},
        "responses": {
            "200": {"description": "OK", "content": {kind: {"schema": known["response"]} for kind in known["types"]}},
            **{status: _failure(note) for status, note in _NOTES.items()},
            "default": _failure("any other failure"),
        },
    }


def _request(known: dict[str, Any], kind: str) -> dict[str, Any]:
    example = {"example": known["example"]} if kind == "application/json" and "example" in known else {}
    return {"schema": known["request"]} | example


def _get(summary: str, responses: dict[str, Any], *parameters: str, suffix: str = "") -> dict[str, Any]:
    """Describe a GET; `suffix` distinguishes its operation from another one with the same summary."""
    operation = {
        "tags": [_TAG],
        "summary": summary,
        "description": summary + ".",
        "operationId": (summary + suffix).casefold().translate(_AS_NAME),
        "parameters": [_parameter(name) for name in parameters],
        "responses": responses,
    }
    return {"get": operation}


def _parameter(name: str) -> dict[str, Any]:
    meaning = "an instance" if name == "name" else "an instance, a model id or an alias"
    return {"name": name, "in": "path", "required": True, "description": meaning, "schema": {"type": "string"}}


def _failure(description: str) -> dict[str, Any]:
    """Describe a failure: the dialect's JSON, or plain text if TEI's web framework refuses the body."""
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {"description": description, "content": _json({"type": "object"}) | text}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


_AS_NAME = str.maketrans({"/": "_", "{": None, "}": None, ":": "_", " ": "_", ",": None, "`": None, "-": "_"})
