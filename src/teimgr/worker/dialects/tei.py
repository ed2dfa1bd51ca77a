"""TEI's routes (Text Embeddings Inference 1.9.3), on an instance's own port and on the daemon's.

One class per request, the encoders of answers, then the handlers. Bodies, messages and orders are TEI's; headers of
inference answers have their cost.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from teimgr import __version__
from teimgr.engine.job import InferOptions, Job, Output, Pair
from teimgr.engine.job import Input as EngineInput
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError, TooLarge
from teimgr.spec import Kind, LoadedModel
from teimgr.wire.frames import Buffer, HttpReply, HttpRequest
from teimgr.wire.gil import free
from teimgr.wire.json_pieces import joined
from teimgr.wire.json_scan import Steps, copied, mentions
from teimgr.wire.quantisation import Precision
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks, scores
from teimgr.worker.calls import within
from teimgr.worker.dialects import tei_bodies
from teimgr.worker.dialects.openai import BATCH_LIMIT, EncodingFormat, embedding_list
from teimgr.worker.dialects.rerank import relevance
from teimgr.worker.dialects.serde_json import Fault
from teimgr.worker.dialects.serde_types import Optional, Struct, Type, read_body
from teimgr.worker.dialects.tei_bodies import is_ambiguous, may_be_ambiguous, may_be_deep
from teimgr.worker.dispatcher import Dispatcher
from teimgr.worker.scores import Aggregation, entities

if TYPE_CHECKING:  # importing the engine imports torch
    from teimgr.engine.engine import Engine


_U64_MAX = 2**64 - 1
_ENTRIES_AT_ONCE = 10_000
Dimensions = Annotated[int, Field(ge=0, le=_U64_MAX)] | None
Patches = Annotated[
    bool, Field(description="adds the indices of vectors of a page image's patches; each answer is then an object")
]


class OpenAICompatRequest(http.InferenceRequest):
    """`POST /v1/embeddings`. `model` and `user` are ignored: an instance serves one model."""

    input: http.Input
    model: Annotated[str | None, Field(description="not used")] = None
    user: Annotated[str | None, Field(description="not used")] = None
    encoding_format: EncodingFormat = "float"
    dimensions: Dimensions = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        """Dense vectors of length 1; truncation as the instance is set, on the right."""
        options = InferOptions(
            outputs=frozenset({Output.DENSE}), truncate=served.spec.auto_truncate, dimensions=self.dimensions
        )
        encode = partial(embedding_list, served.tei_name, self.encoding_format == "base64", Precision.FLOAT32)
        limit = max(BATCH_LIMIT, served.spec.max_client_batch_size)
        return http.JobSpec(http.engine_inputs(self.input, limit), options, encode, limit)


def per_token(job: Job) -> bytes:
    """`[[[0.1, …], …], …]`: input, token, value."""
    return http.to_json([np.ascontiguousarray(rows) for rows in job.multi_vectors or job.tokens_of])


def with_patches(patches: Sequence[NDArray[np.int64] | None], job: Job) -> bytes:
    """`[{"vectors": [[0.1, …], …], "patches": {"rows": 1, "columns": 2, "vectors": [4, 5]}}, …]`, null of a text."""
    return http.to_json(
        [
            {
                "vectors": np.ascontiguousarray(rows),
                "patches": None
                if own is None
                else {"rows": own.shape[0], "columns": own.shape[1], "vectors": own.ravel()},
            }
            for rows, own in zip(job.multi_vectors or job.tokens_of, patches, strict=True)
        ]
    )


def sparse(job: Job) -> bytes:
    """`[[{"index": 5, "value": 0.1}, …], …]`, ascending indices."""
    return joined(_entries(job))


def _entries(job: Job) -> Iterator[bytes]:
    """Some entries at a time: a million objects at once take 0.1 s to free."""
    yield b"["
    for number, vector in enumerate(one for one in job.sparse if one is not None):
        yield b",[" if number else b"["
        indices, values = vector.indices.tolist(), vector.values
        for at in range(0, len(indices), _ENTRIES_AT_ONCE):
            entries = http.to_json(
                [
                    {"index": index, "value": value}
                    for index, value in zip(indices[at : at + _ENTRIES_AT_ONCE], values[at:], strict=False)
                ]
            )
            yield (b"," if at else b"") + entries[1:-1]
        yield b"]"
    yield b"]"


def predictions(labels: Sequence[str], is_batch: bool, job: Job) -> bytes:
    """`[{"score": 0.9, "label": "x"}, …]`, best first, or a list of those for a batch."""
    rows = [[one._asdict() for one in scores.predictions(row, labels)] for row in job.scores]
    return http.to_json(rows if is_batch else rows[0])


def ranks(texts: Sequence[str] | None, job: Job) -> bytes:
    """`[{"index": 1, "score": 0.9}, …]`, best first; with the text between the two where `texts` are given."""
    return http.to_json(
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
    return http.to_json(cosines.astype(np.float32))


class TeiTruncation(http.Body):
    """Fields for texts that are too long; null means the instance's default."""

    truncate: bool | None = None
    truncation_direction: http.TruncationDirection = "right"

    def options(self, served: http.ServedModel, output: Output, **more: Any) -> InferOptions:
        return InferOptions(
            outputs=frozenset({output}),
            truncate=served.spec.auto_truncate if self.truncate is None else self.truncate,
            truncation_left=self.truncation_direction.lower() == "left",
            names_side="truncation_direction" in self.__pydantic_fields_set__,
            **more,
        )


