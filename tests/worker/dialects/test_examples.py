"""The examples of the OpenAPI documents are requests that are answered."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.worker.dialects.dialect_client import Asking

from teimgr.api.gateway.routes import DialectPath, paths
from teimgr.wire.error_bodies import SIE, TEI, WEAVIATE
from teimgr.worker.dialects.openapi import EXAMPLES, instance_document

INSTANCES = {"mini": "dense"}
OF_PATH = {"/predict": "classifier", "/rerank": "reranker", "/embed_sparse": "splade", "/v1/score": "reranker"} | {
    "/v1/extract": "classifier"
}
POSTS = [path for path in paths() if (path.dialect, path.inner) in EXAMPLES]
# Weaviate's requests name no model: in a fleet with several of a kind, those without a name in the path are ambiguous.
ASKED = [path for path in POSTS if path.dialect != WEAVIATE or "{name}" in path.path]


@pytest.mark.parametrize("path", ASKED, ids=lambda path: f"{path.dialect} {path.path}")
async def test_an_example_is_answered(ask: Asking, path: DialectPath) -> None:
    body: dict[str, Any] = EXAMPLES[path.dialect, path.inner]
    if "model" in body:
        body = body | {"model": INSTANCES.get(body["model"], body["model"])}
    instance = OF_PATH.get(path.inner, "dense") if path.dialect in (TEI, SIE, WEAVIATE) else "dense"
    place = path.path.replace("{name}", instance).replace("{model:path}", instance)
    assert (await ask.post(place, body)).ok


async def test_the_documents_and_the_page_have_them(ask: Asking) -> None:
    document = (await ask.get("/openapi.json")).ok
    for path in POSTS:
        content = document["paths"][path.path.replace(":path}", "}")]["post"]["requestBody"]["content"]
        assert content["application/json"]["example"] == EXAMPLES[path.dialect, path.inner]
    page = (await ask.get("/docs")).body.decode()
    assert "curl -s &quot;$URL/v1/embeddings&quot;" in page
    assert "curl -s -X PATCH &quot;$URL/instances/{name}&quot;" in page
    assert page.count("<pre>") > len(POSTS)


def test_the_document_of_an_instance_has_them() -> None:
    posts = [verbs["post"] for verbs in instance_document()["paths"].values() if "post" in verbs]
    assert posts
    assert all("example" in post["requestBody"]["content"]["application/json"] for post in posts), json.dumps(posts)
