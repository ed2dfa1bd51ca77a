"""Infinity's routes: https://michaelfeil.eu/infinity."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.engine.job import Input as EngineInput
from teimgr.spec import Kind
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks, scores
from teimgr.worker.dialects import rerank
from teimgr.worker.dialects.openai import BATCH_LIMIT, EncodingFormat, embedding_objects


class InfinityEmbeddingsRequest(http.InferenceRequest, http.LenientBody):
    """Texts, or token ids, to embed. A late-interaction model answers with a vector per token."""

    model: http.ModelName = None
    input: http.Input
    encoding_format: EncodingFormat = "float"
    dimensions: Annotated[http.U32 | None, Field(description="0: all")] = None
    modality: Annotated[
        Literal["text", "image", "audio"], Field(description="image and audio: data URIs or base64")
    ] = "text"
    pool_factor: http.PoolFactor = 1.0

    def job(self, served: http.ServedModel) -> http.JobSpec:
        inputs = http.engine_inputs(self.input, BATCH_LIMIT)
        input_checks.need_texts(inputs, "input")
        return self.job_of(inputs, served)

    async def sent_images(self, inference: http.HttpInference) -> list[images.SentItem]:
        """The images or sounds of a request for them; raises TooManyInputs, BadRequest: an input is not a string."""
        given = [self.input] if isinstance(self.input, str) else self.input
        inference.check_count(len(given), BATCH_LIMIT)
        if not given or not all(isinstance(one, str) for one in given):
            message = f"input: with modality {self.modality}, must be data URIs or base64"
            raise http.BadRequest(400, message, "input")
        sent = [one for one in given if isinstance(one, str)]
        read = partial(images.SentImage, kind=self.modality)
        return await images.built(inference, sent, "input", read, BATCH_LIMIT)

    def job_of(self, inputs: Sequence[EngineInput], served: http.ServedModel) -> http.JobSpec:
        """The job of texts, ids or images."""
        output = Output.MULTI_VECTOR if served.model.kind == Kind.MULTI_VECTOR else Output.DENSE
        options = InferOptions(
            frozenset({output}),
            truncate=served.spec.auto_truncate,
            dimensions=self.dimensions or None,
            pool_factor=self.pool_factor,
        )

        def encode(job: Job) -> bytes:
            rows: Any = job.multi_vectors if output is Output.MULTI_VECTOR else job.vectors
            data = embedding_objects(rows, self.encoding_format == "base64")
            return http.to_json({"object": "list", "data": data} | _rest(self.model or served.name, job))

        return http.JobSpec(inputs, options, encode, BATCH_LIMIT)


class InfinityImagesRequest(InfinityEmbeddingsRequest):
    """Images to embed, by the route of older clients."""

    modality: Annotated[Literal["image"], Field(description="data URIs or base64")] = "image"


class InfinitySoundsRequest(InfinityEmbeddingsRequest):
    """Sounds to embed, by the route of older clients."""

    modality: Annotated[Literal["audio"], Field(description="data URIs or base64")] = "audio"


class InfinityClassifyRequest(http.InferenceRequest, http.LenientBody):
    """Texts to classify."""

    model: http.ModelName = None
    input: http.Texts
    raw_scores: Annotated[bool, Field(description="logits instead of scores")] = False

    def job(self, served: http.ServedModel) -> http.JobSpec:
        input_checks.need_texts(self.input, "input")
        input_checks.need_kind(served.model, (Kind.CLASSIFIER, Kind.RERANKER), "classification")
        options = InferOptions(
            frozenset({Output.SCORES}), truncate=served.spec.auto_truncate, raw_scores=self.raw_scores
        )

        def encode(job: Job) -> bytes:
            data = [[one._asdict() for one in scores.predictions(row, served.model.labels)] for row in job.scores]
            return http.to_json({"object": "classify", "data": data} | _rest(self.model or served.name, job))

        return http.JobSpec(self.input, options, encode)


def _rest(model: str, job: Job) -> dict[str, Any]:
    return {"model": model, "usage": http.usage(job.tokens), "id": http.new_id("infinity"), "created": http.unix_time()}


async def embeddings(
    inference: http.HttpInference,
    request: HttpRequest,
    form: type[InfinityEmbeddingsRequest] = InfinityEmbeddingsRequest,
) -> HttpReply:
    """Texts, or by the modality of the body or of the `form` images or sounds."""
    body = await inference.read(request, form)
    if body.modality == "text":
        return await inference.respond(body.job)
    sent = await body.sent_images(inference)
    return await inference.respond(partial(body.job_of, await images.read_all(inference, sent)))


classify = http.single(InfinityClassifyRequest)

ROUTES: http.RouteTable = {
    **{("POST", path): embeddings for path in ("/embeddings", "/v1/embeddings")},
    ("POST", "/embeddings_image"): partial(embeddings, form=InfinityImagesRequest),
    ("POST", "/embeddings_audio"): partial(embeddings, form=InfinitySoundsRequest),
    **{("POST", path): rerank.handler(rerank.INFINITY) for path in ("/rerank", "/v1/rerank")},
    ("POST", "/classify"): classify,
    ("POST", "/v1/classify"): classify,
}