class TeiInputsRequest(http.InferenceRequest, TeiTruncation):
    """Fields of all requests for vectors."""

    inputs: http.Input
    prompt_name: str | None = None

    def _job(
        self, served: http.ServedModel, output: Output, encode: Callable[[Job], bytes], **more: Any
    ) -> http.JobSpec:
        options = self.options(served, output, prompt_name=self.prompt_name, **more)
        limit = served.spec.max_client_batch_size
        return http.JobSpec(http.engine_inputs(self.inputs, limit), options, encode, limit)


class TeiEmbedAllRequest(TeiInputsRequest):
    """`POST /embed_all`: a vector per token."""

    pool_factor: http.PoolFactor = 1.0
    patches: Patches = False

    def job(self, served: http.ServedModel) -> http.JobSpec:
        """Hidden states, or the token vectors that a late-interaction model makes of them."""
        found = self._job(served, scores.output_per_token(served.model), per_token, pool_factor=self.pool_factor)
        return replace(found, encode=partial(with_patches, [None] * len(found.inputs))) if self.patches else found


class TeiEmbedSparseRequest(TeiInputsRequest):
    """`POST /embed_sparse`: the weights of vocabulary entries."""

    def job(self, served: http.ServedModel) -> http.JobSpec:
        return self._job(served, Output.SPARSE, sparse)


class TeiEmbedRequest(TeiInputsRequest):
    """`POST /embed`: a vector per input."""

    normalize: bool = True
    dimensions: Dimensions = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        options = {"normalize": self.normalize, "dimensions": self.dimensions}
        return self._job(served, Output.DENSE, lambda job: http.to_json(job.vectors, job.vectors.size), **options)


class TeiItemsRequest(TeiEmbedRequest):
    """`POST /embed` with typed items, which TEI lacks: texts and images, or one of them."""

    inputs: Any

    @property
    def given(self) -> list[Any]:
        return self.inputs if isinstance(self.inputs, list) else [self.inputs]

    def job_of(self, inputs: list[EngineInput], served: http.ServedModel) -> http.JobSpec:
        """A vector per item."""
        options = self.options(
            served, Output.DENSE, prompt_name=self.prompt_name, normalize=self.normalize, dimensions=self.dimensions
        )
        encode = _vectors
        return http.JobSpec(inputs, options, encode, served.spec.max_client_batch_size)


class TeiAllItemsRequest(TeiItemsRequest):
    """`POST /embed_all` with typed items."""

    pool_factor: http.PoolFactor = 1.0
    patches: Patches = False

    def job_of(self, inputs: list[EngineInput], served: http.ServedModel) -> http.JobSpec:
        """A vector per token of each item."""
        output = scores.output_per_token(served.model)
        options = self.options(served, output, prompt_name=self.prompt_name, pool_factor=self.pool_factor)
        encode = per_token
        if self.patches and self.pool_factor != 1.0:
            message = "patches: pooled vectors belong to no patch: leave out `pool_factor` or `patches`"
            raise http.BadRequest(422, message, "patches")
        if self.patches:
            assert served.tokenizer is not None
            encode = partial(with_patches, [served.tokenizer.patches(one) for one in inputs])
        return http.JobSpec(inputs, options, encode, served.spec.max_client_batch_size)


