"""TEI's routes without a transport: what each path does with a body, on an instance's own port and on the daemon's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

from teimgr import __version__
from teimgr.errors import EmptyInput, InvalidInput, TeimgrError
from teimgr.spec import ModelInfo
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.dialects import tei_requests
from teimgr.worker.dialects.tei_requests import OpenAICompatRequest
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import Body, BodyRefused, InputIds, TokenizeInput, expect_json, id_lists, parse
from teimgr.worker.http.inference import CallOptions, HttpInference, InferenceRequest, ServedModel

if TYPE_CHECKING:  # it would bring torch along, which who only speaks the dialect can do without
    from teimgr.engine.engine import Engine

from teimgr.worker.http.inference import LARGE_BODY_BYTES, HttpHandler, json_reply


def info(served: ServedModel) -> dict[str, Any]:
    """What TEI says, in its order, and teimgr's own facts after it."""
    spec, model = served.spec, served.model
    return {
        "model_id": model.model_id,
        "model_sha": model.model_sha,
        "model_dtype": model.dtype,
        "served_model_name": served.name,
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
        "prompts": list(model.prompts),
        "default_prompt_name": model.default_prompt_name,
    }


def _model_type(model: ModelInfo) -> dict[str, Any]:
    """TEI knows three kinds; everything that gives vectors is an embedding model to it."""
    if model.kind not in ("classifier", "reranker"):
        return {"embedding": {"pooling": model.pooling}}
    labels = {
        "id2label": {str(index): label for index, label in enumerate(model.labels)},
        "label2id": {label: index for index, label in enumerate(model.labels)},
    }
    return {model.kind: labels}


class TokenizerRequest(Body):
    """A body that asks the tokenizer."""

    def answer(self, engine: Engine, limit: int) -> bytes:
        """The JSON it is answered with; blocks while the tokenizer works.

        Raises:
            EmptyInput, InvalidInput, TokenizerFailed
        """
        raise NotImplementedError


class TokenizeRequest(TokenizerRequest):
    """`POST /tokenize`: the tokens of texts, untruncated."""

    inputs: TokenizeInput
    add_special_tokens: bool = True
    prompt_name: str | None = None

    def answer(self, engine: Engine, limit: int) -> bytes:
        """`[[{"id": 101, "text": "[CLS]", "special": true, "start": null, "stop": null}, …], …]`."""
        texts = [self.inputs] if isinstance(self.inputs, str) else self.inputs
        if not texts:
            raise EmptyInput("`inputs` cannot be empty")
        _check_count(texts, limit)
        tokens = (engine.tokenize(text, self.add_special_tokens, self.prompt_name) for text in texts)
        return to_json([[asdict(token) for token in of_text] for of_text in tokens])


class DecodeRequest(TokenizerRequest):
    """`POST /decode`: the texts of token ids."""

    ids: InputIds
    skip_special_tokens: bool = True

    def answer(self, engine: Engine, limit: int) -> bytes:
        """`["what is deep learning?", …]`."""
        batch = id_lists(self.ids)
        _check_count(batch, limit)
        return to_json([engine.decode(ids, self.skip_special_tokens) for ids in batch])


def _check_count(batch: Sequence[object], limit: int) -> None:
    if len(batch) > limit:
        raise InvalidInput(f"batch size {len(batch)} > maximum allowed batch size {limit}")


BodyT = TypeVar("BodyT", bound=Body)

INFERENCE: Mapping[str, type[InferenceRequest]] = {
    "/embed": tei_requests.EmbedRequest,
    "/embed_all": tei_requests.EmbedAllRequest,
    "/embed_sparse": tei_requests.EmbedSparseRequest,
    "/predict": tei_requests.PredictRequest,
    "/rerank": tei_requests.RerankRequest,
    "/similarity": tei_requests.SimilarityRequest,
    "/v1/embeddings": OpenAICompatRequest,
    "/embeddings": OpenAICompatRequest,
}
TOKENIZER: Mapping[str, type[TokenizerRequest]] = {
    "/tokenize": TokenizeRequest,
    "/decode": DecodeRequest,
}
# Whose failures have OpenAI's fields.
OPENAI = ("/v1/embeddings", "/embeddings")
DEFAULT_TASK = ("/", "/invocations")


def inference(kind: Callable[[HttpInference], type[InferenceRequest]]) -> HttpHandler:
    """One inference, answered with its cost in the headers."""

    async def answer(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
        asked = await _read(exchange, request, kind(exchange))
        [reply] = await exchange.infer([asked.inference], terms)
        assert reply.timings is not None
        return json_reply(reply.payload, reply.timings.headers())

    return answer


def tokenizer(kind: type[TokenizerRequest]) -> HttpHandler:
    """What needs neither a permit nor the device."""

    async def answer(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
        asked = await _read(exchange, request, kind)
        dispatcher = exchange.dispatcher
        try:
            return json_reply(
                await dispatcher.off_loop(asked.answer, dispatcher.engine, dispatcher.spec.max_client_batch_size)
            )
        except TeimgrError as error:
            dispatcher.metrics.failed(error)
            raise

    return answer


async def several(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    """`/vertex`: any number of inferences, each with a permit of its own."""
    asked = await _read(exchange, request, tei_requests.VertexRequest)
    inferences = [one.inference for one in asked.requests(exchange.served.model)]
    replies = await exchange.infer(inferences, terms)
    return json_reply(tei_requests.predictions([reply.payload for reply in replies]))


async def facts(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    """`/info`: the model and the limits."""
    return json_reply(to_json(info(exchange.served)))


def refused(error: BodyRefused) -> HttpReply:
    """What is told of a body that cannot be read: a sentence in plain text, as TEI's framework does."""
    return HttpReply(error.status, {"content-type": "text/plain; charset=utf-8"}, error.text.encode())


async def _read(exchange: HttpInference, request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """The request's body.

    Raises:
        BodyRefused: it is not said to be JSON, or is no `kind`.
    """
    expect_json(request.headers.get("content-type", ""))
    if len(request.body) > LARGE_BODY_BYTES:
        return await exchange.dispatcher.off_loop(parse, kind, request.body)
    return parse(kind, request.body)


def _always(kind: type[InferenceRequest]) -> Callable[[HttpInference], type[InferenceRequest]]:
    return lambda exchange: kind


def _default_task(exchange: HttpInference) -> type[InferenceRequest]:
    """What a request asks for that names no task; the environment's `TASK` is how Hugging Face's endpoints say it."""
    kind = exchange.served.model.kind
    if kind == "embedding" and os.environ.get("TASK") == "sentence-similarity":
        return tei_requests.SimilarityRequest
    return tei_requests.REQUEST_OF_KIND[kind]


POST: Mapping[str, HttpHandler] = {
    **{path: inference(_always(kind)) for path, kind in INFERENCE.items()},
    **{path: tokenizer(kind) for path, kind in TOKENIZER.items()},
    **{path: inference(_default_task) for path in DEFAULT_TASK},
    "/vertex": several,
}
GET: Mapping[str, HttpHandler] = {"/info": facts}
