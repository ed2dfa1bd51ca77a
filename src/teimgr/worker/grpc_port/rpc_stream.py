"""One RPC on its HTTP/2 stream: metadata and messages in; metadata, messages and a status out."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from grpclib.metadata import decode_timeout, encode_grpc_message

from teimgr.byte_budget import ByteBudget, Charge
from teimgr.errors import Cancelled, DeadlineExceeded, InvalidInput, TeimgrError, TooLarge, Unsupported
from teimgr.http2.stream import Headers, Stalled, Stream
from teimgr.observability.request_context import REQUEST_ID, RequestContext
from teimgr.wire.status import GrpcStatus

_HEAD: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))
_CONTENT_TYPES = ("application/grpc", "application/grpc+proto")
_CUT_OFF = "Malformed message: the stream ends inside it"
_PREFIX_BYTES = 5  # of a message: whether it is compressed, and its length
# Limits on the time in which a message is received, from its first byte on, and on its wait for the budget.
MESSAGE_S = 120.0
_BUDGET_WAIT_S = 30.0
_MAX_TIMEOUT_S = 10.0 * 365 * 24 * 3600


class RpcStatusError(Exception):
    """Ends the call with a gRPC status that is none of our error codes."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.status = GrpcStatus(number, message)


class RpcStream:
    """One RPC. When the client resets it, the task that serves it is cancelled; methods need not check."""

    def __init__(self, stream: Stream, max_message_bytes: int, budget: ByteBudget) -> None:
        self.metadata = {name.decode("latin-1"): value.decode("latin-1") for name, value in stream.headers}
        self.path = self.metadata.get(":path", "")
        self.context = RequestContext.from_headers(self.metadata)
        self._stream = stream
        self._buffer = stream.received
        self._max_message_bytes = max_message_bytes
        self._opened = False
        self.budget = budget
        self.charge = Charge(budget)  # of messages received and not handed on

    @property
    def http_refusal(self) -> int:
        """The HTTP status for a request that is not gRPC; 0 for gRPC."""
        if self.metadata.get(":method") != "POST":
            return 405
        return 0 if self.metadata.get("content-type") in _CONTENT_TYPES else 415

    def timeout_s(self) -> float | None:
        """The client's timeout, None for no bound; raises InvalidInput: malformed header."""
        text = self.metadata.get("grpc-timeout")
        if text is None:
            return None
        try:
            return min(float(decode_timeout(text)), _MAX_TIMEOUT_S)
        except (ValueError, OverflowError):
            raise InvalidInput("Malformed grpc-timeout") from None

    async def receive(self, starts_within_s: float | None = None) -> bytes | None:
        """The client's next message, None after the last. It is charged to `charge` before its body is read.

        Raises:
            TooLarge: it exceeds the message limit; its body is not read.
            Unsupported: it is compressed.
            Overloaded: too many bytes of other messages are being received, or of replies not read.
            DeadlineExceeded: it did not start in time, or did not come to its end in time.
            InvalidInput: the stream ended inside it.
        """
        limit_s = starts_within_s
        try:
            async with asyncio.timeout(limit_s):
                prefix = await self._buffer.read(_PREFIX_BYTES)
            if not prefix:
                return None
            if len(prefix) < _PREFIX_BYTES:
                raise InvalidInput(_CUT_OFF)
            limit_s = MESSAGE_S
            async with asyncio.timeout(limit_s):
                return await self._body(prefix)
        except TimeoutError:
            raise DeadlineExceeded(f"Request timeout: no whole message within {limit_s:g} s") from None

    async def _body(self, prefix: bytes) -> bytes:
        if prefix[0]:
            encoding = self.metadata.get("grpc-encoding", "unknown")
            raise Unsupported(f"Content is compressed with `{encoding}` which isn't supported")
        size = int.from_bytes(prefix[1:], "big")
        if size > self._max_message_bytes:
            raise TooLarge(f"Request message larger than max ({size} vs. {self._max_message_bytes} bytes)")
        await self.charge.take(size, _BUDGET_WAIT_S)
        body = await self._buffer.read(size)
        if len(body) < size:
            raise InvalidInput(_CUT_OFF)
        return body

    async def open(self, metadata: Mapping[str, str] | None = None) -> None:
        """Send the initial metadata; `send` does it where this was not called."""
        self._opened = True
        await self._stream.send_headers([*_HEAD, *_encoded(metadata or {})])

    async def send(self, message: bytes | memoryview) -> None:
        """Send one message, waiting for the client's flow control; raises TooLarge: it exceeds the message limit."""
        if len(message) > self._max_message_bytes:
            raise TooLarge(f"Reply message larger than max ({len(message)} vs. {self._max_message_bytes} bytes)")
        if not self._opened:
            await self.open()
        framed = b"".join((b"\0", len(message).to_bytes(4, "big"), message))
        try:
            await self._stream.send_data(framed)
        except Stalled as error:
            raise Cancelled(f"The reply was not read: {error}") from None

    async def finish(self, status: GrpcStatus) -> None:
        trailers = {"grpc-status": str(status.number)}
        if status.message:
            trailers["grpc-message"] = encode_grpc_message(status.message)
        trailers |= dict(status.metadata) | {REQUEST_ID: self.context.request_id}
        await self._stream.send_headers([*(() if self._opened else _HEAD), *_encoded(trailers)], end=True)

    async def refuse(self, http_status: int) -> None:
        await self._stream.send_headers([(b":status", b"%d" % http_status)], end=True)

    def stop(self, error: TeimgrError) -> None:
        """Fail reads once the received messages are read."""
        self._buffer.fail(error)


def _encoded(metadata: Mapping[str, str]) -> Headers:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in metadata.items()]
