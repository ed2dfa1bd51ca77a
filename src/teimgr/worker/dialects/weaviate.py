"""The API of Weaviate's containers for text2vec-transformers and reranker-transformers: a text's vector, and scores.

https://docs.weaviate.io/weaviate/modules/custom-modules. Vectors have length 1, as in every dialect here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output, Pair
from teimgr.errors import EmptyInput
from teimgr.spec import Kind
from teimgr.worker import http_inference as http
from teimgr.worker import input_checks

_PROMPTS = {"query": http.QUERY_PROMPTS, "passage": http.DOCUMENT_PROMPTS}
_ANY_MODEL = "masked_mean"  # the default of Weaviate's modules


class WeaviateVectorConfig(http.LenientObject):
    """How the text is embedded."""

    pooling_strategy: Annotated[str | None, Field(description="masked_mean, ignored, or the model's pooling")] = None
    task_type: Annotated[
        Literal["query", "passage"] | None, Field(description="selects the model's prompt for queries or documents")
    ] = None
    dimensions: Annotated[http.U32 | None, Field(description="leading dimensions to keep; 0: all")] = None


class WeaviateVectorRequest(http.InferenceRequest, http.LenientBody):
    """`POST /vectors`: a text to embed."""

    text: str
    config: WeaviateVectorConfig | None = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        if not self.text:
            raise EmptyInput("`text` cannot be empty")
        config = self.config or WeaviateVectorConfig()
        if config.pooling_strategy not in (None, _ANY_MODEL, served.model.pooling):
            message = (
                f"config.pooling_strategy: the model's is {served.model.pooling}; leave it out or send {_ANY_MODEL}"
            )
            raise http.BadRequest(400, message, "config")
        options = InferOptions(
            frozenset({Output.DENSE}),
            truncate=served.spec.auto_truncate,
            prompt_name=http.prompt_among(served.model, _PROMPTS.get(config.task_type or "", ())),
            dimensions=config.dimensions or None,
        )

        def encode(job: Job) -> bytes:
            return http.to_json({"text": self.text, "vector": job.vectors[0], "dim": job.vectors.shape[1]})

        return http.JobSpec([self.text], options, encode)


class WeaviateRerankRequest(http.InferenceRequest, http.LenientBody):
    """`POST /rerank`: documents to score in order, or one document as `property`."""

    query: str
    documents: list[str] | None = None
    property: Annotated[str | None, Field(description="the document, if `documents` is absent")] = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        texts = [self.property or ""] if self.documents is None else self.documents
        if not texts or (self.documents is None and not self.property):
            raise EmptyInput("`documents` cannot be empty")
        input_checks.need_kind(served.model, (Kind.RERANKER,), "reranking")
        options = InferOptions(frozenset({Output.SCORES}), truncate=served.spec.auto_truncate, listed=True)

        def encode(job: Job) -> bytes:
            scores = job.scores[:, 0]
            answer: dict[str, Any] = {"query": self.query, "property": self.property}
            if self.documents is None:
                return http.to_json(answer | {"score": scores[0]})
            rows = zip(texts, scores, strict=True)
            return http.to_json(answer | {"scores": [{"document": text, "score": score} for text, score in rows]})

        return http.JobSpec([Pair(self.query, text) for text in texts], options, encode)


ROUTES: http.RouteTable = {
    ("POST", "/vectors"): http.single(WeaviateVectorRequest),
    ("POST", "/rerank"): http.single(WeaviateRerankRequest),
}
