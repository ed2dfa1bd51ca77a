"""One RPC on its HTTP/2 stream: metadata and messages in; metadata, messages and a status out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from grpclib.metadata import decode_timeout, encode_grpc_message
from grpclib.protocol import Stream

from teimgr.byte_budget import ByteBudget, Charge
from teimgr.errors import Cancelled, DeadlineExceeded, InvalidInput, TeimgrError, TooLarge, Unsupported
from teimgr.http_protocol import STALL_S
from teimgr.observability.request_context import REQUEST_ID, RequestContext
from teimgr.wire.status import GrpcStatus

Headers = Sequence[tuple[str, str]]

_HEAD: Headers = ((":status", "200"), ("content-type", "application/grpc"))
_CONTENT_TYPES = ("application/grpc", "application/grpc+proto")
_PREFIX_BYTES = 5  # of a message: whether it is compressed, and its length
# Limits on the time in which a message is received, from its first byte on, and on its wait for the budget.
MESSAGE_S = 120.0
_BUDGET_WAIT_S = 30.0
# Replies are sent in parts of this size, each within the limit for clients that do not read.
_PART_BYTES = 64 * 1024
_MAX_TIMEOUT_S = 10.0 * 365 * 24 * 3600


class RpcStatusError(Exception):
    """Ends the call with a gRPC status that is none of our error codes."""

    def __init__(self, number: int, message: str) -> None:
        super().__init__(message)
        self.status = GrpcStatus(number, message)


class ReceiveBuffer:
    """Receive buffer of a stream with HTTP/2 flow control: the window reopens only when a reader waits for data.

    It replaces the buffer that grpclib gives a stream, which keeps an object per DATA frame and takes an empty frame
    for the end. `acknowledge` is called with the number of bytes to add to the client's window.
    """

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._data = bytearray()
        self._unacknowledged = 0
        self._ended = False
        self._failure: TeimgrError | None = None
        self._received = asyncio.Event()

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes; none at the end of the stream.

        Raises:
            InvalidInput: the stream ended after fewer.
            TeimgrError: the error given to `fail`, once all received bytes are read.
        """
        while len(self._data) < size and not self._ended:
            if self._failure is not None:
                raise self._failure
            self._acknowledge(self.unacked_size())
            self._received.clear()
            await self._received.wait()
        if not self._data:
            return b""
        if len(self._data) < size:
            raise InvalidInput("Malformed message: the stream ends inside it")
        taken = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        return taken

    def fail(self, error: TeimgrError) -> None:
        """Stop waiting for data."""
        self._failure = error
        self._received.set()

    # The interface of grpclib's buffer.

    def add(self, data: bytes, ack_size: int) -> None:
        """Append a DATA frame, which took `ack_size` bytes of the client's window."""
        self._data += data
        self._unacknowledged += ack_size
        self._received.set()

    def eof(self) -> None:
        self._ended = True
        self._received.set()

    def unacked_size(self) -> int:
        """The bytes to acknowledge now; each is counted once."""
        size, self._unacknowledged = self._unacknowledged, 0
        return size


class RpcStream:
    """One RPC. When the client resets it, the task that serves it is cancelled; methods need not check."""

    def __init__(
        self, stream: Stream, buffer: ReceiveBuffer, headers: Headers, max_message_bytes: int, budget: ByteBudget
    ) -> None:
        self.metadata = dict(headers)
        self.path = self.metadata.get(":path", "")
        self.context = RequestContext.from_headers(self.metadata)
        self._stream = stream
        self._buffer = buffer
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
            raise InvalidInput("Malformed message: the stream ends inside it")
        return body

    async def open(self, metadata: Mapping[str, str] | None = None) -> None:
        """Send the initial metadata; `send` does it where this was not called."""
        self._opened = True
        await self._stream.send_headers([*_HEAD, *(metadata or {}).items()])

    async def send(self, message: bytes) -> None:
        """Send one message, waiting for the client's flow control; raises TooLarge: it exceeds the message limit."""
        if len(message) > self._max_message_bytes:
            raise TooLarge(f"Reply message larger than max ({len(message)} vs. {self._max_message_bytes} bytes)")
        if not self._opened:
            await self.open()
        framed = b"\0" + len(message).to_bytes(4, "big") + message
        try:
            for start in range(0, len(framed), _PART_BYTES):
                async with asyncio.timeout(STALL_S):
                    await self._stream.send_data(framed[start : start + _PART_BYTES])
        except TimeoutError:
            raise Cancelled(f"The reply was not read: a part of it waited {STALL_S:g} s") from None

    async def finish(self, status: GrpcStatus) -> None:
        trailers = [] if self._opened else [*_HEAD]
        trailers.append(("grpc-status", str(status.number)))
        if status.message:
            trailers.append(("grpc-message", encode_grpc_message(status.message)))
        trailers += status.metadata
        trailers.append((REQUEST_ID, self.context.request_id))
        await self._stream.send_headers(trailers, end_stream=True)
        self._reset_if_open()

    async def refuse(self, http_status: int) -> None:
        await self._stream.send_headers([(":status", str(http_status))], end_stream=True)
        self._reset_if_open()

    def stop(self, error: TeimgrError) -> None:
        """Fail reads once the received messages are read."""
        self._buffer.fail(error)

    def _reset_if_open(self) -> None:
        """Reset a stream whose client has not half-closed: nothing reads it any more."""
        if self._stream.closable:
            self._stream.reset_nowait()
