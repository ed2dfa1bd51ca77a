"""OpenAI's `/v1/embeddings`, as its own service answers it: https://platform.openai.com/docs/api-reference/embeddings."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from pydantic import Field

from teimgr.engine.job import InferOptions, Input, Output
from teimgr.errors import EmptyInput
from teimgr.worker.dialects.tei_requests import BATCH_LIMIT, EncodingFormat, embedding_list
from teimgr.worker.http.bodies import U32, engine_inputs
from teimgr.worker.http.bodies import Input as InputField
from teimgr.worker.http.common import simple
from teimgr.worker.http.inference import HttpHandler, Inference, InferenceRequest, ServedModel


class EmbeddingsRequest(InferenceRequest):
    """What to embed: a text, texts, token ids, or lists of token ids."""

    model: Annotated[str | None, Field(description="an instance, a model id or an alias")] = None
    input: InputField
    encoding_format: EncodingFormat | None = "float"
    dimensions: Annotated[U32 | None, Field(description="leading dimensions to keep")] = None
    user: Annotated[str | None, Field(description="not used")] = None

    def inference(self, served: ServedModel) -> Inference:
        """Dense vectors of length 1; truncation as the instance is set."""
        inputs = engine_inputs(self.input)
        if any(_is_empty(one) for one in inputs):
            raise EmptyInput("`input` cannot be an empty string or an empty array")
        options = InferOptions(
            outputs=frozenset({Output.DENSE}), truncate=served.spec.auto_truncate, dimensions=self.dimensions
        )
        answer = partial(embedding_list, self.model or served.name, self.encoding_format == "base64")
        return Inference(inputs, options, answer, BATCH_LIMIT)


def _is_empty(one: Input) -> bool:
    return one is None or not len(one)


ROUTES: dict[tuple[str, str], HttpHandler] = {("POST", "/v1/embeddings"): simple(EmbeddingsRequest)}
