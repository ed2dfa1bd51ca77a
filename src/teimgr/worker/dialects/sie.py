"""Superlinked's inference engine: typed vectors of several kinds in one call, and scores of items against a query.

Bodies are msgpack or JSON, arrays in msgpack as msgpack-numpy has them: a map of `nd`, `type`, `kind`, `shape`, `data`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgpack
import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from teimgr.engine.job import InferOptions, Job, Output
from teimgr.errors import InvalidInput
from teimgr.http_server import media_type
from teimgr.spec import ModelInfo
from teimgr.wire.element_types import Precision, converted
from teimgr.wire.http_frames import HttpReply, HttpRequest
from teimgr.worker.dialects.relevance import relevance
from teimgr.worker.http.answers import to_json
from teimgr.worker.http.bodies import Body
from teimgr.worker.http.common import (
    DOCUMENT_PROMPTS,
    MOST_INPUTS,
    QUERY_PROMPTS,
    Refused,
    best_first,
    need_texts,
    prompt_among,
    read,
    validated,
)
from teimgr.worker.http.inference import (
    LARGE_BODY_BYTES,
    CallOptions,
    HttpHandler,
    HttpInference,
    Inference,
    ServedModel,
    json_reply,
)

MSGPACK = "application/msgpack"
_JSON = "application/json"
_MSGPACK_TYPES = (MSGPACK, "application/x-msgpack")

BodyT = TypeVar("BodyT", bound=Body)

OutputType = Literal["dense", "sparse", "multivector"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary"]
_OUTPUTS = {"dense": Output.DENSE, "sparse": Output.SPARSE, "multivector": Output.MULTI_VECTOR}
_PRECISIONS = {
    "float32": Precision.FLOAT32,
    "float16": Precision.FLOAT16,
    "int8": Precision.INT8,
    "uint8": Precision.UINT8,
    "binary": Precision.UBINARY,
}
# Options that would change the vectors and that nothing here does.
_NOT_SERVED = ("lora_id", "muvera", "pooling", "query_template", "doc_template")


class Item(Body):
    """What is encoded; texts alone, for no model here sees or hears."""

    id: str | None = None
    text: str | None = None
    images: Annotated[list[Any] | None, Field(description="refused")] = None
    audio: Annotated[Any | None, Field(description="refused")] = None
    video: Annotated[Any | None, Field(description="refused")] = None
    document: Annotated[Any | None, Field(description="refused")] = None


class EncodeParams(Body):
    """Which outputs, in which type, and how."""

    output_types: list[OutputType] | None = None
    output_dtype: OutputDtype | None = None
    instruction: Annotated[str | None, Field(description="the name of one of the model's prompts")] = None
    options: Annotated[dict[str, Any] | None, Field(description="is_query, normalize, output_dtype")] = None


class EncodeRequest(Body):
    """`POST /v1/encode/{model}`."""

    items: list[Item]
    params: EncodeParams | None = None


class ScoreRequest(Body):
    """`POST /v1/score/{model}`."""

    query: Item
    items: list[Item]
    instruction: Annotated[str | None, Field(description="refused")] = None
    options: dict[str, Any] | None = None


async def _encode(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    began = time.monotonic()
    asked = await _read(exchange, request, EncodeRequest)
    [job] = await exchange.jobs([partial(_inference, asked, asked.params or EncodeParams())], terms)
    return await exchange.dispatcher.off_loop(_encoded, exchange.served, request, asked, job, began)


async def _score(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
    asked = await _read(exchange, request, ScoreRequest)
    if asked.instruction:
        raise Refused(400, "instruction: not served here", "instruction")
    _check_options(asked.options or {})
    query, *texts = (_text(one, place) for place, one in _placed(asked))
    need_texts(texts, "items")
    truncate = exchange.served.spec.auto_truncate
    found = await relevance(exchange, [query], texts, terms, truncate=truncate, with_prompts=True)
    told = [
        {"item_id": asked.items[row].id or f"item-{row}", "score": float(found.scores[row]), "rank": rank}
        for rank, row in enumerate(best_first(found.scores, None))
    ]
    answer = {"model": exchange.served.name, "query_id": asked.query.id, "scores": told}
    return _reply(request, answer | {"usage": {"input_tokens": found.tokens}})


def _placed(asked: ScoreRequest) -> list[tuple[str, Item]]:
    return [("query", asked.query), *((f"items.{row}", item) for row, item in enumerate(asked.items))]


def _inference(asked: EncodeRequest, params: EncodeParams, served: ServedModel) -> Inference:
    texts = [_text(item, f"items.{row}") for row, item in enumerate(asked.items)]
    need_texts(texts, "items")
    options = params.options or {}
    _check_options(options)
    chosen = InferOptions(
        outputs=frozenset(_OUTPUTS[name] for name in _types(params)),
        truncate=served.spec.auto_truncate,
        prompt_name=_prompt(params, options, served.model),
        normalize=options.get("normalize") is not False and served.model.kind != "sparse",
    )
    return Inference(texts, chosen, _unwritten, MOST_INPUTS)


def _types(params: EncodeParams) -> Sequence[OutputType]:
    return params.output_types or ["dense"]


def _check_options(options: Mapping[str, Any]) -> None:
    if found := [name for name in _NOT_SERVED if options.get(name)]:
        raise Refused(400, f"options.{found[0]}: not served here", "options")


def _prompt(params: EncodeParams, options: Mapping[str, Any], model: ModelInfo) -> str | None:
    if params.instruction:
        if params.instruction not in model.prompts:
            known = ", ".join(model.prompts) or "none"
            raise InvalidInput(f"params.instruction: must be the name of a prompt of the model; there are: {known}")
        return params.instruction
    return prompt_among(model, QUERY_PROMPTS if options.get("is_query") else DOCUMENT_PROMPTS)


def _text(item: Item, place: str) -> str:
    if any(one is not None for one in (item.images, item.audio, item.video, item.document)) or item.text is None:
        raise Refused(400, f"{place}: must have a text, and nothing else can be encoded here", place.split(".")[0])
    return item.text


def _unwritten(job: Job) -> bytes:
    raise NotImplementedError("the answer is made by the route")


def _encoded(served: ServedModel, request: HttpRequest, asked: EncodeRequest, job: Job, began: float) -> HttpReply:
    params = asked.params or EncodeParams()
    named = params.output_dtype or (params.options or {}).get("output_dtype") or "float32"
    if named not in _PRECISIONS:
        raise InvalidInput(f"output_dtype: must be one of {', '.join(_PRECISIONS)}")
    told = {name: _VECTORS[name](job, served.model, named) for name in _types(params)}
    items = [
        ({} if item.id is None else {"id": item.id}) | {name: rows[row] for name, rows in told.items()}
        for row, item in enumerate(asked.items)
    ]
    timing = {
        "total_ms": (time.monotonic() - began) * 1e3,
        "queue_ms": job.queue_ns / 1e6,
        "tokenization_ms": job.tokenization_ns / 1e6,
        "inference_ms": job.inference_ns / 1e6,
    }
    answer = {"model": served.name, "items": items, "timing": timing, "usage": {"input_tokens": job.tokens}}
    return _reply(request, answer)


def _dense(job: Job, model: ModelInfo, named: str) -> list[dict[str, Any]]:
    rows = converted(job.vectors, _PRECISIONS[named])
    return [{"dims": job.vectors.shape[1], "dtype": named, "values": row} for row in rows]


def _sparse(job: Job, model: ModelInfo, named: str) -> list[dict[str, Any]]:
    """Weights are numbers of any size, so that of the types only float16 is one for them."""
    half = named == "float16"
    return [
        {
            "dims": model.dimension if model.kind == "sparse" else None,
            "dtype": "float16" if half else "float32",
            "indices": vector.indices.astype(np.int32),
            "values": converted(vector.values, Precision.FLOAT16) if half else vector.values,
        }
        for vector in job.sparse
        if vector is not None
    ]


def _multivector(job: Job, model: ModelInfo, named: str) -> list[dict[str, Any]]:
    return [
        {
            "token_dims": rows.shape[1],
            "num_tokens": rows.shape[0],
            "dtype": named,
            "values": np.ascontiguousarray(converted(rows, _PRECISIONS[named])),
        }
        for rows in job.multi_vectors
        if rows is not None
    ]


_VECTORS: Mapping[str, Callable[[Job, ModelInfo, str], list[dict[str, Any]]]] = {
    "dense": _dense,
    "sparse": _sparse,
    "multivector": _multivector,
}


async def _read(exchange: HttpInference, request: HttpRequest, kind: type[BodyT]) -> BodyT:
    if media_type(request.headers.get("content-type", "")) not in _MSGPACK_TYPES:
        return await read(exchange, request, kind)
    if len(request.body) > LARGE_BODY_BYTES:
        return await exchange.dispatcher.off_loop(_unpacked, kind, request)
    return _unpacked(kind, request)


def _unpacked(kind: type[BodyT], request: HttpRequest) -> BodyT:
    try:
        value = msgpack.unpackb(request.body, raw=False, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise Refused(400, f"The body is no msgpack: {error}") from error
    return validated(kind, value)


def _reply(request: HttpRequest, answer: dict[str, Any]) -> HttpReply:
    """In msgpack, unless JSON was asked for, or sent by one who says nothing of what he takes."""
    accepted = request.headers.get("accept", "")
    sent = media_type(request.headers.get("content-type", ""))
    if _JSON in accepted or (not any(one in accepted for one in _MSGPACK_TYPES) and sent not in _MSGPACK_TYPES):
        return json_reply(to_json(answer))
    return HttpReply(200, {"content-type": MSGPACK}, msgpack.packb(answer, default=_array, use_bin_type=True))


def _array(value: object) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} in an answer")
    array: NDArray[Any] = np.ascontiguousarray(value)
    return {b"nd": True, b"type": array.dtype.str, b"kind": b"", b"shape": array.shape, b"data": array.tobytes()}


ROUTES: dict[tuple[str, str], HttpHandler] = {("POST", "/v1/encode"): _encode, ("POST", "/v1/score"): _score}
