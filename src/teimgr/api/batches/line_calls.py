"""One request of a batch: sent until it has an answer that counts, and written as a line of the results."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple

import orjson

from teimgr.api.batches.batch_store import ResultLine
from teimgr.api.batches.lines import InputRequest
from teimgr.errors import Broken, DeadlineExceeded, Refused, TeimgrError, TryLater
from teimgr.http.bodies import is_json
from teimgr.http.byte_budget import ByteBudget
from teimgr.observability.request_context import CURRENT, RequestContext
from teimgr.wire import error_bodies
from teimgr.wire.frames import HttpReply
from teimgr.wire.routing.links import ConnectionLost
from teimgr.wire.status import TRY_AGAIN

Send = Callable[[bytes], Awaitable[HttpReply]]
"""Sends a body to the endpoint of the batch as its owner; raises a TeimgrError where no worker answered."""

# Estimated bytes of all requests in the workers and of their replies; a single one always fits.
_IN_FLIGHT_BYTES = 64 * 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# Failures of which the request itself may be the cause, such as a worker that is lost while it has the request.
_MAX_FAILURES = 4


# Quotes of a client's text are escaped in a reply. Cohere counts the tokens of images beside those of texts.
_USAGE = re.compile(rb'"(?:total|input)_tokens":(\d+)(?:,"images":\d+,"image_tokens":(\d+))?')
_USAGE_BYTES = 256


class CallSlots:
    """Bounds the requests of all batches that are in the workers, by number and by estimated bytes; first come first
    served."""

    def __init__(self, concurrency: int) -> None:
        self._places = asyncio.Semaphore(concurrency)
        self._bytes = ByteBudget(_IN_FLIGHT_BYTES)

    @asynccontextmanager
    async def slot(self, cost: int) -> AsyncIterator[None]:
        async with self._places:
            await self._bytes.take(cost)
            try:
                yield
            finally:
                self._bytes.give_back(cost)


class LineError(NamedTuple):
    """Why a request has no answer, in OpenAI's words."""

    code: str
    message: str


EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = LineError("batch_cancelled", "The batch was cancelled before this request was executed.")


class _Failure(NamedTuple):
    """An attempt that failed. `counts`: the request may be its cause, so there is a limit on such attempts."""

    answer: HttpReply | LineError
    is_final: bool = False
    counts: bool = True
    retry_after_s: float = 0.0


async def answered(batch_id: str, request: InputRequest, dialect: str, send: Send, slots: CallSlots) -> ResultLine:
    """The result of a request. While no worker takes it, it is sent again, with growing pauses, without a limit."""
    failures, attempts = 0, 0
    CURRENT.set(RequestContext(f"{batch_id}-{request.row}"))
    while True:
        attempts += 1
        async with slots.slot(request.cost):
            outcome = await _attempt(request, dialect, send)
        if isinstance(outcome, HttpReply):
            return result_line(batch_id, request, outcome)
        failures += outcome.counts
        if outcome.is_final or failures == _MAX_FAILURES:
            return result_line(batch_id, request, outcome.answer)
        await asyncio.sleep(pause_s(attempts, outcome.retry_after_s, random.random()))


def pause_s(attempts: int, named_s: float, jitter: float) -> float:
    """The pause after attempt `attempts` (>= 1): doubled each time, or the worker's `named_s` if that is longer.

    It is shortened by up to a half for a jitter in [0, 1], and bounded: the queue that a worker names is mostly of this
    batch, and shorter by the time that another request is done.
    """
    doubled_s = _FIRST_PAUSE_S * 2.0 ** min(attempts - 1, 40)
    return min(max(doubled_s, named_s), _LONGEST_PAUSE_S) * (1 - jitter / 2)


async def _attempt(request: InputRequest, dialect: str, send: Send) -> HttpReply | _Failure:
    try:
        reply = await send(request.body)
    except TeimgrError as error:
        return _failure(error, dialect)
    if reply.status in TRY_AGAIN:
        return _Failure(reply, counts=False, retry_after_s=float(reply.headers.get("retry-after", "0")))
    return _Failure(reply) if reply.status >= 500 else reply


def _failure(error: TeimgrError, dialect: str) -> _Failure:
    reply = error_bodies.failure(dialect, error)
    if isinstance(error, DeadlineExceeded):
        return _Failure(LineError("request_timeout", error.message))
    if isinstance(error, Broken | ConnectionLost):
        return _Failure(reply)
    if isinstance(error, TryLater):
        return _Failure(reply, counts=False, retry_after_s=error.retry_after_s or 0.0)
    assert isinstance(error, Refused)
    return _Failure(reply, is_final=True)


def result_line(batch_id: str, request: InputRequest, answer: HttpReply | LineError) -> ResultLine:
    """The line of a result in OpenAI's form. The body of a reply is copied as it is."""
    id = f"batch_req_{batch_id.removeprefix('batch_')}_{request.row}"
    head = b'{"id":%b,"custom_id":%b,' % (orjson.dumps(id), orjson.dumps(request.custom_id))
    if isinstance(answer, LineError):
        data = b'%b"response":null,"error":%b}\n' % (head, orjson.dumps(answer._asdict()))
        return ResultLine(request.row, data, is_error=True)
    body, status = bytes(answer.body), answer.status
    if not is_json(answer.headers.get("content-type", "")):
        body, status = _not_json(body, status)
    request_id = orjson.dumps(f"{batch_id}-{request.row}")
    response = b'{"status_code":%d,"request_id":%b,"body":%b}' % (status, request_id, body)
    data = b'%b"response":%b,"error":null}\n' % (head, response)
    return ResultLine(request.row, data, is_error=status >= 400, tokens=_tokens(body))


def _tokens(body: bytes) -> int:
    """The tokens that the end of a reply counts, 0 where it counts none. Vectors are not parsed for it."""
    found = _USAGE.findall(body, max(0, len(body) - _USAGE_BYTES))
    return sum(int(one) for one in found[-1] if one) if found else 0


def _not_json(body: bytes, status: int) -> tuple[bytes, int]:
    """The body as a JSON text where it is a sentence; vectors as bytes cannot stand in a line."""
    if status >= 400:
        return orjson.dumps(body.decode("utf-8", "replace")), status
    message = "encoding_format: a batch has room for JSON alone; use float or base64"
    return orjson.dumps({"error": {"message": message, "type": "invalid_request_error"}}), 400
