"""What every HTTP listener does with a request: what its body is, reading it within a bound, a client that hangs up."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from teimgr.errors import Cancelled

_THROW_AWAY_BYTES = 64 * 2**20

AnswerT = TypeVar("AnswerT")


def media_type(content_type: str) -> str:
    """The type that a Content-Type header names, without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def is_json(content_type: str) -> bool:
    """Whether a Content-Type header names JSON, or a form of it such as application/problem+json."""
    kind = media_type(content_type)
    return kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))


async def read_limited(chunks: AsyncIterator[bytes], limit_bytes: int) -> bytes | None:
    """A request's whole body; None when it is larger than `limit_bytes`."""
    body = bytearray()
    return bytes(body) if await read_into(body, chunks, limit_bytes) else None


async def read_into(buffer: bytearray, chunks: AsyncIterator[bytes], limit_bytes: int) -> bool:
    """Append the whole body; False, and an empty buffer, when it is larger than `limit_bytes`.

    The rest of a body that is too large is read and thrown away, to a bound: a client that is cut off while it still
    sends never sees the answer that says why.
    """
    room, thrown_away = limit_bytes, 0
    async for chunk in chunks:
        room -= len(chunk)
        if room >= 0:
            buffer += chunk
            continue
        buffer.clear()
        thrown_away += len(chunk)
        if thrown_away > _THROW_AWAY_BYTES:
            break
    return room >= 0


async def unless_hung_up(answering: Coroutine[Any, Any, AnswerT], receive: Callable[[], Awaitable[Any]]) -> AnswerT:
    """The answer, unless the client hangs up first: then what it asked for is given up.

    `receive` is ASGI's, of a request whose body was read.

    Raises:
        Cancelled: nobody will read the answer.
        TeimgrError: as `answering` does.
    """
    answered = asyncio.ensure_future(answering)
    hung_up = asyncio.ensure_future(_hung_up(receive))
    either: set[asyncio.Future[Any]] = {answered, hung_up}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if answered.done():
            return answered.result()
        raise Cancelled("the client hung up")
    finally:
        for one in either:
            one.cancel()


async def _hung_up(receive: Callable[[], Awaitable[Any]]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
