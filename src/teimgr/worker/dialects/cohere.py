"""Cohere's embedding and reranking, versions 1 and 2: https://docs.cohere.com/reference/rerank, …/embed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output, Picture, pictures_of
from teimgr.engine.job import Input as EngineInput
from teimgr.errors import InvalidInput
from teimgr.spec import Kind, LoadedModel
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks
from teimgr.worker.dialects import infinity, openai, rerank, tokens
from teimgr.worker.dialects.tokens import Cut, fitted
from teimgr.worker.images import SentImage, SentItem

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
# Names of prompts for an `input_type`, in order of preference.
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("search_query", *http.QUERY_PROMPTS),
    "search_document": ("search_document", *http.DOCUMENT_PROMPTS),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


class CohereEmbedRequest(http.LenientBody):
    """Texts or images to embed, and the types of the vectors."""

    model: http.ModelName = None
    texts: list[str] | None = None
    inputs: Annotated[
        list[dict[str, Any]] | None, Field(description="version 2: contents with texts, one image_url, or both")
    ] = None
    images: Annotated[list[str] | None, Field(description="data URIs, in place of texts")] = None
    input_type: Annotated[
        str | None, Field(description="search_query, search_document, …: selects the model's prompt")
    ] = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: http.U32 | None = None
    max_tokens: Annotated[
        int | None, Field(ge=1, description="texts are truncated to this many tokens, with special ones and prompt")
    ] = None
    truncate: Literal["NONE", "START", "END", "none", "start", "end"] | None = None

    @property
    def truncation(self) -> str:
        return (self.truncate or "END").upper()

    async def contents(self, inference: http.HttpInference) -> list[SentItem]:
        """Texts and images; raises TooManyInputs, BadRequest for several of the three lists, and for parts of another
        kind.
        """
        given = [name for name in ("texts", "images", "inputs") if getattr(self, name)]
        if len(given) > 1:
            raise http.BadRequest(400, f"{given[-1]}: contradicts {given[0]}; send one of them", given[-1])
        if self.images:
            return await images.built(inference, self.images, "images", SentImage)
        if self.inputs:
            return await images.built(inference, self.inputs, "inputs", images.item_of_content)
        return list(self.texts or ())

    def prompt_name(self, model: LoadedModel) -> str | None:
        """The model's prompt for `input_type`; None, the default one, where it has none for one of Cohere's own.

        Raises:
            BadRequest: the model has prompts, and the name is neither one of them nor Cohere's.
        """
        name = self.input_type or ""
        found = http.prompt_among(model, _PROMPTS.get(name, (name,)))
        if found is None and name and name not in (*_PROMPTS, "image") and model.prompts:
            raise openai.no_prompt("input_type", name, model)
        return found


def _embed(version: str) -> http.HttpHandler:
    async def handle(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, CohereEmbedRequest)
        inference.check_count(max(len(body.texts or ()), len(body.inputs or ()), len(body.images or ())))
        items = await body.contents(inference)
        texts = [one for one in items if isinstance(one, str)]
        if len(texts) < len(items):
            inputs = await images.read_all(inference, items)
            return await inference.respond(lambda served: _job(version, body, inputs, served))
        how = Cut("max_tokens", body.prompt_name(inference.served.model), cuts=body.truncation != "NONE")
        cut = await fitted(inference, [*texts], body.max_tokens, left=body.truncation == "START", how=how)
        return await inference.respond(lambda served: _job_of_texts(version, body, cut, served))

    return handle


def _job_of_texts(
    version: str, body: CohereEmbedRequest, texts: list[EngineInput], served: http.ServedModel
) -> http.JobSpec:
    input_checks.need_texts(texts, "texts")
    return _job(version, body, texts, served)


def _job(
    version: str, body: CohereEmbedRequest, inputs: Sequence[EngineInput], served: http.ServedModel
) -> http.JobSpec:
    if body.output_dimension == 0:
        raise InvalidInput("`output_dimension` should be positive")
    options = InferOptions(
        outputs=frozenset({Output.DENSE}),
        truncate=body.truncation != "NONE",
        truncation_left=body.truncation == "START",
        names_side=body.truncate is not None,
        prompt_name=body.prompt_name(served.model),
        dimensions=body.output_dimension,
    )
    by_type = version == "2" or body.embedding_types is not None
    named: list[EmbeddingType] = body.embedding_types or ["float"]
    types = list(dict.fromkeys(named))  # each once, even if repeated

    def encode(job: Job) -> bytes:
        return http.to_json(
            {
                "id": http.new_id("embed"),
                "embeddings": {name: _as_type(job.vectors, name) for name in types} if by_type else job.vectors,
                **_echo(body, inputs),
                "meta": {"api_version": {"version": version}, "billed_units": _billed(job)},
                "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
            }
        )

    return http.JobSpec(inputs, options, encode)


def _echo(body: CohereEmbedRequest, inputs: Sequence[EngineInput]) -> dict[str, Any]:
    """The texts of a request, and what is said of its images."""
    pictures = [
        {"width": one.width, "height": one.height, "format": one.format.lower(), "bit_depth": 8}
        for item in inputs
        for one in pictures_of(item)
        if isinstance(one, Picture)
    ]
    texts = body.texts or [one for one in inputs if isinstance(one, str)]
    return {"texts": texts} | ({"images": pictures} if pictures else {})


def _billed(job: Job) -> dict[str, int]:
    count, tokens = images.counted(job.inputs)
    units = {"input_tokens": job.tokens - tokens}
    return units | ({"images": count, "image_tokens": tokens} if count else {})


def _as_type(vectors: NDArray[np.float32], name: EmbeddingType) -> Any:
    if name == "base64":
        return http.encoded_rows(vectors, True)
    return vectors if name == "float" else converted(vectors, Precision(name))


class CohereClassifyRequest(http.LenientBody):
    """Texts to classify by a classifier; examples, as for few-shot classification, are not supported."""

    model: http.ModelName = None
    inputs: http.Texts
    examples: Annotated[list[Any] | None, Field(description="not supported")] = None
    preset: Annotated[str | None, Field(description="not supported")] = None
    truncate: Literal["NONE", "START", "END"] | None = None


class _EitherClassify(http.Body):
    inputs: Any = None


async def classify(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    """`/v1/classify`; a body with `input` in place of `inputs` is Infinity's."""
    if (await inference.read(request, _EitherClassify)).inputs is None:
        return await infinity.classify(inference, request)
    body = await inference.read(request, CohereClassifyRequest)
    for name in ("examples", "preset"):
        if getattr(body, name):
            raise http.BadRequest(400, f"{name}: is not supported; the model is a classifier already", name)
    return await inference.respond(lambda served: _classify_job(body, served))


