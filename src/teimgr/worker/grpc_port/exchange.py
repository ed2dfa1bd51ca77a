"""One RPC on its HTTP/2 stream: metadata and messages in; metadata, messages and a status out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

from grpclib.metadata import decode_timeout, encode_grpc_message
from grpclib.protocol import Stream

from teimgr.errors import InvalidInput, TeimgrError, TooLarge, Unsupported
from teimgr.observability.request_context import REQUEST_ID, RequestContext
from teimgr.wire.status import OK


class ReceiveBuffer:
    """Bytes in the order they came, with HTTP/2's flow control: the client may send more once somebody waits for it.

    It stands in for the buffer that grpclib gives a stream, which keeps an object per DATA frame and takes an empty one
    for the end. `acknowledge` is called with the number of bytes that the client may send anew.
    """

    def __init__(self, acknowledge: Callable[[int], None]) -> None:
        self._acknowledge = acknowledge
        self._data = bytearray()
        self._unacknowledged = 0
        self._ended = False
        self._failure: TeimgrError | None = None
        self._news = asyncio.Event()

    async def read(self, size: int) -> bytes:
        """Exactly `size` bytes; none when the client has said everything before.

        Raises:
            InvalidInput: it ended in the middle.
            TeimgrError: what `fail` was given, once nothing more is there.
        """
        while len(self._data) < size and not self._ended:
            if self._failure is not None:
                raise self._failure
            self._acknowledge(self.unacked_size())
            self._news.clear()
            await self._news.wait()
        if not self._data:
            return b""
        if len(self._data) < size:
            raise InvalidInput("Malformed message: the stream ends inside it")
        taken = bytes(memoryview(self._data)[:size])
        del self._data[:size]
        return taken

    def fail(self, error: TeimgrError) -> None:
        """Nobody waits for the client any longer."""
        self._failure = error
        self._news.set()

    # What grpclib calls.

    def add(self, data: bytes, ack_size: int) -> None:
        """A DATA frame came; it counts for `ack_size` bytes of the client's window."""
        self._data += data
        self._unacknowledged += ack_size
        self._news.set()

    def eof(self) -> None:
        """The client has said everything."""
        self._ended = True
        self._news.set()

    def unacked_size(self) -> int:
        """The bytes that are to be acknowledged now; they are counted once."""
        size, self._unacknowledged = self._unacknowledged, 0
        return size


Headers = Sequence[tuple[str, str]]

_HEAD_BYTES = 5
_MAX_TIMEOUT_S = 10.0 * 365 * 24 * 3600
# Statuses travel in trailers, which clients bound at a few kilobytes.
_MESSAGE_CHARS = 2000
_CONTENT_TYPES = ("application/grpc", "application/grpc+proto")
# Trailing metadata with the name of our code, as on the mux port.
_CODE_KEY = "x-teimgr-code"


class RpcStream:
    """One RPC. A client that goes away cancels the task that serves it; no method has to look for that."""

    def __init__(self, stream: Stream, inbox: ReceiveBuffer, headers: Headers, max_message_bytes: int) -> None:
        self.metadata = dict(headers)
        self.path = self.metadata.get(":path", "")
        self.context = RequestContext.from_headers(self.metadata)
        self._stream = stream
        self._inbox = inbox
        self._max_message_bytes = max_message_bytes
        self._opened = False

    @property
    def http_refusal(self) -> int:
        """The HTTP status of what is no gRPC at all; 0 for what is."""
        if self.metadata.get(":method") != "POST":
            return 405
        return 0 if self.metadata.get("content-type") in _CONTENT_TYPES else 415

    def timeout_s(self) -> float | None:
        """The time the client gives the call, None for ever.

        Raises:
            InvalidInput: it is no gRPC timeout.
        """
        text = self.metadata.get("grpc-timeout")
        if text is None:
            return None
        try:
            return min(float(decode_timeout(text)), _MAX_TIMEOUT_S)
        except (ValueError, OverflowError):
            raise InvalidInput("Malformed grpc-timeout") from None

    async def receive(self) -> bytes | None:
        """The client's next message, None after the last.

        Raises:
            TooLarge: it is over the message limit; not one byte of it was waited for.
            Unsupported: it is compressed.
            InvalidInput: the client stopped in the middle of it.
        """
        head = await self._inbox.read(_HEAD_BYTES)
        if not head:
            return None
        if head[0]:
            encoding = self.metadata.get("grpc-encoding", "unknown")
            raise Unsupported(f"Content is compressed with `{encoding}` which isn't supported")
        size = int.from_bytes(head[1:], "big")
        if size > self._max_message_bytes:
            raise TooLarge(f"Request message larger than max ({size} vs. {self._max_message_bytes} bytes)")
        body = await self._inbox.read(size)
        if len(body) < size:
            raise InvalidInput("Malformed message: the stream ends inside it")
        return body

    async def open(self, metadata: Mapping[str, str] | None = None) -> None:
        """Send the initial metadata; `send` does it where this was not called."""
        self._opened = True
        await self._stream.send_headers([*_HEAD, *(metadata or {}).items()])

    async def send(self, message: bytes) -> None:
        """Send one message, waiting for a client that is slow to take it.

        Raises:
            TooLarge: it is over the message limit.
        """
        if len(message) > self._max_message_bytes:
            raise TooLarge(f"Reply message larger than max ({len(message)} vs. {self._max_message_bytes} bytes)")
        if not self._opened:
            await self.open()
        await self._stream.send_data(b"\0" + len(message).to_bytes(4, "big") + message)

    async def finish(self, status: int = OK, message: str = "", code: str = "") -> None:
        """End the call with the gRPC status of that number, and the name of our code where the failure has one."""
        trailers = [] if self._opened else [*_HEAD]
        trailers.append(("grpc-status", str(status)))
        if message:
            trailers.append(("grpc-message", encode_grpc_message(message[:_MESSAGE_CHARS])))
        if code:
            trailers.append((_CODE_KEY, code))
        trailers.append((REQUEST_ID, self.context.request_id))
        await self._stream.send_headers(trailers, end_stream=True)
        self._give_up_the_rest()

    async def refuse(self, http_status: int) -> None:
        """Answer what is no gRPC."""
        await self._stream.send_headers([(":status", str(http_status))], end_stream=True)
        self._give_up_the_rest()

    def stop(self, error: TeimgrError) -> None:
        """Wait for nothing more from the client; what it has sent is still read."""
        self._inbox.fail(error)

    def _give_up_the_rest(self) -> None:
        """A client that still speaks is told that nobody listens."""
        if self._stream.closable:
            self._stream.reset_nowait()


_HEAD: Headers = ((":status", "200"), ("content-type", "application/grpc"))


class RpcStatusError(Exception):
    """End the call with the gRPC status of that number and this sentence."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
