"""Infinity's routes: https://michaelfeil.eu/infinity."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.worker import scores
from teimgr.worker.dialects import rerank
from teimgr.worker.dialects.tei_requests import BATCH_LIMIT, EncodingFormat
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import U32, Input, Texts, engine_inputs
from teimgr.worker.http.common import MOST_INPUTS, Refused, base64_of, named, need_kind, need_texts, now, simple, usage
from teimgr.worker.http.inference import HttpHandler, Inference, InferenceRequest, ServedModel
from teimgr.worker.scores import RERANKER


class EmbeddingsRequest(InferenceRequest):
    """Texts, or token ids, to embed. A late-interaction model answers with a vector per token."""

    model: Annotated[str | None, Field(description="an instance, a model id or an alias")] = None
    input: Input
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[U32 | None, Field(description="0: all")] = None
    modality: Annotated[Literal["text", "image", "audio"], Field(description="only text is served")] = "text"

    def inference(self, served: ServedModel) -> Inference:
        """One vector per text, or one per token."""
        if self.modality != "text":
            raise Refused(400, f"modality: no model here takes {self.modality}", "modality")
        inputs = engine_inputs(self.input)
        need_texts(inputs, "input")
        output = Output.MULTI_VECTOR if served.model.kind == "multi-vector" else Output.DENSE
        options = InferOptions(
            frozenset({output}), truncate=served.spec.auto_truncate, dimensions=self.dimensions or None
        )
        in_base64 = self.encoding_format == "base64"

        def answer(job: Job) -> bytes:
            rows: Any = job.multi_vectors if output is Output.MULTI_VECTOR else job.vectors
            data = [
                {
                    "object": "embedding",
                    "embedding": base64_of(row) if in_base64 else np.ascontiguousarray(row),
                    "index": index,
                }
                for index, row in enumerate(rows)
            ]
            return to_json({"object": "list", "data": data} | _rest(self.model or served.name, job))

        return Inference(inputs, options, answer, BATCH_LIMIT)


class ClassifyRequest(InferenceRequest):
    """Texts to classify."""

    model: Annotated[str | None, Field(description="an instance, a model id or an alias")] = None
    input: Texts
    raw_scores: Annotated[bool, Field(description="logits instead of scores")] = False

    def inference(self, served: ServedModel) -> Inference:
        """Every label with its score, best first."""
        need_texts(self.input, "input")
        need_kind(served.model, ("classifier", RERANKER), "classification")
        options = InferOptions(
            frozenset({Output.SCORES}), truncate=served.spec.auto_truncate, raw_scores=self.raw_scores
        )

        def answer(job: Job) -> bytes:
            data = [[one._asdict() for one in scores.predictions(row, served.model.labels)] for row in job.scores]
            return to_json({"object": "classify", "data": data} | _rest(self.model or served.name, job))

        return Inference(self.input, options, answer, MOST_INPUTS)


def _rest(model: str, job: Job) -> dict[str, Any]:
    return {"model": model, "usage": usage(job), "id": named("infinity"), "created": now()}


classify = simple(ClassifyRequest)

ROUTES: dict[tuple[str, str], HttpHandler] = {
    ("POST", "/embeddings"): simple(EmbeddingsRequest),
    ("POST", "/rerank"): rerank.route(rerank.INFINITY),
    ("POST", "/classify"): classify,
}
