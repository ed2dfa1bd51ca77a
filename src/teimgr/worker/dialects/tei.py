"""TEI's routes (Text Embeddings Inference 1.9.3), on an instance's own port and on the daemon's.

Bodies, sentences and orders are TEI's; inference answers carry their cost in headers.
"""

from __future__ import annotations

import os
from typing import Any

import orjson

from teimgr import __version__
from teimgr.errors import TeimgrError
from teimgr.spec import LoadedModel
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.dialects import tei_requests
from teimgr.worker.http.bodies import TEI_BODY, to_json
from teimgr.worker.http.inference import (
    HttpHandler,
    HttpInference,
    InferenceRequest,
    RouteTable,
    ServedModel,
    json_reply,
)


def info(served: ServedModel) -> dict[str, Any]:
    """The answer of `/info`: TEI's fields in its order, then teimgr's own."""
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


def _model_type(model: LoadedModel) -> dict[str, Any]:
    """TEI has three kinds of models; all that give vectors are embedding models."""
    if model.kind not in ("classifier", "reranker"):
        return {"embedding": {"pooling": model.pooling}}
    labels = {
        "id2label": {str(index): label for index, label in enumerate(model.labels)},
        "label2id": {label: index for index, label in enumerate(model.labels)},
    }
    return {model.kind: labels}


async def get_info(inference: HttpInference, request: HttpRequest) -> HttpReply:
    """`/info`: the model and the limits."""
    return json_reply(to_json(info(inference.served)))


def _inference(kind: type[InferenceRequest] | None = None) -> HttpHandler:
    """The handler of an inference route; without `kind` the model decides what the body is."""

    async def handle(inference: HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, kind or _default_task(inference.served.model), TEI_BODY)
        return await inference.respond(body.job, timings=True)

    return handle


def _default_task(model: LoadedModel) -> type[InferenceRequest]:
    """The request class where the path names no task; Hugging Face's endpoints set one by the variable `TASK`."""
    if model.kind == "embedding" and os.environ.get("TASK") == "sentence-similarity":
        return tei_requests.TeiSimilarityRequest
    return tei_requests.REQUEST_OF_KIND[model.kind]


def _tokenizer(kind: type[tei_requests.TokenizeRequest | tei_requests.DecodeRequest]) -> HttpHandler:
    """The handler of a route that needs neither a permit nor the device."""

    async def handle(inference: HttpInference, request: HttpRequest) -> HttpReply:
        body = await inference.read(request, kind, TEI_BODY)
        dispatcher = inference.dispatcher
        try:
            limit = dispatcher.spec.max_client_batch_size
            return json_reply(await dispatcher.off_loop(body.answer, dispatcher.engine, limit))
        except TeimgrError as error:
            dispatcher.metrics.failed(error)
            raise

    return handle


async def _vertex(inference: HttpInference, request: HttpRequest) -> HttpReply:
    """`/vertex`: any number of jobs, each with a permit of its own."""
    body = await inference.read(request, tei_requests.TeiVertexRequest, TEI_BODY)
    replies = await inference.run([one.job for one in body.requests(inference.served.model)])
    return json_reply(orjson.dumps({"predictions": [orjson.Fragment(reply.payload) for reply in replies]}))


OPENAI_PATHS = ("/v1/embeddings", "/embeddings")  # whose errors have OpenAI's fields

ROUTES: RouteTable = {
    ("POST", "/embed"): _inference(tei_requests.TeiEmbedRequest),
    ("POST", "/embed_all"): _inference(tei_requests.TeiEmbedAllRequest),
    ("POST", "/embed_sparse"): _inference(tei_requests.TeiEmbedSparseRequest),
    ("POST", "/predict"): _inference(tei_requests.TeiPredictRequest),
    ("POST", "/rerank"): _inference(tei_requests.TeiRerankRequest),
    ("POST", "/similarity"): _inference(tei_requests.TeiSimilarityRequest),
    **{("POST", path): _inference(tei_requests.OpenAICompatRequest) for path in OPENAI_PATHS},
    ("POST", "/tokenize"): _tokenizer(tei_requests.TokenizeRequest),
    ("POST", "/decode"): _tokenizer(tei_requests.DecodeRequest),
    ("POST", "/"): _inference(),
    ("POST", "/invocations"): _inference(),
    ("POST", "/vertex"): _vertex,
    ("GET", "/info"): get_info,
}
