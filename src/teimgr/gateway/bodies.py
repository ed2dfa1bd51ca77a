"""A request's body behind the head of its frame, read within a budget that all clients share."""

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

_STRING = rb'"(?:[^"\\]++|\\.)*+"'
_TOKEN = re.compile(_STRING + rb"|[\[{]|[\]}]", re.DOTALL)
_IS_KEY = re.compile(rb"[ \t\r\n]*+:[ \t\r\n]*+(" + _STRING + rb")?", re.DOTALL)
# What no request has in earnest; looking at so many takes some tenths of a second.
_MAX_TOKENS = 1_000_000

Buffer = bytes | bytearray | memoryview


def text_of(key: str, body: Buffer, start: int = 0) -> str | None:
    """The text under `key` of the object that begins at `start`; None where there is none.

    The first of several wins. What is no JSON may have an answer too: whoever reads the whole body finds out.
    """
    depth, plain = 0, b'"' + key.encode() + b'"'
    for count, token in enumerate(_TOKEN.finditer(body, start)):
        first = body[token.start()]
        if first in b"[{":
            depth += 1
        elif first in b"]}":
            depth -= 1
        elif depth == 1 and (value := _IS_KEY.match(body, token.end())) and _is(token.group(), plain, key):
            return None if value.group(1) is None else _decoded(value.group(1))
        if count >= _MAX_TOKENS or depth <= 0:
            return None
    return None


def _is(token: Buffer, plain: bytes, key: str) -> bool:
    if token == plain:
        return True
    return b"\\" in bytes(token) and _decoded(token) == key


def _decoded(string: Buffer) -> str | None:
    try:
        value = orjson.loads(string)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, str) else None


# Bodies up to here share a budget of their own, so that those of somebody at a prompt never wait for a pipeline's.
SMALL_BYTES = 64 * 1024
_SMALL_IN_ALL = 64 * 2**20
_LARGE_IN_ALL = 256 * 2**20
# How long a body may wait for its turn, and how long its client may take to send it.
_TURN_S = 30.0
_SENDING_S = 120.0


class SlowClient(Exception):
    """The body did not come in time."""


class Bodies:
    """Reads bodies of at most `limit_bytes`; those that are under way or being answered are bounded together."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._small = ByteBudget(_SMALL_IN_ALL)
        self._large = ByteBudget(max(_LARGE_IN_ALL, limit_bytes))

    @asynccontextmanager
    async def read(self, request: Request, head: bytes) -> AsyncIterator[bytearray]:
        """`head` and the body in one buffer, whose bytes count as taken until the block ends.

        Raises:
            TooLarge: the body is over the limit; what was still sent of it is thrown away.
            Overloaded: others' bodies leave no room for too long.
            SlowClient, ClientDisconnect: the client does not go on, or is gone.
        """
        size = self._announced(request)
        budget = self._small if size <= SMALL_BYTES else self._large
        size = min(size, self.limit_bytes)  # what is over the limit is not kept
        try:
            async with asyncio.timeout(_TURN_S):
                await budget.take(size)
        except TimeoutError:
            raise Overloaded("Too many large requests are being read; try again later") from None
        try:
            yield await self._whole(request, head)
        finally:
            budget.give_back(size)

    def _announced(self, request: Request) -> int:
        """How many bytes it will be: one that does not say is taken for the largest."""
        length = request.headers.get("content-length", "")
        return int(length) if length.isdecimal() else self.limit_bytes

    async def _whole(self, request: Request, head: bytes) -> bytearray:
        buffer = bytearray(head)
        try:
            async with asyncio.timeout(_SENDING_S):
                fits = await read_into(buffer, request.stream(), self.limit_bytes)
        except TimeoutError:
            raise SlowClient from None
        if not fits:
            raise TooLarge(f"The request body is larger than the limit of {self.limit_bytes} bytes")
        return buffer
