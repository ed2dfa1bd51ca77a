"""What several dialects have in common: vectors as JSON tells them, usage, names of answers, a model's prompts."""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import ValidationError

from teimgr.engine.job import Job
from teimgr.errors import EmptyInput, WrongModelKind
from teimgr.spec import ModelInfo
from teimgr.wire.http_frames import Buffer, HttpReply, HttpRequest
from teimgr.worker.http.bodies import BodyRefused, BodyT, expect_json
from teimgr.worker.http.inference import (
    LARGE_BODY_BYTES,
    CallOptions,
    HttpHandler,
    HttpInference,
    InferenceRequest,
    json_reply,
)

# What the dialects that say nothing of it let a client send at once.
MOST_INPUTS = 10_000

# The names under which models keep the prompts of the two sides of a search, in the order in which they are looked for.
QUERY_PROMPTS = ("query", "search_query", "queries", "s2p_query", "web_search_query")
DOCUMENT_PROMPTS = ("document", "search_document", "passage", "corpus", "doc", "text")


def usage(job: Job) -> dict[str, int]:
    """Every token that the model read, special ones and prompt included."""
    return {"prompt_tokens": job.tokens, "total_tokens": job.tokens}


def named(prefix: str) -> str:
    """An id for an answer."""
    return f"{prefix}-{uuid.uuid4().hex}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def base64_of(values: NDArray[Any]) -> str:
    """The numbers as base64 of their little-endian bytes."""
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()).decode()


def best_first(scores: NDArray[np.float32], top_n: int | None) -> list[int]:
    """Rows by falling score (float32 [N]), and of equal ones the first first; `top_n` of them where it is given."""
    order: list[int] = np.argsort(-scores, kind="stable").tolist()
    return order[:top_n]


def prompt_among(model: ModelInfo, names: Sequence[str]) -> str | None:
    """The first of `names` that is a prompt of the model; None where none is: the model's default counts then."""
    return next((name for name in names if name in model.prompts), None)


def text_of_parts(parts: list[Any]) -> str | None:
    """The text of a content that is given in parts; None where one of them is no text."""
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type", "text") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return "\n".join(whole) if len(whole) == len(parts) else None


async def shortened(exchange: HttpInference, texts: list[str], limit: int | None, *, left: bool = False) -> list[str]:
    """The texts cut to `limit` tokens, at the head where `left`; as they are where the model takes no more anyway."""
    engine = exchange.dispatcher.engine
    if limit is None or limit >= engine.info.max_input_length:
        return texts
    return await exchange.dispatcher.off_loop(lambda: [engine.cut(text, limit, left=left) for text in texts])


def need_texts(texts: Sequence[object], field: str) -> None:
    """See that there is something to work on.

    Raises:
        EmptyInput: there are no texts, or one of them is empty.
    """
    if not texts:
        raise EmptyInput(f"`{field}` cannot be empty")
    if any(isinstance(text, str) and not text for text in texts):
        raise EmptyInput(f"`{field}` cannot have an empty text")


def need_kind(model: ModelInfo, kinds: Sequence[str], doing: str) -> None:
    """See that the model can do what the route is for.

    Raises:
        WrongModelKind: it is of another kind.
    """
    if model.kind not in kinds:
        raise WrongModelKind(f"The model '{model.model_id}' is of kind {model.kind} and does not do {doing}")


class Refused(Exception):
    """A body that is not what the route reads: an HTTP status, a sentence, and the field that is wrong."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


def simple(kind: type[InferenceRequest]) -> HttpHandler:
    """A route that asks for one inference, whose answer is the whole reply."""

    async def answer(exchange: HttpInference, request: HttpRequest, terms: CallOptions) -> HttpReply:
        asked = await read(exchange, request, kind)
        [reply] = await exchange.infer([asked.inference], terms)
        return json_reply(reply.payload)

    return answer


async def read(exchange: HttpInference, request: HttpRequest, kind: type[BodyT]) -> BodyT:
    """The request's body.

    Raises:
        Refused: 415 it is not said to be JSON, 400 it is none, or no `kind`.
    """
    check_content_type(request)
    if len(request.body) > LARGE_BODY_BYTES:
        return await exchange.dispatcher.off_loop(_parse, kind, request.body)
    return _parse(kind, request.body)


def check_content_type(request: HttpRequest) -> None:
    """See that the body is said to be JSON.

    Raises:
        Refused: 415.
    """
    try:
        expect_json(request.headers.get("content-type", ""))
    except BodyRefused as error:
        raise Refused(error.status, error.text) from error


def validated(kind: type[BodyT], value: Any) -> BodyT:
    """A parsed body as a `kind`.

    Raises:
        Refused: 400, with the field that is wrong.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = str(first["loc"][0]) if first["loc"] else None
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where or 'body'}: {first['msg']}", field) from error


def _parse(kind: type[BodyT], body: Buffer) -> BodyT:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Refused(400, f"The body is no JSON: {error}") from error
    return validated(kind, value)
