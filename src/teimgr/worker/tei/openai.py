"""The OpenAI form of embeddings, as TEI speaks it: tokens counted, floats or base64."""

from __future__ import annotations

import base64
from functools import partial
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from typing_extensions import TypeAliasType

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.worker.tei.answers import to_json
from teimgr.worker.tei.fields import U32, Input, engine_inputs
from teimgr.worker.tei.inference import Inference, InferenceRequest, Served

# What the official service takes in one request; its clients cut their batches accordingly.
BATCH_LIMIT = 2048

EncodingFormat = TypeAliasType("EncodingFormat", Literal["float", "base64"])


class OpenAICompatRequest(InferenceRequest):
    """`POST /v1/embeddings`. `model` and `user` are read and not used: an instance serves one model."""

    input: Input
    model: Annotated[str | None, Field(description="not used")] = None
    user: Annotated[str | None, Field(description="not used")] = None
    encoding_format: EncodingFormat = "float"
    dimensions: U32 | None = None

    def inference(self, served: Served) -> Inference:
        """Dense vectors of length 1; truncation as the instance is set, on the right."""
        options = InferOptions(
            outputs=frozenset({Output.DENSE}), truncate=served.spec.auto_truncate, dimensions=self.dimensions
        )
        answer = partial(embedding_list, served.name, self.encoding_format == "base64")
        limit = max(BATCH_LIMIT, served.spec.max_client_batch_size)
        return Inference(engine_inputs(self.input), options, answer, limit)


def embedding_list(model: str, in_base64: bool, job: Job) -> bytes:
    """The list object of a finished job; usage counts every token, special ones and prompt included."""
    encode = _base64 if in_base64 else _floats
    return to_json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "embedding": encode(vector), "index": index}
                for index, vector in enumerate(job.vectors)
            ],
            "model": model,
            "usage": {"prompt_tokens": job.tokens, "total_tokens": job.tokens},
        }
    )


def _floats(vector: NDArray[np.float32]) -> NDArray[np.float32]:
    return vector


def _base64(vector: NDArray[np.float32]) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
