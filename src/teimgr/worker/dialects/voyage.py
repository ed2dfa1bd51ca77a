"""Voyage's embeddings, of texts and of contents with images, and its reranking: https://docs.voyageai.com/reference.

The shared paths `/v1/embeddings` and `/v1/rerank` honour its fields too; `/voyage/v1` has its defaults and errors.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from teimgr.engine.job import Input, Job, Picture, pictures_of
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.worker import http_inference as http
from teimgr.worker import images
from teimgr.worker.dialects import openai, rerank

_MAX_INPUTS = 1000  # as in the official service


class VoyageMultimodalRequest(http.LenientBody):
    """Contents of texts, images, or both if the model reads both in one input; each gets one vector."""

    model: http.ModelName = None
    inputs: Annotated[
        list[dict[str, Any]], Field(description="objects with `content`: parts of text, image_url or image_base64")
    ]
    input_type: Annotated[str | None, Field(description="query or document: selects the model's prompt")] = None
    truncation: Annotated[bool, Field(description="false refuses inputs that are too long")] = True
    output_encoding: Annotated[Literal["base64"] | None, Field(description="absent: lists of numbers")] = None
    encoding_format: Annotated[Literal["float", "base64"] | None, Field(description="sent by Voyage's client")] = None
    output_dimension: Annotated[http.U32 | None, Field(description="leading dimensions to keep")] = None
    output_dtype: Annotated[openai.ElementType | None, Field(description="element type of the vectors")] = None

    def job(self, inputs: list[Input], served: http.ServedModel) -> http.JobSpec:
        """A vector per content."""
        same = openai.OpenAIEmbeddingsRequest(
            input="",
            input_type=self.input_type,
            truncation=self.truncation,
            encoding_format=self.output_encoding or self.encoding_format,
            output_dimension=self.output_dimension,
            output_dtype=self.output_dtype,
        )

        def encode(job: Job) -> bytes:
            name = self.model or served.name
            return openai.embedding_list(name, same.in_base64, same.precision, job, _usage(job))

        return http.JobSpec(inputs, same.options(served, self.truncation), encode, _MAX_INPUTS)


def _usage(job: Job) -> dict[str, int]:
    """The tokens of images are counted in the total alone, as there."""
    pictures = [one for item in job.inputs for one in pictures_of(item) if isinstance(one, Picture)]
    return {
        "text_tokens": job.tokens - sum([one.tokens for one in pictures]),
        "image_pixels": sum([one.width * one.height for one in pictures]),
        "video_pixels": 0,
        "total_tokens": job.tokens,
    }


async def _embed_contents(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    body = await inference.read(request, VoyageMultimodalRequest)
    items = await images.built(inference, body.inputs, "inputs", images.item_of_content, _MAX_INPUTS)
    inputs = await images.read_all(inference, items)
    return await inference.respond(partial(body.job, inputs))


ROUTES: http.RouteTable = {
    ("POST", "/v1/embeddings"): openai.embeddings,
    ("POST", "/v1/multimodalembeddings"): _embed_contents,
    ("POST", "/v1/rerank"): rerank.handler(rerank.VOYAGE),
}
