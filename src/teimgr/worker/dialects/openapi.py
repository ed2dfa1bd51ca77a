"""OpenAPI: the document of an instance's port, and the dialects' part of the daemon's document.

Request classes are the schemas. The daemon does not import a worker's modules, so it reads its part from
`api/gateway/openapi.json`, which `python -m teimgr.worker.dialects.openapi` prints; a test checks that the file is up
to date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Annotated, Any, NamedTuple

import orjson
from pydantic import BaseModel, RootModel, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from teimgr import __version__
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
from teimgr.wire.status import STATUS
from teimgr.worker.dialects import cohere, infinity, ollama, openai, rerank, sie, tei, tokens, vllm, voyage, weaviate

_TAG = "Text Embeddings Inference"

_TEXTS = ["What is deep learning?", "A harbour in the fog"]
_EMBED = {"model": "mini", "input": _TEXTS}
_RANK = {"model": "reranker", "query": "What is deep learning?", "documents": _TEXTS, "top_n": 1}
_CLASSIFY = {"model": "classifier", "input": _TEXTS}
_COHERE_EMBED = {"model": "mini", "texts": _TEXTS, "input_type": "search_document", "embedding_types": ["float"]}
_SCORE = {"model": "reranker", "text_1": "What is deep learning?", "text_2": _TEXTS}
_ITEMS = [{"id": "1", "text": "What is deep learning?"}]
_IDS = [101, 102]

# An image of one pixel, and a sound of 32 samples.
_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAA"
    "AABJRU5ErkJggg=="
)
_SILENCE = (
    "data:audio/wav;base64,UklGRmQAAABXQVZFZm10IBAAAAABAAEAQB8AAIA+AAACABAAZGF0YUAAAAAAAAAAAAAAAAAAAAAAAAAA"
    "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"
)

# A request for each POST route of inference; a test sends them to a daemon. The models are `mini` (dense vectors),
# `splade`, `reranker`, `classifier`, `clip` and `clap`.
EXAMPLES: Mapping[tuple[str, str], dict[str, Any]] = {
    (OPENAI, "/v1/embeddings"): _EMBED,
    (JINA, "/v1/embeddings"): _EMBED | {"task": "retrieval.passage", "normalized": True},
    (VLLM, "/v1/embeddings"): _EMBED | {"truncate_prompt_tokens": -1},
    (VOYAGE, "/v1/embeddings"): _EMBED | {"input_type": "document", "output_dtype": "int8"},
    (VOYAGE, "/v1/multimodalembeddings"): {
        "model": "mini",
        "inputs": [{"content": [{"type": "text", "text": one}]} for one in _TEXTS],
        "input_type": "document",
    },
    (COHERE, "/v1/embed"): _COHERE_EMBED,
    (COHERE, "/v2/embed"): _COHERE_EMBED,
    **{(INFINITY, path): _EMBED for path in ("/embeddings", "/v1/embeddings")},
    (INFINITY, "/embeddings_image"): {"model": "clip", "input": [_PIXEL]},
    (INFINITY, "/embeddings_audio"): {"model": "clap", "input": [_SILENCE]},
    **{(COHERE, path): _RANK for path in ("/v1/rerank", "/v2/rerank")},
    **{(VLLM, path): _RANK for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
    (JINA, "/v1/rerank"): _RANK,
    **{(INFINITY, path): _RANK | {"return_documents": True} for path in ("/rerank", "/v1/rerank")},
    (VOYAGE, "/v1/rerank"): {name: value for name, value in _RANK.items() if name != "top_n"} | {"top_k": 1},
    (VLLM, "/score"): _SCORE,
    (VLLM, "/v1/score"): _SCORE,
    (VLLM, "/classify"): _CLASSIFY,
    (INFINITY, "/classify"): _CLASSIFY | {"raw_scores": False},
    (INFINITY, "/v1/classify"): _CLASSIFY,
    (COHERE, "/v1/classify"): {"model": "classifier", "inputs": _TEXTS},
    (VLLM, "/pooling"): _EMBED | {"encoding_format": "float"},
    (VLLM, "/tokenize"): {"model": "mini", "prompt": _TEXTS[0]},
    (VLLM, "/detokenize"): {"model": "mini", "tokens": _IDS},
    (COHERE, "/v1/tokenize"): {"model": "mini", "text": _TEXTS[0]},
    (COHERE, "/v1/detokenize"): {"model": "mini", "tokens": _IDS},
    (WEAVIATE, "/vectors"): {"text": _TEXTS[0], "config": {"pooling_strategy": "masked_mean", "task_type": "query"}},
    (WEAVIATE, "/rerank"): {"query": _TEXTS[0], "documents": _TEXTS},
    (OLLAMA, "/api/embed"): _EMBED | {"keep_alive": "5m"},
    (OLLAMA, "/api/embeddings"): {"model": "mini", "prompt": _TEXTS[0]},
    (SIE, "/v1/encode"): {"items": _ITEMS, "params": {"output_types": ["dense"], "output_dtype": "float32"}},
    (SIE, "/v1/score"): {"query": {"text": "What is deep learning?"}, "items": _ITEMS},
    (SIE, "/v1/extract"): {"items": _ITEMS, "params": {"options": {"threshold": 0.5}}},
    (TEI, "/embed"): {"inputs": _TEXTS, "normalize": True},
    (TEI, "/embed_all"): {"inputs": _TEXTS},
    (TEI, "/embed_sparse"): {"inputs": _TEXTS},
    (TEI, "/predict"): {"inputs": _TEXTS[0]},
    (TEI, "/rerank"): {"query": "What is deep learning?", "texts": _TEXTS},
    (TEI, "/similarity"): {"inputs": {"source_sentence": "What is deep learning?", "sentences": _TEXTS}},
    (TEI, "/tokenize"): {"inputs": _TEXTS},
    (TEI, "/decode"): {"ids": _IDS},
    (TEI, "/vertex"): {"instances": [{"inputs": _TEXTS[0]}]},
    (TEI_OPENAI, "/v1/embeddings"): {"input": _TEXTS},
}

Float = Annotated[float, WithJsonSchema({"type": "number", "format": "float"})]
ErrorType = TypeAliasType(
    "ErrorType",
    Annotated[str, WithJsonSchema({"type": "string", "enum": sorted({status.tei for status in STATUS.values()})})],
)


class ErrorResponse(BaseModel):
    """A failure."""

    error: str
    error_type: ErrorType


class OpenAICompatErrorResponse(BaseModel):
    """A failure on the OpenAI routes."""

    message: str
    code: int
    type: ErrorType


class EmbedResponse(RootModel[list[list[Float]]]):
    """A vector per input."""


class PatchGrid(BaseModel):
    """For the patches of a page, row by row, the index of the vector."""

    rows: int
    columns: int
    vectors: list[int]


class VectorsWithPatches(BaseModel):
    """The answer with `patches`: the vectors of an input, and the patches of a page image."""

    vectors: list[list[Float]]
    patches: PatchGrid | None


class EmbedAllResponse(RootModel[list[list[list[Float]]] | list[VectorsWithPatches]]):
    """A vector per token of each input; objects if `patches` is true."""


class SparseValue(BaseModel):
    """The weight of a vocabulary entry."""

    index: int
    value: Float


class EmbedSparseResponse(RootModel[list[list[SparseValue]]]):
    """The entries that are not zero, per input."""


class TeiPrediction(BaseModel):
    """A label and its score."""

    score: Float
    label: str


class PredictResponse(RootModel[list[TeiPrediction] | list[list[TeiPrediction]]]):
    """All labels, best first; a list per input if a batch was sent."""


class TeiRank(BaseModel):
    """A text, by its index in the request, and its score."""

    index: int
    text: str | None = None
    score: Float


class RerankResponse(RootModel[list[TeiRank]]):
    """All texts, best first."""


class SimilarityResponse(RootModel[list[Float]]):
    """A cosine per sentence."""


class SimpleToken(BaseModel):
    """A token; offsets are bytes of prompt + text, null for special tokens."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TokenizeResponse(RootModel[list[list[SimpleToken]]]):
    """The tokens of each text."""