def _vectors(job: Job) -> bytes:
    return http.to_json(job.vectors, job.vectors.size)


class TeiPredictRequest(http.InferenceRequest, TeiTruncation):
    """`POST /predict`: a score per label. A list of strings is one text or one pair, a list of such lists a batch."""

    inputs: http.PredictInput
    raw_scores: bool = False
    aggregation_strategy: Annotated[
        Any, Field(description="none, or simple for groups of tokens; only for token classifiers; not in TEI")
    ] = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        """Scores, as a list per input where a batch was sent."""
        batch: list[list[str]] = [[self.inputs]] if isinstance(self.inputs, str) else _batch(self.inputs)
        if served.model.kind == Kind.TOKEN_CLASSIFIER:
            return self._entities(served, batch)
        if self.aggregation_strategy is not None:
            raise InvalidInput("Input validation error: `aggregation_strategy` is for token classifiers")
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores)
        encode = partial(predictions, served.model.labels, batch is self.inputs)
        http.check_count(len(batch), served.spec.max_client_batch_size)
        inputs = [texts[0] if len(texts) == 1 else Pair(*texts) for texts in batch]
        return http.JobSpec(inputs, options, encode, served.spec.max_client_batch_size)

    def _entities(self, served: http.ServedModel, batch: list[list[str]]) -> http.JobSpec:
        """The entities of each text of a batch; a list of them without one."""
        if any(len(texts) != 1 for texts in batch):
            raise InvalidInput("Input validation error: `inputs` cannot be pairs for a token classifier")
        if self.raw_scores:
            raise InvalidInput("Input validation error: `raw_scores` is not available for token classifiers")
        limit, tokenizer = served.spec.max_client_batch_size, served.tokenizer
        http.check_count(len(batch), limit)
        options = self.options(served, Output.TOKENS, prompt="")
        how: Aggregation = "simple" if self.aggregation_strategy is None else self.aggregation_strategy
        if how not in get_args(Aggregation):
            raise InvalidInput("Input validation error: `aggregation_strategy` must be none or simple")
        assert tokenizer is not None

        def encode(job: Job) -> bytes:
            rows = [
                []
                if logits is None
                else entities(text, logits, served.model.labels, tokenizer, how, options.truncation_left)
                for text, logits in zip(job.inputs, job.tokens_of, strict=True)
            ]
            return http.to_json(rows if batch is self.inputs else rows[0])

        return http.JobSpec([text for texts in batch for text in texts], options, encode, limit, is_slow=True)


class TeiRerankRequest(http.InferenceRequest, TeiTruncation):
    """`POST /rerank`: texts by relevance to a query."""

    query: str
    texts: list[str]
    raw_scores: bool = False
    return_text: bool = False

    def job(self, served: http.ServedModel) -> http.JobSpec:
        """A score per pair of query and text."""
        if not self.texts:
            raise EmptyInput("`texts` cannot be empty")
        scores.need_reranker_http(served.model)
        options = self.options(served, Output.SCORES, raw_scores=self.raw_scores, listed=True)
        http.check_count(len(self.texts), served.spec.max_client_batch_size)
        encode = partial(ranks, self.texts if self.return_text else None)
        inputs = [Pair(self.query, text) for text in self.texts]
        return http.JobSpec(inputs, options, encode, served.spec.max_client_batch_size)


class TeiRerankItemsRequest(TeiRerankRequest):
    """`POST /rerank` with typed items, which TEI lacks: texts, images, or both in one."""

    query: Any
    texts: Annotated[list[Any], Field(fail_fast=True)]

    @property
    def given(self) -> list[Any]:
        return [self.query, *self.texts]


