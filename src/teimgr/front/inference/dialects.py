"""The paths of inference on the daemon's port: a dialect each, and where a request says which model it is for.

Where two products have one path, the path is the one's whose clients are more, and a prefix is there for the other's:
`/infinity/classify` answers as Infinity does. `CHOICE` is a header that does the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from teimgr.wire.error_bodies import OPENAI, TEI, TEI_OPENAI

CHOICE = "x-teimgr-dialect"


class DialectPath(NamedTuple):
    """One path: `path` is Starlette's template, `inner` what the worker knows it as.

    With `{model}` or `{name}` in the template the path names the model or the instance, else the body does.
    """

    path: str
    dialect: str
    inner: str
    method: str = "POST"


_INSTANCE = "/instances/{name}"
_TEI = (
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity", "/tokenize", "/decode"),
    *("/vertex", "/invocations", "/"),
)
_TEI_OPENAI = ("/v1/embeddings", "/embeddings")


def paths() -> Iterator[DialectPath]:
    """All of them."""
    yield DialectPath("/v1/embeddings", OPENAI, "/v1/embeddings")
    for inner in _TEI:
        yield DialectPath(_INSTANCE + inner, TEI, inner)
    yield DialectPath(_INSTANCE, TEI, "/")
    yield DialectPath(_INSTANCE + "/info", TEI, "/info", "GET")
    for inner in _TEI_OPENAI:
        yield DialectPath(_INSTANCE + inner, TEI_OPENAI, inner)
