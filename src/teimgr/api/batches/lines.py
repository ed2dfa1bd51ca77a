"""Lines of an input file: read in chunks, checked in threads, sent until each has an answer that counts.

A line is `{"custom_id": …, "method": "POST", "url": …, "body": {…}}`; blank lines are passed over. `validate`
checks a whole file before its requests.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, aclosing, asynccontextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson

from teimgr.api.batches.batch_record import BatchFault
from teimgr.api.batches.batch_store import ResultLine
from teimgr.api.batches.disk import Disk
from teimgr.errors import Broken, DeadlineExceeded, InvalidInput, Refused, TeimgrError, TryLater
from teimgr.http.bodies import is_json
from teimgr.http.byte_budget import ByteBudget
from teimgr.observability.request_context import CURRENT, RequestContext
from teimgr.wire import error_bodies, json_pieces, json_scan
from teimgr.wire.frames import HttpReply
from teimgr.wire.routing.links import ConnectionLost
from teimgr.wire.status import TRY_AGAIN

MAX_ID_CHARS = 512
MAX_MODEL_CHARS = 4096
MAX_FAULTS = 100  # validation stops after this many
_CHUNK_BYTES = 1024 * 1024
_CHUNK_LINES = 500
# A longer line is decoded in pieces, since the parser holds the GIL for 0.1 s and more with megabytes.
_LARGE_LINE_BYTES = 128 * 1024
_BOM = b"\xef\xbb\xbf"
_REPLY_BYTES = 16 * 1024  # estimated size of the reply to one input


class InputRequest(NamedTuple):
    """One request; `row` counts requests from 0, `number` lines from 1.

    `cost` is the estimated memory of the request and its reply in bytes.
    """

    row: int
    number: int
    custom_id: str
    model: str
    body: bytes
    cost: int

    @property
    def digest(self) -> bytes:
        """A digest of the custom_id, for finding duplicates."""
        return blake2b(self.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


Parsed = InputRequest | BatchFault


async def read_requests(disk: Disk, path: Path, url: str, max_line_bytes: int) -> AsyncGenerator[list[Parsed]]:
    """The lines of a file, chunk by chunk.

    Raises:
        OSError: it cannot be read.
    """
    opened = ExitStack()  # also closes a file opened after a cancellation
    try:
        file: BinaryIO = await disk.run(lambda: opened.enter_context(path.open("rb")))
        reader = _Reader(file, url, max_line_bytes)
        while (chunk := await disk.run(reader.chunk)) is not None:
            if chunk:  # empty if all lines were blank
                yield chunk
    finally:
        await disk.run(opened.close)


class _Reader:
    def __init__(self, file: BinaryIO, url: str, max_line_bytes: int) -> None:
        self._file = file
        self._url = url
        self._max_line_bytes = max_line_bytes
        self._number = self._row = 0

    def chunk(self) -> list[Parsed] | None:
        """The next lines that are not blank, possibly an empty list; None at the end of the file."""
        found: list[Parsed] = []
        end = self._file.tell() + _CHUNK_BYTES
        while len(found) < _CHUNK_LINES and self._file.tell() < end:
            line = self._file.readline(self._max_line_bytes + 1)
            if not line:
                return found or None
            self._number += 1
            if len(line) > self._max_line_bytes and not line.endswith(b"\n"):
                self._skip_line()
                found.append(self._too_long())
            elif line := line.removeprefix(_BOM).strip() if self._number == 1 else line.strip():
                found.append(self._parsed(line))
        return found

    def _skip_line(self) -> None:
        while (part := self._file.readline(_CHUNK_BYTES)) and not part.endswith(b"\n"):
            pass

    def _too_long(self) -> BatchFault:
        self._row += 1
        limit = self._max_line_bytes // 1024
        return BatchFault("line_too_long", f"This line is longer than {limit} KiB (batches.max_line_kb).", self._number)

    def _parsed(self, line: bytes) -> Parsed:
        row, self._row = self._row, self._row + 1
        try:
            value = orjson.loads(line) if len(line) <= _LARGE_LINE_BYTES else json_scan.loads(line)
        except InvalidInput as error:
            return BatchFault("invalid_json_line", f"{error.message}.", self._number)
        except ValueError:
            return BatchFault("invalid_json_line", "This line is not parseable as valid JSON.", self._number)
        if not isinstance(value, dict):
            return BatchFault("invalid_json_line", "This line is not a JSON object.", self._number)
        if fault := next(self._faults(value), None):
            return fault._replace(line=self._number)
        body = value["body"]
        raw = json_pieces.dumps(body)
        inputs = max((len(each) for each in body.values() if isinstance(each, list)), default=1)
        cost = len(raw) + inputs * _REPLY_BYTES
        return InputRequest(row, self._number, value["custom_id"], body["model"], raw, cost)

    def _faults(self, value: dict[str, Any]) -> Iterator[BatchFault]:
        for name, kind, noun in (("custom_id", str, "a text"), ("url", str, "a text"), ("body", dict, "an object")):
            yield from _member(value, name, kind, noun)
        if len(value["custom_id"]) > MAX_ID_CHARS:
            text = f"custom_id is longer than {MAX_ID_CHARS} characters."
            yield BatchFault("string_above_max_length", text, param="custom_id")
        if value.get("method") != "POST":
            yield BatchFault("invalid_method", "The method must be POST.", param="method")
        if value["url"] != self._url:
            text = f"The URL of this request is not the endpoint of the batch, {self._url}."
            yield BatchFault("mismatched_endpoint", text, param="url")
        for fault in _member(value["body"], "model", str, "a text"):
            yield fault._replace(param="body.model")
        if len(value["body"]["model"]) > MAX_MODEL_CHARS:
            text = f"body.model is longer than {MAX_MODEL_CHARS} characters."
            yield BatchFault("string_above_max_length", text, param="body.model")


def _member(holder: dict[str, Any], name: str, kind: type, noun: str) -> Iterator[BatchFault]:
    if (given := holder.get(name)) is None or given == "":
        yield BatchFault("missing_required_parameter", f"Missing required parameter: {name}.", param=name)
    elif not isinstance(given, kind):
        yield BatchFault("invalid_type", f"{name} must be {noun}.", param=name)


CheckModel = Callable[[str], None]
"""Raises a TeimgrError if the owner may not use this model."""


class Validated(NamedTuple):
    """The result of validation: the number of requests, the model if all name the same, and the faults."""

    total: int
    model: str | None
    faults: list[BatchFault]


async def validate(
    disk: Disk, path: Path, url: str, max_line_bytes: int, max_lines: int, check_model: CheckModel
) -> Validated:
    """Check every line: its form, its endpoint, that its custom_id is unique, and its model.

    In memory are a chunk of lines, and 16 bytes for each custom_id.

    Raises:
        OSError: the file cannot be read.
    """
    seen = _Seen(check_model)
    total = 0
    async with aclosing(read_requests(disk, path, url, max_line_bytes)) as chunks:
        async for chunk in chunks:
            for parsed in chunk:
                if total == max_lines:
                    text = f"The file has more than {max_lines} requests (batches.max_lines)."
                    seen.faults.append(BatchFault("too_many_requests", text))
                    return Validated(total, None, seen.faults)
                total += 1
                if isinstance(parsed, BatchFault):
                    seen.faults.append(parsed)
                elif seen.check(parsed):
                    await asyncio.sleep(0)  # the search for similar names takes milliseconds
                if len(seen.faults) >= MAX_FAULTS:
                    return Validated(total, None, seen.faults)
    if not total:
        seen.faults.append(BatchFault("empty_file", "The file has no request."))
    models = list(seen.models)
    return Validated(total, models[0] if len(models) == 1 else None, seen.faults)


class _Seen:
    """The custom_ids and models of the requests so far."""

    def __init__(self, check_model: CheckModel) -> None:
        self.faults: list[BatchFault] = []
        self.models: dict[str, str | None] = {}  # error of each, or None
        self._ids: set[bytes] = set()
        self._check_model = check_model

    def check(self, request: InputRequest) -> bool:
        """Note a request and its faults; whether its model was looked up."""
        digest = request.digest
        if digest in self._ids:
            text = "The custom_id of this request is that of another one; it must be unique in a batch."
            self.faults.append(BatchFault("duplicate_custom_id", text, request.number, "custom_id"))
        self._ids.add(digest)
        is_new = request.model not in self.models
        if is_new:
            self.models[request.model] = self._refusal(request.model)
        if (why := self.models[request.model]) is not None:
            self.faults.append(BatchFault("model_not_found", why, request.number, "body.model"))
        return is_new

    def _refusal(self, model: str) -> str | None:
        try:
            self._check_model(model)
        except TeimgrError as error:
            return error.message
        return None


Send = Callable[[bytes], Awaitable[HttpReply]]
"""Sends a body to the batch's endpoint as its owner; raises a TeimgrError if no worker answered."""

# Limit of the estimated bytes of all requests in the workers and their replies; one request always fits.
_IN_FLIGHT_BYTES = 64 * 2**20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
# Limit of failures that the request itself may cause, such as a crash of its worker.
_MAX_FAILURES = 4


# Matches no text of a client, whose quotes are escaped. Cohere counts tokens of images separately.
_USAGE = re.compile(rb'"(?:total|input)_tokens":(\d+)(?:,"images":\d+,"image_tokens":(\d+))?')
_USAGE_BYTES = 256


class CallSlots:
    """Limits the batches' requests in the workers by number and estimated bytes, first come first served."""

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
    """Why a request has no reply, with OpenAI's code."""

    code: str
    message: str


EXPIRED = LineError("batch_expired", "This request could not be executed before the completion window expired.")
CANCELLED = LineError("batch_cancelled", "The batch was cancelled before this request was executed.")


class _Failure(NamedTuple):
    """A failed attempt. `counts`: the request may be the cause, so the number of attempts is limited."""

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
    message = "encoding_format: results of batches are JSON; use float or base64"
    return orjson.dumps({"error": {"message": message, "type": "invalid_request_error"}}), 400