_WITH_ITEMS: dict[type[http.Body], type[TeiItemsRequest | TeiRerankItemsRequest]] = {
    TeiEmbedRequest: TeiItemsRequest,
    TeiEmbedAllRequest: TeiAllItemsRequest,
    TeiRerankRequest: TeiRerankItemsRequest,
}


class TeiSimilarityInput(http.Body):
    """A sentence, and the sentences to compare with it."""

    source_sentence: str
    sentences: list[str]


class TeiSimilarityParameters(TeiTruncation):
    """How the sentences are embedded."""

    prompt_name: str | None = None


class TeiSimilarityRequest(http.InferenceRequest):
    """`POST /similarity`: similarity of sentences to one sentence."""

    inputs: TeiSimilarityInput
    parameters: TeiSimilarityParameters | None = None

    def job(self, served: http.ServedModel) -> http.JobSpec:
        """Dense vectors, not normalized; the answer is the cosine of the first with each of the others."""
        if not self.inputs.sentences:
            raise EmptyInput("`inputs.sentences` cannot be empty")
        parameters = self.parameters or TeiSimilarityParameters()
        options = parameters.options(served, Output.DENSE, prompt_name=parameters.prompt_name, normalize=False)
        http.check_count(1 + len(self.inputs.sentences), served.spec.max_client_batch_size)
        inputs = [self.inputs.source_sentence, *self.inputs.sentences]
        return http.JobSpec(inputs, options, similarities, served.spec.max_client_batch_size)


# The request class of paths without a task, by kind of model.
REQUEST_OF_KIND: dict[str, type[http.InferenceRequest]] = {
    Kind.EMBEDDING: TeiEmbedRequest,
    Kind.SPARSE: TeiEmbedSparseRequest,
    Kind.MULTI_VECTOR: TeiEmbedAllRequest,
    Kind.RERANKER: TeiRerankRequest,
    Kind.CLASSIFIER: TeiPredictRequest,
    Kind.TOKEN_CLASSIFIER: TeiPredictRequest,
}

# On /vertex, a rerank request is recognised by its fields.
_OF_KIND = REQUEST_OF_KIND | {Kind.RERANKER: TeiPredictRequest}


class TeiVertexRequest(http.Body):
    """`POST /vertex`: the form of an instance depends on the model."""

    instances: Annotated[list[Any], Field(fail_fast=True)]

    def requests(self, model: LoadedModel) -> list[http.InferenceRequest]:
        """Each instance as a rerank request if it is one, else as the request of the model's kind.

        Raises:
            InvalidInput: an instance is neither.
        """
        found: list[http.InferenceRequest] = []
        for instance in self.instances:
            is_rerank = isinstance(instance, dict) and instance.keys() >= {"query", "texts"}
            kind = TeiRerankRequest if is_rerank else _OF_KIND[model.kind]
            try:
                found.append(kind.model_validate(instance))
            except ValidationError:
                found.append(_of_instance(instance, model))
        return found


def _of_instance(instance: Any, model: LoadedModel) -> http.InferenceRequest:
    """An instance that is not a plain object as TEI's parser takes it.

    Raises:
        InvalidInput: it is not a request of the model's kind; with the words of the parser.
    """
    with suppress(Fault):
        return TeiRerankRequest.model_validate(tei_bodies.RERANK.of_value(instance))
    kind = _OF_KIND[model.kind]
    try:
        return kind.model_validate(_TYPES[kind].of_value(instance))
    except Fault as fault:
        raise InvalidInput(fault.message) from fault


