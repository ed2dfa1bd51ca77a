"""OpenAI's `/v1/embeddings`, as its own service answers it: https://platform.openai.com/docs/api-reference/embeddings."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypeAliasType

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.errors import EmptyInput
from teimgr.worker import http_inference as http

# What the official service takes in one request; its clients cut their batches accordingly.
BATCH_LIMIT = 2048

EncodingFormat = TypeAliasType("EncodingFormat", Literal["float", "base64"])


class OpenAIEmbeddingsRequest(http.InferenceRequest):
    """What to embed: a text, texts, token ids, or lists of token ids."""

    model: http.ModelName = None
    input: http.Input
    encoding_format: EncodingFormat | None = "float"
    dimensions: Annotated[http.U32 | None, Field(description="leading dimensions to keep")] = None
    user: Annotated[str | None, Field(description="not used")] = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        """Dense vectors of length 1; truncation as the instance is set."""
        inputs = http.engine_inputs(self.input)
        if any(one is None or not len(one) for one in inputs):
            raise EmptyInput("`input` cannot be an empty string or an empty array")
        options = InferOptions(
            outputs=frozenset({Output.DENSE}), truncate=served.spec.auto_truncate, dimensions=self.dimensions
        )
        encode = partial(embedding_list, self.model or served.name, self.encoding_format == "base64")
        return http.JobSpec(inputs, options, encode, BATCH_LIMIT)


def embedding_list(model: str, in_base64: bool, job: Job) -> bytes:
    data = embedding_objects(job.vectors, in_base64)
    return http.to_json({"object": "list", "data": data, "model": model, "usage": http.usage(job.tokens)})


def embedding_objects(rows: Iterable[Any], in_base64: bool) -> list[dict[str, Any]]:
    return [
        {"object": "embedding", "embedding": http.encoded_vector(row, in_base64), "index": index}
        for index, row in enumerate(rows)
    ]


ROUTES: http.RouteTable = {("POST", "/v1/embeddings"): http.single(OpenAIEmbeddingsRequest)}
