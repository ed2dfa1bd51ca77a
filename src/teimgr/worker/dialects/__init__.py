"""HTTP dialects: request classes, handlers and a table of routes for each product; `ROUTES` has the tables by dialect.

tei, openai, cohere, vllm, infinity, sie, voyage, weaviate, ollama    one dialect each; Jina's is in `cohere`
rerank, tokens                                                        shared by several dialects
serde_json, serde_text, serde_types, tei_bodies                       TEI's parser of bodies
openapi                                                               OpenAPI documents, with a request for each route

A new dialect needs a module here, a line in `ROUTES`, its name and error body in `wire/error_bodies.py`, its paths in
`api/gateway/routes.py`, its requests in `openapi.py`, and a new `api/gateway/openapi.json`:
`python -m teimgr.worker.dialects.openapi > src/teimgr/api/gateway/openapi.json`.
"""

from __future__ import annotations

from collections.abc import Mapping

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
from teimgr.worker.dialects import cohere, infinity, ollama, openai, sie, tei, vllm, voyage, weaviate
from teimgr.worker.http_inference import RouteTable

ROUTES: Mapping[str, RouteTable] = {
    TEI: tei.ROUTES,
    TEI_OPENAI: tei.ROUTES,
    OPENAI: openai.ROUTES,
    COHERE: cohere.ROUTES,
    JINA: cohere.JINA_ROUTES,
    VLLM: vllm.ROUTES,
    INFINITY: infinity.ROUTES,
    SIE: sie.ROUTES,
    VOYAGE: voyage.ROUTES,
    WEAVIATE: weaviate.ROUTES,
    OLLAMA: ollama.ROUTES,
}