class TokenizeRequest(http.Body):
    """`POST /tokenize`: the tokens of texts, untruncated."""

    inputs: http.TokenizeInput
    add_special_tokens: bool = True
    prompt_name: str | None = None

    def items(self, limit: int) -> Sequence[str]:
        """At most `limit` texts; raises EmptyInput, InvalidInput."""
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not texts:
            raise EmptyInput("`inputs` cannot be empty")
        http.check_count(len(texts), limit)
        return texts

    def answer(self, engine: Engine, text: str) -> Steps[bytes]:
        """`[{"id": 101, "text": "[CLS]", "special": true, "start": null, "stop": null}, …]` of one text.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        tokens = yield from engine.tokenized(text, self.add_special_tokens, self.prompt_name)
        try:
            parts = []
            for at in range(0, len(tokens), _TOKENS_AT_ONCE):
                parts.append(http.to_json(tokens[at : at + _TOKENS_AT_ONCE])[1:-1])
                yield
            return joined(_listed(parts))
        finally:
            free(tokens)


# Bytes joined on the event loop in one call: half a millisecond.
_COPIED_BYTES = 2**20


def _listed(parts: Iterable[Buffer]) -> Iterator[Buffer]:
    """The pieces of a JSON list of these."""
    yield b"["
    for number, part in enumerate(parts):
        if number:
            yield b","
        yield part
    yield b"]"


async def _whole(dispatcher: Dispatcher, pieces: Iterable[Buffer], size: int) -> bytes:
    """Pieces of `size` bytes as one, joined on a thread if they are large."""
    if size <= _COPIED_BYTES:
        return joined(pieces)
    return await dispatcher.off_loop(joined, pieces)


class DecodeRequest(http.Body):
    """`POST /decode`: the texts of token ids."""

    ids: http.InputIds
    skip_special_tokens: bool = True

    def items(self, limit: int) -> Sequence[Sequence[int]]:
        """At most `limit` lists of ids; raises InvalidInput."""
        batch: list[list[int]] = _batch(self.ids)
        http.check_count(len(batch), limit)
        return batch

    def answer(self, engine: Engine, ids: Sequence[int]) -> Steps[bytes]:
        """`"what is deep learning?"`; otherwise as `TokenizeRequest.answer`."""
        yield
        return http.to_json(engine.tokenizer.decode(ids, self.skip_special_tokens))


# The type of each request in TEI's parser.
_TYPES: Mapping[type[http.Body], Struct] = {
    TeiEmbedRequest: tei_bodies.EMBED,
    TeiEmbedAllRequest: tei_bodies.EMBED_ALL,
    TeiEmbedSparseRequest: tei_bodies.EMBED_SPARSE,
    TeiPredictRequest: tei_bodies.PREDICT,
    TeiRerankRequest: tei_bodies.RERANK,
    TeiSimilarityRequest: tei_bodies.SIMILARITY,
    OpenAICompatRequest: tei_bodies.OPENAI,
    TokenizeRequest: tei_bodies.TOKENIZE,
    DecodeRequest: tei_bodies.DECODE,
    TeiVertexRequest: tei_bodies.VERTEX,
}


def _may_be_ambiguous(kind: type[http.Body], body: Buffer) -> bool:
    found = copied(body)
    return (kind is TeiVertexRequest and may_be_deep(found)) or may_be_ambiguous(_quoted_fields(kind), found)


@cache
def _quoted_fields(kind: type[http.Body]) -> frozenset[bytes]:
    return frozenset(f'"{name}"'.encode() for name in _fields_within(_TYPES[kind]))


def _fields_within(kind: Type) -> Iterator[str]:
    """The names of the fields of a struct and of the structs in it."""
    if isinstance(kind, Optional):
        yield from _fields_within(kind.inner)
    elif isinstance(kind, Struct):
        for name, one in kind.fields.items():
            yield name
            yield from _fields_within(one.type)


def _reparse(kind: type[http.BodyT], body: Buffer, quick: http.BodyT | None) -> Steps[http.BodyT]:
    """The body as TEI's parser reads it; raises BadRequest in its words.

    That takes up to a microsecond a byte, so for one that only looked ambiguous what was found quickly counts.
    """
    found = copied(body)
    if quick is not None and not (
        (yield from is_ambiguous(_quoted_fields(kind), found)) or (kind is TeiVertexRequest and may_be_deep(found))
    ):
        return quick
    own = _WITH_ITEMS.get(kind) if quick is None and mentions(found, b'"type"') else None
    if own is not None and (items := _items(own, found)) is not None:
        return cast(http.BodyT, items)
    try:
        return kind.model_validate((yield from read_body(_TYPES[kind], found)))
    except Fault as fault:
        if fault.is_syntax:
            message = f"Failed to parse the request body as JSON: {fault.sentence(found)}"
            text = http.broken_text(found)
            raise http.BadRequest(400, message, input_index=text.input_index if text else None) from fault
        message = f"Failed to deserialize the JSON body into the target type: {fault.sentence(found)}"
        raise http.BadRequest(422, message) from fault


def _items(kind: type[TeiItemsRequest | TeiRerankItemsRequest], body: bytes) -> Any:
    """A body whose inputs are items of a type, or have such among them; None for another one."""
    with suppress(http.BadRequest, InvalidInput):
        found = http.decoded(kind, body, http.JSON_BODY)
        return found if any(isinstance(one, dict) for one in found.given) else None
    return None


TEI_BODY = http.BodyFormat(is_ambiguous=_may_be_ambiguous, reparse=_reparse)


# Tokens written to JSON in one call, which holds the GIL.
_TOKENS_AT_ONCE = 10_000


def _batch(value: Any) -> Any:
    return value if value and isinstance(value[0], list) else [value]


def info(served: http.ServedModel) -> dict[str, Any]:
    """The answer of `/info`: TEI's fields in its order, then teimgr's own."""
    spec, model = served.spec, served.model
    return {
        "model_id": model.model_id,
        "model_sha": model.model_sha,
        "model_dtype": model.dtype,
        "served_model_name": served.tei_name,
        "model_type": _model_type(model),
        "max_concurrent_requests": spec.max_concurrent_requests,
        "max_input_length": model.max_input_length,
        "max_batch_tokens": model.max_batch_tokens,
        "max_batch_requests": spec.max_batch_requests,
        "max_client_batch_size": spec.max_client_batch_size,
        "auto_truncate": spec.auto_truncate,
        "tokenization_workers": model.tokenization_workers,
        "version": __version__,
        "sha": None,
        "docker_label": None,
        "kind": model.kind,
        "outputs": list(model.outputs),
        "dimension": model.dimension,
        "multi_vector_dimension": model.multi_vector_dimension,
        "token_dimension": model.token_dimension,
        "activation": model.activation,
        "commit": model.commit,
        "device": model.device,
        "batching": model.batching,
        "attention": model.attention,
        "forward": model.forward,
        "fidelity": {"mean_cosine": model.mean_cosine, "min_cosine": model.min_cosine},
        "dtype_choice": {"reason": model.dtype_reason, "candidates": list(model.dtype_candidates)},
        "prompts": list(model.prompts),
        "default_prompt_name": model.default_prompt_name,
        "warnings": list(model.warnings),
        "code": list(model.code),
        "space": model.space,
        "precision": model.precision,
        "modalities": list(model.modalities),
    }


def _model_type(model: LoadedModel) -> dict[str, Any]:
    """TEI has three kinds of models; all that give vectors are embedding models."""
    if model.kind not in (Kind.CLASSIFIER, Kind.RERANKER, Kind.TOKEN_CLASSIFIER):
        return {"embedding": {"pooling": model.pooling}}
    labels = {
        "id2label": {str(index): label for index, label in enumerate(model.labels)},
        "label2id": {label: index for index, label in enumerate(model.labels)},
    }
    return {model.kind: labels}


async def get_info(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    return http.json_reply(http.to_json(info(inference.served)))


def _inference(kind: type[http.InferenceRequest] | None = None) -> http.HttpHandler:
    """The handler of an inference route; without `kind` the model decides what the body is."""

    async def handle(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, kind or _default_task(inference.served.model), TEI_BODY)
        if isinstance(body, TeiItemsRequest):
            return await _respond_to_items(inference, body)
        if isinstance(body, TeiRerankRequest) and (
            isinstance(body, TeiRerankItemsRequest) or input_checks.ranks_images(inference.served.model)
        ):
            return await _rank_items(inference, body)
        return await inference.respond(body.job, timings=True)

    return handle


async def _respond_to_items(inference: http.HttpInference, body: TeiItemsRequest) -> HttpReply:
    """Texts and images; a single one is a list of one, as a single text is."""
    given = body.given
    limit = inference.served.spec.max_client_batch_size
    items = await images.built(inference, given, "inputs", images.typed_item, limit)
    inputs = await images.read_all(inference, items)
    return await inference.respond(partial(body.job_of, inputs), timings=True)


async def _rank_items(inference: http.HttpInference, body: TeiRerankRequest) -> HttpReply:
    """By a reranker that reads texts and images, or by the vectors of a model that embeds both."""
    served = inference.served
    if not body.texts:
        raise EmptyInput("`texts` cannot be empty")
    if body.truncation_direction.lower() == "left":
        raise http.BadRequest(422, "truncation_direction: Left is not for requests with images", "truncation_direction")
    limit = served.spec.max_client_batch_size
    items = await images.built(inference, body.texts, "texts", images.typed_item, limit)
    query = images.typed_item(body.query, "query")
    first, *inputs = await images.read_all(inference, [query, *items], first=-1)
    truncate = served.spec.auto_truncate if body.truncate is None else body.truncate
    found = await relevance(
        inference, [first], inputs, truncate=truncate, raw_scores=body.raw_scores, with_prompts=True
    )
    ranked = [
        {"index": row, **({"text": body.texts[row]} if body.return_text else {}), "score": found.scores[row]}
        for row in http.best_first(found.scores)
    ]
    return http.json_reply(await inference.dispatcher.off_loop(http.to_json, ranked))


def _default_task(model: LoadedModel) -> type[http.InferenceRequest]:
    """The request class where the path names no task; Hugging Face's endpoints set one by the variable `TASK`."""
    if model.kind == Kind.EMBEDDING and os.environ.get("TASK") == "sentence-similarity":
        return TeiSimilarityRequest
    return REQUEST_OF_KIND[model.kind]


