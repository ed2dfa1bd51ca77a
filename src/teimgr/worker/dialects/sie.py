"""Superlinked's inference engine (SIE): vectors of several kinds in one call, scores against a query, entities.

Bodies are msgpack or JSON. Arrays in msgpack are msgpack-numpy's: a map of `nd`, `type`, `kind`, `shape`, `data`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from teimgr.engine.job import InferOptions, Input, Job, Output
from teimgr.engine.text.tokenizer import Prompts
from teimgr.errors import InvalidInput, WrongModelKind
from teimgr.http.bodies import media_type
from teimgr.spec import Kind, LoadedModel
from teimgr.wire import msgpack_pieces
from teimgr.wire.frames import HttpReply, HttpRequest
from teimgr.wire.quantisation import Precision, converted
from teimgr.worker import http_inference as http
from teimgr.worker import images, input_checks
from teimgr.worker.dialects.rerank import relevance
from teimgr.worker.scores import OUTSIDE, entities, predictions

MSGPACK = "application/msgpack"
_MSGPACK_TYPES = (MSGPACK, "application/x-msgpack")

OutputType = Literal["dense", "sparse", "multivector"]
OutputDtype = Literal["float32", "float16", "int8", "uint8", "binary"]
_OUTPUTS = {"dense": Output.DENSE, "sparse": Output.SPARSE, "multivector": Output.MULTI_VECTOR}
_PRECISIONS = {name: Precision(name) for name in ("float32", "float16", "int8", "uint8")} | {
    "binary": Precision.UBINARY
}
MAX_INSTRUCTION = 4096
# Options that would change the vectors and are not implemented.
_NOT_SERVED = ("lora_id", "muvera", "pooling", "query_template", "doc_template")


class SieImage(http.Body, extra="forbid"):
    """An image file: its bytes in msgpack, base64 in JSON."""

    data: str | bytes
    format: Annotated[str | None, Field(description="ignored: read from the data")] = None


class SieAudio(SieImage):
    """A sound file: its bytes in msgpack, base64 in JSON."""

    sample_rate: Annotated[int | None, Field(description="ignored: read from the data")] = None


class Item(http.Body):
    """An input: a text, or one image or sound for models of these. Video and documents are not supported."""

    id: str | None = None
    text: str | None = None
    images: Annotated[
        list[SieImage] | None, Field(description="with a text, or several, only for models that read them in one input")
    ] = None
    audio: Annotated[SieAudio | None, Field(description="without a text")] = None
    video: Annotated[Any | None, Field(description="not supported")] = None
    document: Annotated[Any | None, Field(description="not supported")] = None


def _counted(items: Any) -> Any:
    """The items, if they are few enough: one that is read becomes several objects."""
    if isinstance(items, list):
        http.check_count(len(items))
    return items


Items = Annotated[list[Item], BeforeValidator(_counted)]


class EncodeParams(http.Body):
    """Outputs, their type, and options."""

    output_types: list[OutputType] | None = None
    output_dtype: OutputDtype | None = None
    instruction: Annotated[
        str | None, Field(max_length=MAX_INSTRUCTION, description="the name of one of the model's prompts, or a text")
    ] = None
    options: Annotated[http.AnyObject | None, Field(description="is_query, normalize, output_dtype, pool_factor")] = (
        None
    )

    @property
    def outputs(self) -> Sequence[OutputType]:
        """Each once, however often it is named: a million of them would be made again and again."""
        return tuple(dict.fromkeys(self.output_types or ["dense"]))


class SieEncodeRequest(http.Body):
    """`POST /v1/encode/{model}`."""

    items: Items
    params: EncodeParams | None = None
    expect_fingerprint: http.ExpectedSpace = None


class SieScoreRequest(http.Body):
    """`POST /v1/score/{model}`."""

    query: Item
    items: Items
    instruction: Annotated[str | None, Field(description="only for models that read texts and images in one input")] = (
        None
    )
    options: http.AnyObject | None = None
    expect_fingerprint: http.ExpectedSpace = None


class ExtractParams(http.Body):
    """The labels to extract, and options."""

    labels: Annotated[list[str] | None, Field(description="some of the model's labels; absent: all")] = None
    output_schema: Annotated[Any | None, Field(description="not supported")] = None
    instruction: Annotated[str | None, Field(description="not supported")] = None
    options: Annotated[http.AnyObject | None, Field(description="threshold: minimum score, 0 to 1")] = None


class SieExtractRequest(http.Body):
    """`POST /v1/extract/{model}`."""

    items: Items
    params: ExtractParams | None = None
    expect_fingerprint: http.ExpectedSpace = None


async def _encode(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    began = time.monotonic()
    body = await _read(inference, request, SieEncodeRequest)
    prompts = inference.dispatcher.engine.prompts
    inputs = await images.read_all(inference, await images.built(inference, body.items, "items", _item))
    [job] = await inference.jobs([lambda served: _job(body, inputs, served, prompts)])
    return await inference.dispatcher.off_loop(_encoded, inference.served, request, body, job, began)


async def _score(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    body = await _read(inference, request, SieScoreRequest)
    input_checks.need_no_instruction(inference.served.model, body.instruction)
    _check_options(body.options or {})
    items = await images.built(inference, body.items, "items", _item)
    query, *inputs = await images.read_all(inference, [_item(body.query, "query"), *items], first=-1)
    input_checks.need_texts(inputs, "items")
    served = inference.served
    truncate, instruction = served.spec.auto_truncate, body.instruction
    found = await relevance(inference, [query], inputs, truncate=truncate, with_prompts=True, instruction=instruction)
    scores = [
        {"item_id": body.items[row].id or f"item-{row}", "score": float(found.scores[row]), "rank": rank}
        for rank, row in enumerate(http.best_first(found.scores))
    ]
    usage = {"input_tokens": found.tokens, **_images([query, *inputs]), "pairs": len(inputs)}
    answer = {"model": served.name, "query_id": body.query.id, "scores": scores, "usage": usage}
    return await inference.dispatcher.off_loop(_reply, request, answer)


async def _extract(inference: http.HttpInference, request: HttpRequest) -> HttpReply:
    body = await _read(inference, request, SieExtractRequest)
    [job] = await inference.jobs([lambda served: _extract_job(body, served)])
    work = partial(_extracted, inference.served, request, body, job)
    return await inference.dispatcher.on_tokenizer_thread(work)


async def _read(inference: http.HttpInference, request: HttpRequest, kind: type[http.BodyT]) -> http.BodyT:
    try:
        return await inference.read(request, kind, _body_format(request))
    except http.TooManyInputs as error:
        inference.check_count(error.given)  # also counts the refusal
        raise


def _extract_job(body: SieExtractRequest, served: http.ServedModel) -> http.JobSpec:
    params = body.params or ExtractParams()
    for name, given in (("output_schema", params.output_schema), ("instruction", params.instruction)):
        if given:
            raise http.BadRequest(400, f"{name}: is not supported", name)
    model = served.model
    if model.kind not in _EXTRACTING:
        raise WrongModelKind("the model finds no entities and has no classes: it is not a classifier")
    known = {_kind_of(model, label) for label in model.labels if label != OUTSIDE or not _has_entities(model)}
    if unknown := [label for label in params.labels or () if label not in known]:
        shown = ", ".join(sorted(known)[:_MAX_SHOWN_LABELS])
        raise http.BadRequest(400, f"labels: {unknown[0][:80]!r} is not one of the model's: {shown}", "labels")
    _check_options(params.options or {})
    _threshold(params)
    texts = [_text(item, f"items.{row}") for row, item in enumerate(body.items)]
    input_checks.need_texts(texts, "items")
    output = _EXTRACTING[Kind(model.kind)]
    return http.JobSpec(texts, InferOptions(frozenset({output}), truncate=served.spec.auto_truncate, prompt=""))


_EXTRACTING = {Kind.TOKEN_CLASSIFIER: Output.TOKENS, Kind.CLASSIFIER: Output.SCORES}
_MAX_SHOWN_LABELS = 50


def _kind_of(model: LoadedModel, label: str) -> str:
    """What an entity or a class is called: B-PER and I-PER are both PER."""
    return label[2:] if _has_entities(model) and label.startswith(("B-", "I-")) else label


def _has_entities(model: LoadedModel) -> bool:
    return model.kind == Kind.TOKEN_CLASSIFIER


def _threshold(params: ExtractParams) -> float:
    given = (params.options or {}).get("threshold", 0.0)
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0.0 <= given <= 1.0:
        raise http.BadRequest(400, "options.threshold: must be a number of 0 to 1", "options")
    return float(given)


def _extracted(served: http.ServedModel, request: HttpRequest, body: SieExtractRequest, job: Job) -> HttpReply:
    params = body.params or ExtractParams()
    wanted, least = frozenset(params.labels or ()), _threshold(params)
    items = []
    for row, item in enumerate(body.items):
        found = [
            each
            for each in _found(served, job, row)
            if each["score"] >= least and (not wanted or each["label"] in wanted)
        ]
        name = "entities" if _has_entities(served.model) else "classifications"
        none: dict[str, Any] = {"entities": [], "relations": [], "classifications": [], "objects": []}
        items.append({"id": item.id or f"item-{row}"} | none | {name: found})
    return _reply(request, {"model": served.name, "items": items, "usage": {"input_tokens": job.tokens}})


def _found(served: http.ServedModel, job: Job, row: int) -> list[dict[str, Any]]:
    """The entities of a text in their order, or its classes, the likeliest first."""
    model = served.model
    if not _has_entities(model):
        return [{"label": label, "score": float(score)} for score, label in predictions(job.scores[row], model.labels)]
    logits, tokenizer = job.tokens_of[row], served.tokenizer
    assert tokenizer is not None
    spans = [] if logits is None else entities(job.inputs[row], logits, model.labels, tokenizer, "simple", False)
    return [
        {"text": each["word"], "label": each["entity_group"], "score": each["score"], "start": each["start"]}
        | {"end": each["end"]}
        for each in spans
    ]


def _job(body: SieEncodeRequest, inputs: Sequence[Input], served: http.ServedModel, prompts: Prompts) -> http.JobSpec:
    params = body.params or EncodeParams()
    input_checks.need_texts(inputs, "items")
    options = params.options or {}
    _check_options(options)
    given = params.instruction
    chosen = InferOptions(
        outputs=frozenset(_OUTPUTS[name] for name in params.outputs),
        truncate=served.spec.auto_truncate,
        prompt_name=given if given in served.model.prompts else _role(options, served.model),
        prompt=prompts.instructing(given) if given and given not in served.model.prompts else None,
        normalize=options.get("normalize") is not False and served.model.kind != Kind.SPARSE,
        pool_factor=_pool_factor(options),
    )
    dtype = _dtype(params)
    if Output.DENSE in chosen.outputs and _PRECISIONS[dtype].needs_unit_vectors and not chosen.normalize:
        raise InvalidInput(f"output_dtype: {dtype} is for vectors of length 1, and these keep their own")
    return http.JobSpec(inputs, chosen)


def _dtype(params: EncodeParams) -> str:
    dtype = params.output_dtype or (params.options or {}).get("output_dtype") or "float32"
    if not isinstance(dtype, str) or dtype not in _PRECISIONS:
        raise InvalidInput(f"output_dtype: must be one of {', '.join(_PRECISIONS)}")
    return dtype


def _check_options(options: Mapping[str, Any]) -> None:
    if found := [name for name in _NOT_SERVED if options.get(name)]:
        raise http.BadRequest(400, f"options.{found[0]}: is not supported", "options")
    if options.get("profile") not in (None, "default"):
        raise http.BadRequest(400, "options.profile: must be default; other profiles are instances here", "options")
    for name in ("is_query", "normalize"):
        if not isinstance(options.get(name), bool | None):
            raise http.BadRequest(400, f"options.{name}: must be true or false", "options")


def _pool_factor(options: Mapping[str, Any]) -> float:
    given = options.get("pool_factor", 1.0)
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise http.BadRequest(400, "options.pool_factor: must be a number of at least 1", "options")
    return float(given)


def _role(options: Mapping[str, Any], model: LoadedModel) -> str | None:
    return http.prompt_among(model, http.QUERY_PROMPTS if options.get("is_query") else http.DOCUMENT_PROMPTS)


def _text(item: Item, place: str) -> str:
    found = _item(item, place)
    if not isinstance(found, str):
        raise http.BadRequest(400, f"{place}: must have a text, and no image", place.split(".")[0])
    return found


def _item(item: Item, place: str) -> images.SentItem:
    """The text and the images of an item; raises BadRequest where it has neither."""
    field = place.split(".")[0]
    if any(one is not None for one in (item.video, item.document)):
        raise http.BadRequest(400, f"{place}: video and documents are not supported", field)
    if item.audio is not None:
        if item.text is not None or item.images:
            raise http.BadRequest(400, f"{place}: must have a text or a sound: send them as separate items", field)
        return images.SentImage(item.audio.data, f"{place}.audio.data", "audio")
    if not item.images:
        if item.text is None:
            raise http.BadRequest(400, f"{place}: must have a text, or an image", field)
        return item.text
    sent = tuple(images.SentImage(one.data, f"{place}.images.{at}.data") for at, one in enumerate(item.images))
    if item.text is None and len(sent) == 1:
        return sent[0]
    return images.SentContent(item.text or "", sent, place)


def _images(inputs: Sequence[Input]) -> dict[str, int]:
    count, _ = images.counted(inputs)
    heard = images.heard_ms(inputs)
    return ({"images": count} if count else {}) | ({"audio_ms": heard} if heard else {})


def _encoded(
    served: http.ServedModel, request: HttpRequest, body: SieEncodeRequest, job: Job, began: float
) -> HttpReply:
    params = body.params or EncodeParams()
    dtype = _dtype(params)
    vectors = {name: _vectors(name, job, served.model, dtype) for name in params.outputs}
    items = [
        ({} if item.id is None else {"id": item.id}) | {name: rows[row] for name, rows in vectors.items()}
        for row, item in enumerate(body.items)
    ]
    timing = {
        "total_ms": (time.monotonic() - began) * 1e3,
        "queue_ms": job.queue_ns / 1e6,
        "tokenization_ms": job.tokenization_ns / 1e6,
        "inference_ms": job.inference_ns / 1e6,
    }
    usage = {"input_tokens": job.tokens, **_images(job.inputs)}
    return _reply(request, {"model": served.name, "items": items, "timing": timing, "usage": usage})


def _vectors(name: OutputType, job: Job, model: LoadedModel, dtype: str) -> list[dict[str, Any]]:
    """One output of each item. Sparse weights are of any size: of the types only the floats can hold them."""
    if name == "dense":
        dense = converted(job.vectors, _PRECISIONS[dtype])
        return [{"dims": job.vectors.shape[1], "dtype": dtype, "values": row} for row in dense]
    if name == "sparse":
        half = dtype == "float16"
        return [
            {
                "dims": model.dimension if model.kind == Kind.SPARSE else None,
                "dtype": "float16" if half else "float32",
                "indices": vector.indices.astype(np.int32),
                "values": converted(vector.values, Precision.FLOAT16) if half else vector.values,
            }
            for vector in job.sparse
            if vector is not None
        ]
    return [
        {
            "token_dims": rows.shape[1],
            "num_tokens": rows.shape[0],
            "dtype": dtype,
            "values": np.ascontiguousarray(converted(rows, _PRECISIONS[dtype])),
        }
        for rows in job.multi_vectors
        if rows is not None
    ]


def _is_msgpack(content_type: str) -> bool:
    return media_type(content_type) in _MSGPACK_TYPES


_MSGPACK_BODY = http.BodyFormat(
    msgpack_pieces.loads_small, msgpack_pieces.loads, accepts=_is_msgpack, undecodable="The body is not msgpack: {}"
)


def _body_format(request: HttpRequest) -> http.BodyFormat:
    return _MSGPACK_BODY if _is_msgpack(request.headers.get("content-type", "")) else http.JSON_BODY


def _reply(request: HttpRequest, answer: dict[str, Any]) -> HttpReply:
    """The answer in JSON where that is accepted, in msgpack where that is accepted or was sent, else in JSON."""
    accepted = request.headers.get("accept", "")
    wants_msgpack = any(one in accepted for one in _MSGPACK_TYPES)
    if http.JSON in accepted or not (wants_msgpack or _is_msgpack(request.headers.get("content-type", ""))):
        return http.json_reply(http.to_json(answer))
    return HttpReply(200, {"content-type": MSGPACK}, msgpack_pieces.dumps(answer))


ROUTES: http.RouteTable = {
    ("POST", "/v1/encode"): _encode,
    ("POST", "/v1/score"): _score,
    ("POST", "/v1/extract"): _extract,
}