class DecodeResponse(RootModel[list[str]]):
    """A text per list of ids."""


class OpenAICompatEmbedding(BaseModel):
    """One vector, as numbers or as base64 of little-endian 32-bit floats."""

    object: str
    embedding: list[Float] | str
    index: int


class OpenAICompatUsage(BaseModel):
    """Tokens, special ones included."""

    prompt_tokens: int
    total_tokens: int


class OpenAICompatResponse(BaseModel):
    """The list object."""

    object: str
    data: list[OpenAICompatEmbedding]
    model: str
    usage: OpenAICompatUsage


class EmbeddingModel(BaseModel):
    """A model of vectors."""

    pooling: str


class ClassifierModel(BaseModel):
    """A model of scores."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(BaseModel):
    """Exactly one of the three."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None


class TeiInfo(BaseModel):
    """The model and the limits; teimgr adds its own facts."""

    model_id: str
    model_sha: str | None
    model_dtype: str
    served_model_name: str
    model_type: ModelType
    max_concurrent_requests: int
    max_input_length: int
    max_batch_tokens: int
    max_batch_requests: int | None
    max_client_batch_size: int
    auto_truncate: bool
    tokenization_workers: int
    version: str
    sha: str | None
    docker_label: str | None


class VertexResponse(BaseModel):
    """The answer of each instance's own route."""

    predictions: list[Any]


