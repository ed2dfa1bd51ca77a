"""The OpenAPI document of an instance's port: TEI's routes under TEI's schema names.

Requests are described by the classes that read them, so the document cannot say another thing than the routes do.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, NamedTuple

from pydantic import BaseModel, RootModel, WithJsonSchema
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema
from typing_extensions import TypeAliasType

from teimgr import __version__
from teimgr.wire.status import STATUS
from teimgr.worker.dialects import tei, tei_requests

_REF = "#/components/schemas/{model}"
_TAG = "Text Embeddings Inference"

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


class EmbedAllResponse(RootModel[list[list[list[Float]]]]):
    """A vector per token of each input."""


class SparseValue(BaseModel):
    """The weight of a vocabulary entry."""

    index: int
    value: Float


class EmbedSparseResponse(RootModel[list[list[SparseValue]]]):
    """The entries that are not zero, per input."""


class Prediction(BaseModel):
    """A label and its score."""

    score: Float
    label: str


class PredictResponse(RootModel[list[Prediction] | list[list[Prediction]]]):
    """All labels, best first; a list per input where a batch was sent."""


class Rank(BaseModel):
    """A text by its place in the request."""

    index: int
    text: str | None = None
    score: Float


class RerankResponse(RootModel[list[Rank]]):
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
    """A model that gives vectors."""

    pooling: str


class ClassifierModel(BaseModel):
    """A model that gives scores."""

    id2label: dict[str, str]
    label2id: dict[str, int]


class ModelType(BaseModel):
    """Exactly one of the three."""

    embedding: EmbeddingModel | None = None
    classifier: ClassifierModel | None = None
    reranker: ClassifierModel | None = None


class Info(BaseModel):
    """The model and the limits; teimgr adds facts of its own."""

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
    """What each instance's own route would have answered."""

    predictions: list[Any]


class Operation(NamedTuple):
    """A POST route: what it reads, what it answers with, and how a failure looks."""

    name: str
    summary: str
    request: type[BaseModel]
    response: type[BaseModel]
    error: type[BaseModel] = ErrorResponse


OPERATIONS = {
    "/embed": Operation("embed", "Dense vectors", tei_requests.EmbedRequest, EmbedResponse),
    "/embed_all": Operation("embed_all", "A vector per token", tei_requests.EmbedAllRequest, EmbedAllResponse),
    "/embed_sparse": Operation("embed_sparse", "Sparse vectors", tei_requests.EmbedSparseRequest, EmbedSparseResponse),
    "/predict": Operation("predict", "Scores of labels", tei_requests.PredictRequest, PredictResponse),
    "/rerank": Operation("rerank", "Texts by relevance to a query", tei_requests.RerankRequest, RerankResponse),
    "/similarity": Operation(
        "similarity", "Likeness of sentences to one sentence", tei_requests.SimilarityRequest, SimilarityResponse
    ),
    "/tokenize": Operation("tokenize", "Tokens of texts", tei.TokenizeRequest, TokenizeResponse),
    "/decode": Operation("decode", "Texts of token ids", tei.DecodeRequest, DecodeResponse),
    "/v1/embeddings": Operation(
        "openai_embed",
        "Dense vectors in the OpenAI form",
        tei_requests.OpenAICompatRequest,
        OpenAICompatResponse,
        OpenAICompatErrorResponse,
    ),
    "/vertex": Operation("vertex_compatibility", "Vertex AI's form", tei_requests.VertexRequest, VertexResponse),
}

_FAILURES = {
    "400": "Nothing to work on",
    "413": "The body is larger than the limit",
    "415": "The body is not said to be JSON",
    "422": "The body, an option or a text breaks a rule",
    "424": "Inference failed, or the model does not do this",
    "429": "Model is overloaded",
}
# A body that cannot be read is refused by the server that TEI is built on, what it says by TEI.
_IN_PLAIN_TEXT = ("400", "413", "415", "422")
_IN_JSON = ("400", "422", "424", "429")


@cache
def document() -> dict[str, Any]:
    """The document, an OpenAPI 3.0.3 object."""
    paths = {path: {"post": _post(operation)} for path, operation in OPERATIONS.items()}
    return {
        "openapi": "3.0.3",
        "info": {
            "title": "Text Embeddings Inference",
            "description": "An instance of teimgr, which speaks the dialect of Text Embeddings Inference.",
            "version": __version__,
        },
        "paths": paths | _got(),
        "components": {"schemas": _schemas()},
        "tags": [{"name": _TAG}],
    }


def _post(operation: Operation) -> dict[str, Any]:
    failures = {
        status: {"description": text, "content": _told(status, operation.error)} for status, text in _FAILURES.items()
    }
    return {
        "tags": [_TAG],
        "summary": operation.summary,
        "description": operation.summary + ".",
        "operationId": operation.name,
        "requestBody": {"required": True, "content": _json(operation.request)},
        "responses": {"200": {"description": "OK", "content": _json(operation.response)}, **failures},
    }


def _told(status: str, error: type[BaseModel]) -> dict[str, Any]:
    plain = _plain() if status in _IN_PLAIN_TEXT else {}
    return (_json(error) if status in _IN_JSON else {}) | plain


def _got() -> dict[str, Any]:
    sick = {"description": "The model cannot be used", "content": _json(ErrorResponse)}
    return {
        "/health": _get("health", "Whether the model gives right vectors", {"200": {"description": "OK"}, "503": sick}),
        "/info": _get(
            "get_model_info",
            "The model and the limits",
            {"200": {"description": "OK", "content": _json(Info)}},
        ),
        "/metrics": _get("metrics", "Prometheus metrics", {"200": {"description": "OK", "content": _plain()}}),
    }


def _get(name: str, summary: str, responses: dict[str, Any]) -> dict[str, Any]:
    operation = {"tags": [_TAG], "summary": summary, "description": summary + "."}
    return {"get": operation | {"operationId": name, "responses": responses}}


def _json(kind: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": _REF.format(model=kind.__name__)}}}


def _plain() -> dict[str, Any]:
    return {"text/plain": {"schema": {"type": "string"}}}


def _schemas() -> dict[str, Any]:
    kinds: set[type[BaseModel]] = {Info, ErrorResponse}
    for operation in OPERATIONS.values():
        kinds |= {operation.request, operation.response, operation.error}
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(kind, "validation") for kind in kinds]
    _, schemas = models_json_schema(wanted, ref_template=_REF, schema_generator=_OpenApi30)
    return dict(sorted(schemas["$defs"].items()))


class _OpenApi30(GenerateJsonSchema):
    """OpenAPI 3.0 has no type null; it says `nullable`."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        inner = self.generate_inner(schema["schema"])
        return {"nullable": True, "allOf": [inner]} if "$ref" in inner else {**inner, "nullable": True}
