"""Request bodies of the inference gateway: read within shared budgets, and searched for the `model` they name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
from starlette.requests import Request

from teimgr.errors import Overloaded, TooLarge
from teimgr.http_server import read_into
from teimgr.routing.links import ByteBudget
from teimgr.wire.http_frames import Buffer

# Bodies beyond this size are scanned for their model instead of parsed: orjson would hold the GIL for milliseconds.
SCANNED_BYTES = 256 * 1024

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TOKEN = re.compile(_STRING + rb"|[\[{]|[\]}]", re.DOTALL)
_IS_KEY = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+(" + _STRING + rb")?", re.DOTALL)
# No real request has so many tokens; scanning them takes some tenths of a second.
_MAX_TOKENS = 1_000_000
_KEY = b'"model"'
_ESCAPED_LETTER = b"\\u006"  # of "model"; no encoder escapes ASCII letters


def model_of(body: bytes | bytearray, start: int = 0) -> str | None:
    """The text under `model` in the JSON object that begins at `start`; None where there is none.

    The first of several wins. Malformed JSON may have an answer too: the worker, which parses the whole, refuses it.
    """
    is_escaped = body.find(b"\\", start) >= 0 and body.find(_ESCAPED_LETTER, start) >= 0  # one byte is found fastest
    if len(body) - start > SCANNED_BYTES or is_escaped or body.find(_KEY, start) != body.rfind(_KEY, start):
        return _scan(body, start)
    try:
        value = orjson.loads(memoryview(body)[start:])
    except orjson.JSONDecodeError:
        return _scan(body, start)
    model = value.get("model") if isinstance(value, dict) else None
    return model if isinstance(model, str) else None


def _scan(body: Buffer, start: int) -> str | None:
    depth = 0
    for count, token in enumerate(_TOKEN.finditer(body, start)):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
        elif depth == 1 and (value := _IS_KEY.match(body, token.end())) and _string(token.group()) == "model":
            return None if value.group(1) is None else _string(value.group(1))
        if count >= _MAX_TOKENS or depth <= 0:
            return None
    return None


def _string(literal: Buffer) -> str | None:
    try:
        return str(orjson.loads(literal))
    except orjson.JSONDecodeError:
        return None


# Bodies up to here share a budget of their own, so that interactive requests never wait for a pipeline's.
SMALL_BYTES = 64 * 1024
_SMALL_IN_ALL = 64 * 2**20
_LARGE_IN_ALL = 256 * 2**20
# How long a body may wait for its budget, and how long its client may take to send it.
_TURN_S = 30.0
_SENDING_S = 120.0


class SlowClient(Exception):
    """The body did not come in time."""


class Bodies:
    """Reads bodies of at most `limit_bytes`; those being read or answered are bounded together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._small = ByteBudget(_SMALL_IN_ALL)
        self._large = ByteBudget(max(_LARGE_IN_ALL, limit_bytes))

    @asynccontextmanager
    async def read(self, request: Request, head: bytes) -> AsyncIterator[bytearray]:
        """`head` and the body in one buffer; its bytes count against the budget until the block ends.

        Raises:
            TooLarge: the body is over the limit; the rest of it is discarded.
            Overloaded: the budget stayed exhausted for too long.
            SlowClient, ClientDisconnect: the client stopped sending, or hung up.
        """
        length = request.headers.get("content-length", "")
        size = int(length) if length.isdecimal() else self.limit_bytes  # without a length: taken for the largest
        budget = self._small if size <= SMALL_BYTES else self._large
        size = min(size, self.limit_bytes)  # more is not kept
        try:
            async with asyncio.timeout(_TURN_S):
                await budget.take(size)
        except TimeoutError:
            raise Overloaded("Too many large requests are being read; try again later") from None
        try:
            buffer = bytearray(head)
            try:
                async with asyncio.timeout(_SENDING_S):
                    fits = await read_into(buffer, request.stream(), self.limit_bytes)
            except TimeoutError:
                raise SlowClient from None
            if not fits:
                raise TooLarge(f"The request body is larger than the limit of {self.limit_bytes} bytes")
            yield buffer
        finally:
            budget.give_back(size)