class Operation(NamedTuple):
    """A POST route: request, answer and error."""

    name: str
    summary: str
    request: type[BaseModel]
    response: type[BaseModel]
    error: type[BaseModel] = ErrorResponse


TEI_OPERATIONS = {
    "/embed": Operation("embed", "Dense vectors", tei.TeiEmbedRequest, EmbedResponse),
    "/embed_all": Operation("embed_all", "A vector per token", tei.TeiEmbedAllRequest, EmbedAllResponse),
    "/embed_sparse": Operation("embed_sparse", "Sparse vectors", tei.TeiEmbedSparseRequest, EmbedSparseResponse),
    "/predict": Operation("predict", "Scores of labels", tei.TeiPredictRequest, PredictResponse),
    "/rerank": Operation("rerank", "Texts by relevance to a query", tei.TeiRerankRequest, RerankResponse),
    "/similarity": Operation(
        "similarity", "Similarity of sentences to one sentence", tei.TeiSimilarityRequest, SimilarityResponse
    ),
    "/tokenize": Operation("tokenize", "Tokens of texts", tei.TokenizeRequest, TokenizeResponse),
    "/decode": Operation("decode", "Texts of token ids", tei.DecodeRequest, DecodeResponse),
    "/v1/embeddings": Operation(
        "openai_embed",
        "Dense vectors in the OpenAI form",
        tei.OpenAICompatRequest,
        OpenAICompatResponse,
        OpenAICompatErrorResponse,
    ),
    "/vertex": Operation("vertex_compatibility", "Vertex AI's form", tei.TeiVertexRequest, VertexResponse),
}

# Status, description, and whether the body may be TEI's JSON (errors of the model or its rules) and plain text (TEI's
# web framework refuses unreadable bodies).
_FAILURES = (
    ("400", "The input is empty", True, True),
    ("413", "The body is larger than the limit", False, True),
    ("415", "The Content-Type is not JSON", False, True),
    ("422", "The body, an option or a text breaks a rule", True, True),
    ("424", "Inference failed, or the model does not do this", True, False),
    ("429", "Model is overloaded", True, False),
)
_PLAIN = {"text/plain": {"schema": {"type": "string"}}}


@cache
def instance_document() -> dict[str, Any]:
    """The document of an instance's port: OpenAPI 3.0.3 with TEI's schema names."""
    kinds: set[type[BaseModel]] = {TeiInfo, ErrorResponse}
    for operation in TEI_OPERATIONS.values():
        kinds |= {operation.request, operation.response, operation.error}
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Text Embeddings Inference",
            "description": "An instance of teimgr, with the API of Text Embeddings Inference.",
            "version": __version__,
        },
        "paths": {path: {"post": _post(path, operation)} for path, operation in TEI_OPERATIONS.items()}
        | {
            "/health": _get(
                "health",
                "Whether the model passes its self-test",
                {
                    "200": {"description": "OK"},
                    "503": {"description": "The model cannot be used", "content": _json(ErrorResponse)},
                },
            ),
            "/info": _get(
                "get_model_info", "The model and the limits", {"200": {"description": "OK", "content": _json(TeiInfo)}}
            ),
            "/metrics": _get("metrics", "Prometheus metrics", {"200": {"description": "OK", "content": _PLAIN}}),
        },
        "components": {"schemas": dict(sorted(_definitions(kinds, generator=_OpenApi30)[1].items()))},
        "tags": [{"name": _TAG}],
    }