def _classify_job(body: CohereClassifyRequest, served: http.ServedModel) -> http.JobSpec:
    input_checks.need_texts(body.inputs, "inputs")
    input_checks.need_kind(served.model, (Kind.CLASSIFIER,), "classification")
    truncation = body.truncate or "END"
    options = InferOptions(
        frozenset({Output.SCORES}),
        truncate=truncation != "NONE",
        truncation_left=truncation == "START",
        names_side=body.truncate is not None,
    )
    labels = served.model.labels

    def encode(job: Job) -> bytes:
        found = [
            {
                "id": http.new_id("classification"),
                "input": text,
                "prediction": labels[int(row.argmax())],
                "predictions": [labels[int(row.argmax())]],
                "confidence": float(row.max()),
                "confidences": [float(row.max())],
                "labels": {label: {"confidence": float(score)} for label, score in zip(labels, row, strict=True)},
                "classification_type": "single-label",
            }
            for text, row in zip(body.inputs, job.scores, strict=True)
        ]
        meta = {"api_version": {"version": "1"}, "billed_units": {"classifications": len(found)}}
        return http.to_json({"id": http.new_id("classify"), "classifications": found, "meta": meta})

    return http.JobSpec(body.inputs, options, encode)


ROUTES: http.RouteTable = {
    ("POST", "/v1/classify"): classify,
    **tokens.COHERE_ROUTES,
    ("POST", "/v1/embed"): _embed("1"),
    ("POST", "/v2/embed"): _embed("2"),
    ("POST", "/v1/rerank"): rerank.handler(rerank.COHERE_1),
    ("POST", "/v2/rerank"): rerank.handler(rerank.COHERE_2),
}
# Jina's dialect: OpenAI's routes, and reranking with Jina's defaults.
JINA_ROUTES: http.RouteTable = {**openai.ROUTES, ("POST", "/v1/rerank"): rerank.handler(rerank.JINA)}
