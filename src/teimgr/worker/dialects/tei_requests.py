"""The inference requests of TEI's own routes, one class per route."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, ValidationError
from typing_extensions import TypeAliasType

from teimgr.engine.job import InferOptions, Job, Output, Pair
from teimgr.errors import EmptyInput, InvalidInput
from teimgr.spec import ModelInfo
from teimgr.worker.http import answers
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import (
    U32,
    Body,
    Input,
    PredictInput,
    TruncationDirection,
    engine_inputs,
    first_fault,
    text_lists,
)
from teimgr.worker.http.inference import Inference, InferenceRequest, ServedModel
from teimgr.worker.scores import need_reranker_http, output_per_token

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

    def inference(self, served: ServedModel) -> Inference:
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


class Truncating(Body):
    """What happens to a text that is too long: null leaves it to the instance."""

    truncate: bool | None = None
    truncation_direction: TruncationDirection = "right"

    def options(self, served: ServedModel, output: Output, **more: Any) -> InferOptions:
        """Options for `output`; `more` are other fields of `InferOptions`."""
        return InferOptions(
            outputs=frozenset({output}),
            truncate=served.spec.auto_truncate if self.truncate is None else self.truncate,
            truncation_left=self.truncation_direction.lower() == "left",
            **more,
        )


class EmbedAllRequest(InferenceRequest, Truncating):
    """`POST /embed_all`: a vector per token."""

    inputs: Input
    prompt_name: str | None = None

    def inference(self, served: ServedModel) -> Inference:
        """Hidden states, or the token vectors that a late-interaction model makes of them."""
        output = output_per_token(served.model)
        return self._of_inputs(served, self.options(served, output, prompt_name=self.prompt_name), answers.per_token)

    def _of_inputs(self, served: ServedModel, options: InferOptions, answer: answers.Answer) -> Inference:
        return Inference(engine_inputs(self.inputs), options, answer, served.spec.max_client_batch_size)


class EmbedSparseRequest(EmbedAllRequest):
    """`POST /embed_sparse`: the weights of vocabulary entries."""

    def inference(self, served: ServedModel) -> Inference:
        """Sparse vectors."""
        options = self.options(served, Output.SPARSE, prompt_name=self.prompt_name)
        return self._of_inputs(served, options, answers.sparse)


class EmbedRequest(EmbedAllRequest):
    """`POST /embed`: a vector per input."""

    normalize: bool = True
    dimensions: U32 | None = None

    def inference(self, served: ServedModel) -> Inference:
        """Dense vectors."""
        options = self.options(
            served,
            Output.DENSE,
            prompt_name=self.prompt_name,
            normalize=self.normalize,
            dimensions=self.dimensions,
        )
        return self._of_inputs(served, options, answers.vectors)


class PredictRequest(InferenceRequest, Truncating):
    """`POST /predict`: a score per label. A list of strings is one text or one pair, a list of such lists a batch."""

    inputs: PredictInput
    raw_scores: bool = False

    def inference(self, served: ServedModel) -> Inference:
        """Scores, as a list per input where a batch was sent."""
        batch, is_batch = text_lists(self.inputs)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        answer = partial(answers.predictions, served.model.labels, is_batch)
        inputs = [texts[0] if len(texts) == 1 else Pair(*texts) for texts in batch]
        return Inference(inputs, options, answer, served.spec.max_client_batch_size)


class RerankRequest(InferenceRequest, Truncating):
    """`POST /rerank`: texts by how well they answer a query."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False

    def inference(self, served: ServedModel) -> Inference:
        """A score per pair of query and text."""
        if not self.texts:
            raise EmptyInput("`texts` cannot be empty")
        need_reranker_http(served.model)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        answer = partial(answers.ranks, self.texts if self.return_text else None)
        inputs = [Pair(self.query, text) for text in self.texts]
        return Inference(inputs, options, answer, served.spec.max_client_batch_size)


class SimilarityInput(Body):
    """A sentence, and those it is compared with."""

    source_sentence: str
    sentences: list[str]


class SimilarityParameters(Truncating):
    """How the sentences are embedded."""

    prompt_name: str | None = None


class SimilarityRequest(InferenceRequest):
    """`POST /similarity`: how near sentences are to one sentence."""

    inputs: SimilarityInput
    parameters: SimilarityParameters | None = None

    def inference(self, served: ServedModel) -> Inference:
        """Dense vectors as the model gives them; what is told is the cosine of the first with each of the others."""
        if not self.inputs.sentences:
            raise EmptyInput("`inputs.sentences` cannot be empty")
        parameters = self.parameters or SimilarityParameters()
        options = parameters.options(served, Output.DENSE, prompt_name=parameters.prompt_name, normalize=False)
        inputs = [self.inputs.source_sentence, *self.inputs.sentences]
        return Inference(inputs, options, answers.similarities, served.spec.max_client_batch_size)


# What a request that names no task asks for.
REQUEST_OF_KIND: dict[str, type[InferenceRequest]] = {
    "embedding": EmbedRequest,
    "sparse": EmbedSparseRequest,
    "multi-vector": EmbedAllRequest,
    "reranker": RerankRequest,
    "classifier": PredictRequest,
}

# A rerank request is known by its fields.
_OF_KIND = REQUEST_OF_KIND | {"reranker": PredictRequest}


class VertexRequest(Body):
    """`POST /vertex`: what an instance may be depends on the model."""

    instances: Annotated[list[Any], Field(fail_fast=True)]

    def requests(self, model: ModelInfo) -> list[InferenceRequest]:
        """Each instance as a rerank request if it is one, else as the request of the model's kind.

        Raises:
            InvalidInput: an instance is neither.
        """
        return [_request(place, instance, _OF_KIND[model.kind]) for place, instance in enumerate(self.instances)]


def predictions(bodies: Sequence[bytes]) -> bytes:
    """The answers of the single requests in one body."""
    return orjson.dumps({"predictions": [orjson.Fragment(body) for body in bodies]})


def _request(place: int, instance: Any, kind: type[InferenceRequest]) -> InferenceRequest:
    if isinstance(instance, dict) and instance.keys() >= {"query", "texts"}:
        kind = RerankRequest
    try:
        return kind.model_validate(instance)
    except ValidationError as error:
        raise InvalidInput(f"Failed to deserialize instance {place}: {first_fault(error)}") from error