def _tokenizer(kind: type[TokenizeRequest | DecodeRequest]) -> http.HttpHandler:
    """The handler of a route that needs neither a permit nor the device."""

    async def handle(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, kind, TEI_BODY)
        dispatcher = inference.dispatcher
        answer: Callable[..., Steps[bytes]] = body.answer
        try:
            answers: list[bytes] = []
            room = dispatcher.spec.max_message_bytes
            for item in body.items(dispatcher.spec.max_client_batch_size):  # takes turns with the items of other calls
                answers.append(await dispatcher.in_tokenizer_turns(answer(dispatcher.engine, item)))
                if (room := room - len(answers[-1])) < 0:
                    raise TooLarge(f"Reply is larger than the limit of {dispatcher.spec.max_message_bytes} bytes")
            size = dispatcher.spec.max_message_bytes - room
            return http.json_reply(await _whole(dispatcher, _listed(answers), size))
        except TeimgrError as error:
            dispatcher.metrics.failed(error)
            raise

    return handle


async def _vertex(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    """`/vertex`: any number of jobs, each with its own permit."""
    body = await inference.read(request, TeiVertexRequest, TEI_BODY)
    inference.check_count(len(body.instances))
    requests = await inference.dispatcher.off_loop(body.requests, inference.served.model)
    replies = await inference.run([one.job for one in requests])
    predictions = _listed(reply.payload for reply in replies)
    pieces = chain((b'{"predictions":',), predictions, (b"}",))
    written = await _whole(inference.dispatcher, pieces, sum(len(reply.payload) for reply in replies))
    return http.json_reply(within(written, inference.dispatcher.spec.max_message_bytes))


OPENAI_PATHS = ("/v1/embeddings", "/embeddings")  # their errors have OpenAI's fields

ROUTES: http.RouteTable = {
    ("POST", "/embed"): _inference(TeiEmbedRequest),
    ("POST", "/embed_all"): _inference(TeiEmbedAllRequest),
    ("POST", "/embed_sparse"): _inference(TeiEmbedSparseRequest),
    ("POST", "/predict"): _inference(TeiPredictRequest),
    ("POST", "/rerank"): _inference(TeiRerankRequest),
    ("POST", "/similarity"): _inference(TeiSimilarityRequest),
    **{("POST", path): _inference(OpenAICompatRequest) for path in OPENAI_PATHS},
    ("POST", "/tokenize"): _tokenizer(TokenizeRequest),
    ("POST", "/decode"): _tokenizer(DecodeRequest),
    ("POST", "/"): _inference(),
    ("POST", "/invocations"): _inference(),
    ("POST", "/vertex"): _vertex,
    ("GET", "/info"): get_info,
}
