"""Requests of TEI's own routes, one class per route, and their answers as TEI writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field, ValidationError

from teimgr.engine.job import InferOptions, Job, Output, Pair
from teimgr.errors import EmptyInput, InvalidInput
from teimgr.spec import LoadedModel
from teimgr.worker import scores
from teimgr.worker.dialects.openai import BATCH_LIMIT, EncodingFormat, embedding_list
from teimgr.worker.http.bodies import (
    U32,
    Body,
    Input,
    InputIds,
    PredictInput,
    TokenizeInput,
    TruncationDirection,
    engine_inputs,
    first_error,
    to_json,
)
from teimgr.worker.http.inference import InferenceRequest, JobSpec, ServedModel
from teimgr.worker.limits import over_limit

if TYPE_CHECKING:  # importing the engine imports torch
    from teimgr.engine.engine import Engine


class OpenAICompatRequest(InferenceRequest):
    """`POST /v1/embeddings`. `model` and `user` are read and not used: an instance serves one model."""

    input: Input
    model: Annotated[str | None, Field(description="not used")] = None
    user: Annotated[str | None, Field(description="not used")] = None
    encoding_format: EncodingFormat = "float"
    dimensions: U32 | None = None

    def job(self, served: ServedModel) -> JobSpec:
        """Dense vectors of length 1; truncation as the instance is set, on the right."""
        options = InferOptions(
            outputs=frozenset({Output.DENSE}), truncate=served.spec.auto_truncate, dimensions=self.dimensions
        )
        encode = partial(embedding_list, served.name, self.encoding_format == "base64")
        limit = max(BATCH_LIMIT, served.spec.max_client_batch_size)
        return JobSpec(engine_inputs(self.input), options, encode, limit)


def vectors(job: Job) -> bytes:
    """`[[0.1, …], …]`: always a list of lists, for one input too."""
    return to_json(job.vectors)


def per_token(job: Job) -> bytes:
    """`[[[0.1, …], …], …]`: input, token, value."""
    return to_json([np.ascontiguousarray(rows) for rows in job.multi_vectors or job.tokens_of])


def sparse(job: Job) -> bytes:
    """`[[{"index": 5, "value": 0.1}, …], …]`, ascending indices."""
    rows = [
        [{"index": index, "value": value} for index, value in zip(vector.indices.tolist(), vector.values, strict=True)]
        for vector in job.sparse
        if vector is not None
    ]
    return to_json(rows)


def predictions(labels: Sequence[str], is_batch: bool, job: Job) -> bytes:
    """`[{"score": 0.9, "label": "x"}, …]`, best first, or a list of those for a batch."""
    rows = [[one._asdict() for one in scores.predictions(row, labels)] for row in job.scores]
    return to_json(rows if is_batch else rows[0])


def ranks(texts: Sequence[str] | None, job: Job) -> bytes:
    """`[{"index": 1, "score": 0.9}, …]`, best first; with the text between the two where `texts` are given."""
    return to_json(
        [
            {"index": rank.row, **({} if texts is None else {"text": texts[rank.row]}), "score": rank.score}
            for rank in scores.ranks(job.scores)
        ]
    )


def similarities(job: Job) -> bytes:
    """`[0.9, …]`: the cosine of the first vector with each of the others; 0 where one of the two is zero."""
    wide = job.vectors.astype(np.float64)
    lengths = np.linalg.norm(wide, axis=1)
    products = lengths[0] * lengths[1:]
    dots = wide[1:] @ wide[0]
    cosines = np.divide(dots, products, out=np.zeros_like(dots), where=products > 0)
    return to_json(cosines.astype(np.float32))


class TeiTruncation(Body):
    """Fields for texts that are too long: null leaves it to the instance."""

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


class TeiEmbedAllRequest(InferenceRequest, TeiTruncation):
    """`POST /embed_all`: a vector per token."""

    inputs: Input
    prompt_name: str | None = None

    def job(self, served: ServedModel) -> JobSpec:
        """Hidden states, or the token vectors that a late-interaction model makes of them."""
        return self._job(served, scores.output_per_token(served.model), per_token)

    def _job(self, served: ServedModel, output: Output, encode: Callable[[Job], bytes], **more: Any) -> JobSpec:
        options = self.options(served, output, prompt_name=self.prompt_name, **more)
        return JobSpec(engine_inputs(self.inputs), options, encode, served.spec.max_client_batch_size)


class TeiEmbedSparseRequest(TeiEmbedAllRequest):
    """`POST /embed_sparse`: the weights of vocabulary entries."""

    def job(self, served: ServedModel) -> JobSpec:
        return self._job(served, Output.SPARSE, sparse)


class TeiEmbedRequest(TeiEmbedAllRequest):
    """`POST /embed`: a vector per input."""

    normalize: bool = True
    dimensions: U32 | None = None

    def job(self, served: ServedModel) -> JobSpec:
        return self._job(served, Output.DENSE, vectors, normalize=self.normalize, dimensions=self.dimensions)


class TeiPredictRequest(InferenceRequest, TeiTruncation):
    """`POST /predict`: a score per label. A list of strings is one text or one pair, a list of such lists a batch."""

    inputs: PredictInput
    raw_scores: bool = False

    def job(self, served: ServedModel) -> JobSpec:
        """Scores, as a list per input where a batch was sent."""
        batch: list[list[str]] = [[self.inputs]] if isinstance(self.inputs, str) else _batch(self.inputs)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        encode = partial(predictions, served.model.labels, batch is self.inputs)
        inputs = [texts[0] if len(texts) == 1 else Pair(*texts) for texts in batch]
        return JobSpec(inputs, options, encode, served.spec.max_client_batch_size)


class TeiRerankRequest(InferenceRequest, TeiTruncation):
    """`POST /rerank`: texts by how well they answer a query."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False

    def job(self, served: ServedModel) -> JobSpec:
        """A score per pair of query and text."""
        if not self.texts:
            raise EmptyInput("`texts` cannot be empty")
        scores.need_reranker_http(served.model)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        encode = partial(ranks, self.texts if self.return_text else None)
        inputs = [Pair(self.query, text) for text in self.texts]
        return JobSpec(inputs, options, encode, served.spec.max_client_batch_size)


