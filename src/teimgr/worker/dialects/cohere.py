"""Cohere's reranking and embedding, versions 1 and 2: https://docs.cohere.com/reference/rerank, …/embed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.errors import InvalidInput
from teimgr.wire.element_types import Precision, converted
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.dialects import rerank
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import U32, Body
from teimgr.worker.http.common import (
    DOCUMENT_PROMPTS,
    MOST_INPUTS,
    QUERY_PROMPTS,
    Refused,
    base64_of,
    named,
    need_texts,
    prompt_among,
    read,
    shortened,
    text_of_parts,
)
from teimgr.worker.http.inference import CallOptions, HttpHandler, HttpInference, Inference, ServedModel, json_reply

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
_PRECISIONS = {
    "int8": Precision.INT8,
    "uint8": Precision.UINT8,
    "binary": Precision.BINARY,
    "ubinary": Precision.UBINARY,
}
# What goes before a text by its use, where the model has such a prompt.
_PROMPTS: Mapping[str, tuple[str, ...]] = {
    "search_query": ("search_query", *QUERY_PROMPTS),
    "search_document": ("search_document", *DOCUMENT_PROMPTS),
    "classification": ("classification", "Classification"),
    "clustering": ("clustering", "Clustering"),
}


class EmbedRequest(Body):
    """What to embed, and in which types; texts alone, for no model here sees images."""

    model: Annotated[str | None, Field(description="an instance, a model id or an alias")] = None
    texts: list[str] | None = None
    inputs: Annotated[list[dict[str, Any]] | None, Field(description="version 2: contents of parts of type text")] = (
        None
    )
    images: Annotated[list[str] | None, Field(description="refused: no model here sees images")] = None
    input_type: Annotated[
        str | None, Field(description="search_query, search_document, …: chooses the model's prompt of that name")
    ] = None
    embedding_types: list[EmbeddingType] | None = None
    output_dimension: U32 | None = None
    max_tokens: Annotated[int | None, Field(ge=1, description="texts are cut to so many tokens")] = None
    truncate: Literal["NONE", "START", "END", "none", "start", "end"] | None = None

    def contents(self) -> list[str]:
        """The texts.

        Raises:
            Refused: there are images, or something that is no text.
        """
        if self.images:
            raise Refused(400, "images: no model here sees images", "images")
        if self.inputs is None:
            return self.texts or []
        return [_text_of(place, one) for place, one in enumerate(self.inputs)]


def _text_of(place: int, content: dict[str, Any]) -> str:
    found = content.get("content")
    text = text_of_parts(found) if isinstance(found, list) else found
    if not isinstance(text, str):
        raise Refused(400, f"inputs.{place}.content: only parts of type text are taken here", "inputs")
    return text


def _embed(version: str) -> HttpHandler:
    async def answer(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
        asked = await read(exchange, request, EmbedRequest)
        left = _truncation(asked) == "START"
        texts = await shortened(exchange, asked.contents(), asked.max_tokens, left=left)
        [reply] = await exchange.infer([partial(_inference, version, asked, texts)], terms)
        return json_reply(reply.payload)

    return answer


def _truncation(asked: EmbedRequest) -> str:
    return (asked.truncate or "END").upper()


def _inference(version: str, asked: EmbedRequest, texts: list[str], served: ServedModel) -> Inference:
    need_texts(texts, "texts")
    if asked.output_dimension == 0:
        raise InvalidInput("`output_dimension` should be positive")
    prompts = _PROMPTS.get(asked.input_type or "", (asked.input_type or "",))
    options = InferOptions(
        outputs=frozenset({Output.DENSE}),
        truncate=_truncation(asked) != "NONE",
        truncation_left=_truncation(asked) == "START",
        prompt_name=prompt_among(served.model, prompts),
        dimensions=asked.output_dimension,
    )
    by_type = version == "2" or asked.embedding_types is not None
    kinds = asked.embedding_types or ["float"]

    def answer(job: Job) -> bytes:
        embeddings = {kind: _TYPES[kind](job.vectors) for kind in kinds} if by_type else job.vectors
        return to_json(
            {
                "id": named("embed"),
                "embeddings": embeddings,
                "texts": asked.texts if asked.texts is not None else texts,
                "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": job.tokens}},
                "response_type": "embeddings_by_type" if by_type else "embeddings_floats",
            }
        )

    return Inference(texts, options, answer, MOST_INPUTS)


def _in_base64(vectors: NDArray[np.float32]) -> list[str]:
    return [base64_of(vector) for vector in vectors]


_TYPES: Mapping[str, Callable[[NDArray[np.float32]], Any]] = {
    "float": lambda vectors: vectors,
    "base64": _in_base64,
    **{name: partial(converted, precision=precision) for name, precision in _PRECISIONS.items()},
}

ROUTES: dict[tuple[str, str], HttpHandler] = {
    ("POST", "/v1/embed"): _embed("1"),
    ("POST", "/v2/embed"): _embed("2"),
    ("POST", "/v1/rerank"): rerank.route(rerank.COHERE_1),
    ("POST", "/v2/rerank"): rerank.route(rerank.COHERE_2),
}
# Jina's clients that want its defaults ask with its name.
JINA_ROUTES: dict[tuple[str, str], HttpHandler] = {("POST", "/v1/rerank"): rerank.route(rerank.JINA)}
