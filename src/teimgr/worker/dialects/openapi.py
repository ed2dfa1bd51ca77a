"""What the daemon's OpenAPI document says of the dialects' requests, made from the classes that read them.

The daemon does not import a worker's modules, so it reads a file that this one writes:
`python -m teimgr.worker.dialects.openapi` prints it, and a test sees that it is fresh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from teimgr.wire.error_bodies import COHERE, INFINITY, JINA, OPENAI, SIE, TEI, TEI_OPENAI, VLLM
from teimgr.worker.dialects import cohere, infinity, openai, rerank, sie, vllm
from teimgr.worker.dialects.tei_openapi import OPERATIONS
from teimgr.worker.dialects.tei_requests import EmbedRequest

_MSGPACK_TOO = (SIE,)

# Dialect and path, and what is read there.
_DIALECTS: Mapping[tuple[str, str], tuple[str, type[BaseModel]]] = {
    (OPENAI, "/v1/embeddings"): ("Dense vectors", openai.EmbeddingsRequest),
    (VLLM, "/v1/embeddings"): ("Dense vectors", openai.EmbeddingsRequest),
    (COHERE, "/v1/embed"): ("Vectors, as floats or by type", cohere.EmbedRequest),
    (COHERE, "/v2/embed"): ("Vectors by type", cohere.EmbedRequest),
    (INFINITY, "/embeddings"): ("Vectors", infinity.EmbeddingsRequest),
    **dict.fromkeys(
        (
            *((COHERE, "/v1/rerank"), (COHERE, "/v2/rerank"), (JINA, "/v1/rerank"), (INFINITY, "/rerank")),
            *((VLLM, "/rerank"), (VLLM, "/v1/rerank"), (VLLM, "/v2/rerank")),
        ),
        ("Documents by how well they answer a query", rerank.RerankRequest),
    ),
    (VLLM, "/score"): ("A score per pair of texts", vllm.ScoreRequest),
    (VLLM, "/v1/score"): ("A score per pair of texts", vllm.ScoreRequest),
    (VLLM, "/classify"): ("Probabilities of labels", vllm.ClassifyRequest),
    (VLLM, "/pooling"): ("Whatever the model pools", vllm.PoolingRequest),
    (INFINITY, "/classify"): ("All labels with their scores", infinity.ClassifyRequest),
    (SIE, "/v1/encode"): ("Vectors of several kinds in one call", sie.EncodeRequest),
    (SIE, "/v1/score"): ("Items by how well they answer a query", sie.ScoreRequest),
}


def document() -> dict[str, Any]:
    """`operations` by dialect and path, each with a summary, a request and a response; `schemas` by name."""
    schemas: dict[str, Any] = {}
    operations: dict[str, dict[str, Any]] = {}
    for (dialect, path), (summary, request) in _DIALECTS.items():
        types = ("application/json", "application/msgpack") if dialect in _MSGPACK_TOO else ("application/json",)
        operations.setdefault(dialect, {})[path] = {
            "summary": summary,
            "types": list(types),
            "request": _schema(dialect, request, schemas),
            "response": {"type": "object"},
        }
    for path, operation in OPERATIONS.items():
        dialect = TEI_OPENAI if path == "/v1/embeddings" else TEI
        operations.setdefault(dialect, {})[path] = {
            "summary": operation.summary,
            "types": ["application/json"],
            "request": _schema(TEI, operation.request, schemas),
            "response": _schema(TEI, operation.response, schemas),
        }
    operations[TEI_OPENAI]["/embeddings"] = operations[TEI_OPENAI]["/v1/embeddings"]
    for path in ("/", "/invocations"):
        operations[TEI][path] = operations[TEI]["/embed"] | {
            "summary": "What the model is for",
            "description": f"The request is that of the model's kind, such as {EmbedRequest.__name__}.",
            "request": {"type": "object"},
            "response": {"type": "array"},
        }
    return {"operations": operations, "schemas": dict(sorted(schemas.items()))}


def _schema(dialect: str, kind: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """A reference to the schema of `kind`, which goes into `schemas` under a name with that of the dialect."""
    prefix = dialect.title().replace("-", "")
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(kind, "validation")]
    references, found = models_json_schema(wanted, ref_template=f"#/components/schemas/{prefix}{{model}}")
    schemas |= {prefix + name: schema for name, schema in found["$defs"].items()}
    return dict(references[kind, "validation"])


if __name__ == "__main__":
    print(orjson.dumps(document(), option=orjson.OPT_INDENT_2 | orjson.OPT_SORT_KEYS).decode())
