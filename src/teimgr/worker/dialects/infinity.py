"""Infinity's routes: https://michaelfeil.eu/infinity."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.worker import scores
from teimgr.worker.dialects import rerank
from teimgr.worker.dialects.openai import BATCH_LIMIT, EncodingFormat
from teimgr.worker.http.bodies import (
    U32,
    BadRequest,
    Input,
    ModelName,
    Texts,
    encoded_vector,
    engine_inputs,
    new_id,
    to_json,
    unix_time,
    usage,
)
from teimgr.worker.http.inference import (
    InferenceRequest,
    JobSpec,
    RouteTable,
    ServedModel,
    need_kind,
    need_texts,
    single,
)


class InfinityEmbeddingsRequest(InferenceRequest):
    """Texts, or token ids, to embed. A late-interaction model answers with a vector per token."""

    model: ModelName = None
    input: Input
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[U32 | None, Field(description="0: all")] = None
    modality: Annotated[Literal["text", "image", "audio"], Field(description="only text is served")] = "text"

    def job(self, served: ServedModel) -> JobSpec:
        """One vector per text, or one per token."""
        if self.modality != "text":
            raise BadRequest(400, f"modality: no model here takes {self.modality}", "modality")
        inputs = engine_inputs(self.input)
        need_texts(inputs, "input")
        output = Output.MULTI_VECTOR if served.model.kind == "multi-vector" else Output.DENSE
        options = InferOptions(
            frozenset({output}), truncate=served.spec.auto_truncate, dimensions=self.dimensions or None
        )
        in_base64 = self.encoding_format == "base64"

        def encode(job: Job) -> bytes:
            rows: Any = job.multi_vectors if output is Output.MULTI_VECTOR else job.vectors
            data = [
                {"object": "embedding", "embedding": encoded_vector(row, in_base64), "index": index}
                for index, row in enumerate(rows)
            ]
            return to_json({"object": "list", "data": data} | _rest(self.model or served.name, job))

        return JobSpec(inputs, options, encode, BATCH_LIMIT)


class InfinityClassifyRequest(InferenceRequest):
    """Texts to classify."""

    model: ModelName = None
    input: Texts
    raw_scores: Annotated[bool, Field(description="logits instead of scores")] = False

    def job(self, served: ServedModel) -> JobSpec:
        """Every label with its score, best first."""
        need_texts(self.input, "input")
        need_kind(served.model, ("classifier", scores.RERANKER), "classification")
        options = InferOptions(
            frozenset({Output.SCORES}), truncate=served.spec.auto_truncate, raw_scores=self.raw_scores
        )

        def encode(job: Job) -> bytes:
            data = [[one._asdict() for one in scores.predictions(row, served.model.labels)] for row in job.scores]
            return to_json({"object": "classify", "data": data} | _rest(self.model or served.name, job))

        return JobSpec(self.input, options, encode)


def _rest(model: str, job: Job) -> dict[str, Any]:
    return {"model": model, "usage": usage(job.tokens), "id": new_id("infinity"), "created": unix_time()}


classify = single(InfinityClassifyRequest)

ROUTES: RouteTable = {
    ("POST", "/embeddings"): single(InfinityEmbeddingsRequest),
    ("POST", "/rerank"): rerank.handler(rerank.INFINITY),
    ("POST", "/classify"): classify,
}
