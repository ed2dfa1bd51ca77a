"""The two directions of one bidirectional call: a task that sends, a reader that paces it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import grpc

from teimgr.client.failures import from_status
from teimgr.errors import Cancelled, DeadlineExceeded, Internal

T = TypeVar("T")

# What grpc.aio puts in place of the server's status when a write comes too late (grpc issue 36066).
_MADE_UP = "Internal error from Core"
_LATE_S = 1.0
_LOOK_S = 0.002


class Status(NamedTuple):
    """The three things a status is made of."""

    code: grpc.StatusCode
    details: str | None
    trailing: Any


class CallStatus:
    """The status of one streaming call.

    The made-up status may come after the true one, which is therefore noted at once, or before it, and is then
    replaced a moment later without notice.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._status: Status | None = None
        call.add_done_callback(self._note)

    async def status(self) -> Status:
        """The status of a call that is over."""
        if self._status is None:
            self._status = Status(await self._call.code(), await self._call.details(), None)
        end = time.monotonic() + _LATE_S
        while self._status.details == _MADE_UP and time.monotonic() < end:
            await asyncio.sleep(_LOOK_S)
            self._note(self._call)
        return self._status

    def _note(self, call: Any) -> None:
        details = _at_once(call.details())
        self._status = Status(_at_once(call.code()), details, _at_once(call.trailing_metadata()))


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    raise RuntimeError("the call is not over")


_aio: Any = grpc.aio
_EOF = _aio.EOF
_LAST_WORDS_S = 1.0


class BidiStream:
    """Sends `first` and then `requests` while fewer than `window` of them wait for a reply.

    Owns the sending task until `end`.
    """

    def __init__(self, call: Any, first: bytes, requests: AsyncIterator[bytes], window: int) -> None:
        self._call = call
        self._requests = requests
        self._room = asyncio.Semaphore(window)
        self._ending = CallStatus(call)
        self._owed = 0
        self._waiting_since = 0.0
        self._reading: asyncio.Future[Any] | None = None
        self._sending = asyncio.create_task(self._send(first))

    async def reply(self, idle_s: float) -> bytes | None:
        """The next reply, None after the last.

        Raises:
            DeadlineExceeded: a reply is owed and did not come for `idle_s`.
            TeimgrError: the call ended with a status.
            Exception: what `requests` raised, after everything it gave before was answered.
        """
        self._reading = asyncio.ensure_future(self._call.read())
        while not (await asyncio.wait((self._reading,), timeout=idle_s - self._waited_s()))[0]:
            if self._waited_s() >= idle_s:
                raise DeadlineExceeded(f"no reply on the stream for {idle_s:g} s")
        if self._reading.cancelled():
            raise Cancelled("the client was closed during the call")
        try:
            received = self._reading.result()
        except grpc.aio.AioRpcError:
            received = _EOF
        if received is _EOF:
            await self._finish()
            return None
        self._owed -= 1
        self._waiting_since = time.monotonic()
        self._room.release()
        return bytes(received)

    async def end(self) -> None:
        """Give up what is unfinished; returns when both directions are quiet."""
        self._sending.cancel()
        self._call.cancel()
        running = [self._sending] if self._reading is None else [self._sending, self._reading]
        await asyncio.gather(*running, return_exceptions=True)

    def _waited_s(self) -> float:
        """Seconds without a reply while one is owed."""
        return time.monotonic() - self._waiting_since if self._owed else 0.0

    async def _finish(self) -> None:
        """The server ended the stream: pass on its status, then whatever made the sender stop."""
        status = await self._ending.status()
        if status.code is not grpc.StatusCode.OK:
            raise from_status(*status)
        sent, _ = await asyncio.wait((self._sending,), timeout=_LAST_WORDS_S)
        if not sent:
            raise Internal("the server ended the stream while requests were still to come")
        await self._sending
        if self._owed:
            raise Internal(f"the server ended the stream without answering {self._owed} requests")

    async def _send(self, first: bytes) -> None:
        request: bytes | None = first
        await self._room.acquire()
        try:
            while request is not None and await self._wrote(request):
                await self._room.acquire()
                request = await anext(self._requests, None)
        finally:
            if not self._call.done():
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.done_writing()

    async def _wrote(self, request: bytes) -> bool:
        """False when the call is over; the reader hears why."""
        if not self._owed:
            self._waiting_since = time.monotonic()
        self._owed += 1
        try:
            await self._call.write(request)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return False
        return True