class TeiSimilarityInput(Body):
    """A sentence, and those it is compared with."""

    source_sentence: str
    sentences: list[str]


class TeiSimilarityParameters(TeiTruncation):
    """How the sentences are embedded."""

    prompt_name: str | None = None


class TeiSimilarityRequest(InferenceRequest):
    """`POST /similarity`: how near sentences are to one sentence."""

    inputs: TeiSimilarityInput
    parameters: TeiSimilarityParameters | None = None

    def job(self, served: ServedModel) -> JobSpec:
        """Dense vectors, not normalized; the answer is the cosine of the first with each of the others."""
        if not self.inputs.sentences:
            raise EmptyInput("`inputs.sentences` cannot be empty")
        parameters = self.parameters or TeiSimilarityParameters()
        options = parameters.options(served, Output.DENSE, prompt_name=parameters.prompt_name, normalize=False)
        inputs = [self.inputs.source_sentence, *self.inputs.sentences]
        return JobSpec(inputs, options, similarities, served.spec.max_client_batch_size)


# The request class of a body on a path that names no task.
REQUEST_OF_KIND: dict[str, type[InferenceRequest]] = {
    "embedding": TeiEmbedRequest,
    "sparse": TeiEmbedSparseRequest,
    "multi-vector": TeiEmbedAllRequest,
    "reranker": TeiRerankRequest,
    "classifier": TeiPredictRequest,
}

# On /vertex a rerank request is recognized by its fields.
_OF_KIND = REQUEST_OF_KIND | {"reranker": TeiPredictRequest}


class TeiVertexRequest(Body):
    """`POST /vertex`: what an instance may be depends on the model."""

    instances: Annotated[list[Any], Field(fail_fast=True)]

    def requests(self, model: LoadedModel) -> list[InferenceRequest]:
        """Each instance as a rerank request if it is one, else as the request of the model's kind.

        Raises:
            InvalidInput: an instance is neither.
        """
        found: list[InferenceRequest] = []
        for place, instance in enumerate(self.instances):
            is_rerank = isinstance(instance, dict) and instance.keys() >= {"query", "texts"}
            kind = TeiRerankRequest if is_rerank else _OF_KIND[model.kind]
            try:
                found.append(kind.model_validate(instance))
            except ValidationError as error:
                raise InvalidInput(f"Failed to deserialize instance {place}: {first_error(error)}") from error
        return found


class TokenizeRequest(Body):
    """`POST /tokenize`: the tokens of texts, untruncated."""

    inputs: TokenizeInput
    add_special_tokens: bool = True
    prompt_name: str | None = None

    def answer(self, engine: Engine, limit: int) -> bytes:
        """`[[{"id": 101, "text": "[CLS]", "special": true, "start": null, "stop": null}, …], …]`.

        Blocks while the tokenizer works, on at most `limit` texts.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not texts:
            raise EmptyInput("`inputs` cannot be empty")
        _check_count(texts, limit)
        tokens = (engine.tokenize(text, self.add_special_tokens, self.prompt_name) for text in texts)
        return to_json([[asdict(token) for token in of_text] for of_text in tokens])


class DecodeRequest(Body):
    """`POST /decode`: the texts of token ids."""

    ids: InputIds
    skip_special_tokens: bool = True

    def answer(self, engine: Engine, limit: int) -> bytes:
        """`["what is deep learning?", …]`; otherwise as `TokenizeRequest.answer`."""
        batch: list[list[int]] = _batch(self.ids)
        _check_count(batch, limit)
        return to_json([engine.decode(ids, self.skip_special_tokens) for ids in batch])


def _check_count(batch: Sequence[object], limit: int) -> None:
    if (message := over_limit(len(batch), limit)) is not None:
        raise InvalidInput(message)


def _batch(value: Any) -> Any:
    """A list of lists as it is, anything else as a batch of one."""
    return value if value and isinstance(value[0], list) else [value]