def _post(path: str, operation: Operation) -> dict[str, Any]:
    example = EXAMPLES[TEI_OPENAI if path == "/v1/embeddings" else TEI, path]
    failures = {
        status: {
            "description": text,
            "content": (_json(operation.error) if in_json else {}) | (_PLAIN if in_plain_text else {}),
        }
        for status, text, in_json, in_plain_text in _FAILURES
    }
    return {
        "tags": [_TAG],
        "summary": operation.summary,
        "description": operation.summary + ".",
        "operationId": operation.name,
        "requestBody": {"required": True, "content": _json(operation.request, example)},
        "responses": {"200": {"description": "OK", "content": _json(operation.response)}, **failures},
    }


def _get(name: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    operation = {"tags": [_TAG], "summary": summary, "description": summary + "."}
    return {"get": operation | {"operationId": name, "responses": responses}}


def _json(kind: type[BaseModel], example: Any = None) -> dict[str, Any]:
    shown = {} if example is None else {"example": example}
    return {"application/json": {"schema": {"$ref": "#/components/schemas/" + _schema_name(kind.__name__)}, **shown}}


def _schema_name(class_name: str) -> str:
    """The client-visible name: a class without the prefix of its dialect (OpenAICompat… is TEI's own)."""
    return re.sub("^(Tei|Cohere|Infinity|Vllm|Sie|Voyage|Weaviate|Ollama|OpenAI(?!Compat))", "", class_name)


class _SchemaNames(GenerateJsonSchema):
    def normalize_name(self, name: str) -> str:
        return _schema_name(super().normalize_name(name))


class _OpenApi30(_SchemaNames):
    """OpenAPI 3.0 has the keyword `nullable` in place of a type null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {"nullable": True, "allOf": [inner]} if "$ref" in inner else {**inner, "nullable": True}


def _definitions(
    kinds: Iterable[type[BaseModel]], prefix: str = "", generator: type[GenerateJsonSchema] = _SchemaNames
) -> tuple[dict[Any, dict[str, Any]], dict[str, Any]]:
    """A reference to the schema of each class, and the schemas by name, which starts with `prefix`."""
    template = f"#/components/schemas/{prefix}{{model}}"
    references, found = models_json_schema(
        [(kind, "validation") for kind in kinds], ref_template=template, schema_generator=generator
    )
    named = {
        prefix + name: schema | {"title": name} if "title" in schema else schema
        for name, schema in found["$defs"].items()
    }
    return {kind: dict(reference) for (kind, _), reference in references.items()}, named


# Summary and request of each path of all dialects except TEI.
_OPERATIONS: Mapping[tuple[str, str], tuple[str, type[BaseModel]]] = {
    (OPENAI, "/v1/embeddings"): ("Dense vectors", openai.OpenAIEmbeddingsRequest),
    (JINA, "/v1/embeddings"): ("Dense vectors", openai.OpenAIEmbeddingsRequest),
    (VLLM, "/v1/embeddings"): ("Dense vectors", openai.OpenAIEmbeddingsRequest),
    (VOYAGE, "/v1/embeddings"): ("Dense vectors", openai.OpenAIEmbeddingsRequest),
    (VOYAGE, "/v1/multimodalembeddings"): (
        "Dense vectors of contents: texts, images, or both",
        voyage.VoyageMultimodalRequest,
    ),
    (VLLM, "/tokenize"): ("Tokens of a text", tokens.VllmTokenizeRequest),
    (VLLM, "/detokenize"): ("The text of token ids", tokens.VllmDetokenizeRequest),
    (COHERE, "/v1/tokenize"): ("Tokens of a text", tokens.CohereTokenizeRequest),
    (COHERE, "/v1/detokenize"): ("The text of token ids", tokens.CohereDetokenizeRequest),
    (COHERE, "/v1/classify"): ("Labels of texts", cohere.CohereClassifyRequest),
    (INFINITY, "/v1/classify"): ("All labels with their scores", infinity.InfinityClassifyRequest),
    (COHERE, "/v1/embed"): ("Vectors, as floats or by type", cohere.CohereEmbedRequest),
    (COHERE, "/v2/embed"): ("Vectors by type", cohere.CohereEmbedRequest),
    (INFINITY, "/embeddings"): ("Vectors", infinity.InfinityEmbeddingsRequest),
    (INFINITY, "/v1/embeddings"): ("Vectors", infinity.InfinityEmbeddingsRequest),
    (INFINITY, "/embeddings_image"): ("Vectors of images", infinity.InfinityImagesRequest),
    (INFINITY, "/embeddings_audio"): ("Vectors of sounds", infinity.InfinitySoundsRequest),
    **dict.fromkeys(
        (
            *((COHERE, "/v1/rerank"), (COHERE, "/v2/rerank"), (JINA, "/v1/rerank"), (INFINITY, "/rerank")),
            *((VOYAGE, "/v1/rerank"), (INFINITY, "/v1/rerank")),
            *((VLLM, "/rerank"), (VLLM, "/v1/rerank"), (VLLM, "/v2/rerank")),
        ),
        ("Documents by relevance to a query", rerank.RerankRequest),
    ),
    (VLLM, "/score"): ("A score per pair of texts", vllm.VllmScoreRequest),
    (VLLM, "/v1/score"): ("A score per pair of texts", vllm.VllmScoreRequest),
    (VLLM, "/classify"): ("Probabilities of labels", vllm.VllmClassifyRequest),
    (VLLM, "/pooling"): ("Pooled outputs of the model", vllm.VllmPoolingRequest),
    (INFINITY, "/classify"): ("All labels with their scores", infinity.InfinityClassifyRequest),
    (WEAVIATE, "/vectors"): ("The vector of a text", weaviate.WeaviateVectorRequest),
    (WEAVIATE, "/rerank"): ("A score for each document", weaviate.WeaviateRerankRequest),
    (OLLAMA, "/api/embed"): ("Vectors of length 1", ollama.OllamaEmbedRequest),
    (OLLAMA, "/api/embeddings"): ("The vector of one text, not scaled", ollama.OllamaEmbeddingsRequest),
    (SIE, "/v1/encode"): ("Vectors of several kinds in one call", sie.SieEncodeRequest),
    (SIE, "/v1/score"): ("Items by relevance to a query", sie.SieScoreRequest),
    (SIE, "/v1/extract"): ("Entities of a token classifier, or classes of a classifier", sie.SieExtractRequest),
}


def daemon_document() -> dict[str, Any]:
    """`operations` by dialect and path, each with a summary, a request and a response; `schemas` by name."""
    schemas: dict[str, Any] = {}
    operations: dict[str, dict[str, Any]] = {}

    def schema(dialect: str, kind: type[BaseModel]) -> dict[str, Any]:
        references, found = _definitions([kind], dialect.title())
        schemas.update(found)
        return references[kind]

    for (dialect, path), (summary, request) in _OPERATIONS.items():
        operations.setdefault(dialect, {})[path] = {
            "summary": summary,
            "types": ["application/json", *(["application/msgpack"] if dialect == SIE else [])],
            "request": schema(dialect, request),
            "response": {"type": "object"},
            "example": EXAMPLES[dialect, path],
        }
    for path, operation in TEI_OPERATIONS.items():
        dialect = TEI_OPENAI if path == "/v1/embeddings" else TEI
        operations.setdefault(dialect, {})[path] = {
            "summary": operation.summary,
            "types": ["application/json"],
            "example": EXAMPLES[dialect, path],
            "request": schema(TEI, operation.request),
            "response": schema(TEI, operation.response),
        }
    operations[TEI_OPENAI]["/embeddings"] = operations[TEI_OPENAI]["/v1/embeddings"]
    for path in ("/", "/invocations"):
        operations[TEI][path] = operations[TEI]["/embed"] | {
            "summary": "What the model is for",
            "description": "The request is that of the model's kind, such as EmbedRequest.",
            "request": {"type": "object"},
            "response": {"type": "array"},
        }
    return {"operations": operations, "schemas": dict(sorted(schemas.items()))}


if __name__ == "__main__":
    print(orjson.dumps(daemon_document(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode())
