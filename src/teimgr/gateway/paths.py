"""The paths of inference on the daemon's port: a dialect each, and where a request says which model it is for.

Where several products have one path it answers in the form of the first dialect named for it. The header `CHOICE`
chooses another one, and so does a prefix in the base address of a client: `/infinity/classify` is Infinity's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from teimgr.wire.error_bodies import COHERE, INFINITY, JINA, OPENAI, SIE, TEI, TEI_OPENAI, VLLM

CHOICE = "x-teimgr-dialect"


class DialectPath(NamedTuple):
    """One path: `path` is Starlette's template, `inner` what the worker knows it as.

    With `{model}` or `{name}` in the template the path names the model or the instance, else the body does. `others`
    are the dialects that may be chosen instead of `dialect`.
    """

    path: str
    dialect: str
    inner: str
    method: str = "POST"
    others: tuple[str, ...] = ()

    def chosen(self, dialect: str | None) -> DialectPath:
        """This path in the dialect that a client chose; as it is where it chose none that is spoken here."""
        return self._replace(dialect=dialect) if dialect in self.others else self


_SHARED: dict[str, tuple[str, ...]] = {
    "/v1/embeddings": (OPENAI, VLLM),
    "/v1/embed": (COHERE,),
    "/v2/embed": (COHERE,),
    "/v1/rerank": (COHERE, JINA, VLLM),
    "/v2/rerank": (COHERE, VLLM),
    "/rerank": (INFINITY, VLLM),
    "/embeddings": (INFINITY,),
    "/classify": (VLLM, INFINITY),
    "/pooling": (VLLM,),
    "/score": (VLLM,),
    "/v1/score": (VLLM,),
}
_PREFIXED = (JINA, VLLM, INFINITY)
_SIE = ("/v1/encode", "/v1/score")
_INSTANCE = "/instances/{name}"
_TEI = (
    *("/embed", "/embed_all", "/embed_sparse", "/predict", "/rerank", "/similarity", "/tokenize", "/decode"),
    *("/vertex", "/invocations", "/"),
)
_TEI_OPENAI = ("/v1/embeddings", "/embeddings")


def paths() -> Iterator[DialectPath]:
    """All of them."""
    for path, (first, *others) in _SHARED.items():
        yield DialectPath(path, first, path, others=tuple(others))
        for dialect in (first, *others):
            if dialect in _PREFIXED:
                yield DialectPath(f"/{dialect}{path}", dialect, path)
    for inner in _SIE:
        yield DialectPath(inner + "/{model:path}", SIE, inner)
    for inner in _TEI:
        yield DialectPath(_INSTANCE + inner, TEI, inner)
    yield DialectPath(_INSTANCE, TEI, "/")
    yield DialectPath(_INSTANCE + "/info", TEI, "/info", "GET")
    for inner in _TEI_OPENAI:
        yield DialectPath(_INSTANCE + inner, TEI_OPENAI, inner)
