"""gRPC connection to a mux: serialized messages in and out, failures as `TeimgrError`."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import grpc

from teimgr.client.server_address import Proxy, ServerAddress, Tls
from teimgr.errors import (
    Cancelled,
    Code,
    Internal,
    InvalidConfig,
    TeimgrError,
    Unavailable,
    Unreachable,
    error_from_code,
)
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import CODE_KEY, PUSHBACK_KEY

MAX_CALLS = 512
"""Limit on the unary calls that a channel has in flight."""
SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"

_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
# grpc's "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9001: reason"
_LAST_ERROR = re.compile(r"last error: [A-Z_]+: (?:\w+:\S+: )?(.+)")
_CERTIFICATE_HINT = " (the server may require a client certificate, or have no TLS)"
_TLS_HINT = " (the server may require TLS: https://)"

# Our codes for the statuses of a server that sends none, such as tei-manager.
_CODES = {
    grpc.StatusCode.CANCELLED: Code.CANCELLED,
    grpc.StatusCode.INVALID_ARGUMENT: Code.INVALID_INPUT,
    grpc.StatusCode.DEADLINE_EXCEEDED: Code.TIMEOUT,
    grpc.StatusCode.NOT_FOUND: Code.INSTANCE_NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS: Code.INSTANCE_EXISTS,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Code.OVERLOADED,
    grpc.StatusCode.FAILED_PRECONDITION: Code.WRONG_MODEL_KIND,
    grpc.StatusCode.OUT_OF_RANGE: Code.MESSAGE_TOO_LARGE,
    grpc.StatusCode.UNIMPLEMENTED: Code.UNIMPLEMENTED,
    grpc.StatusCode.INTERNAL: Code.INTERNAL_ERROR,
    grpc.StatusCode.DATA_LOSS: Code.INFERENCE_FAILED,
    grpc.StatusCode.UNAVAILABLE: Code.BACKEND_UNAVAILABLE,
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: Code.FORBIDDEN,
}

# Statuses that a proxy may have caused.
_OF_CONNECTIONS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

T = TypeVar("T")
FinalStatus: TypeAlias = tuple[grpc.StatusCode, str | None, Any]
"""Code, details and trailing metadata of a finished call."""

Metadata = tuple[tuple[str, str], ...]


# Text of grpcio when a write meets the end of the stream before the server's status is read.
_LOST_IN_CORE = "Internal error from Core"
# Text of grpcio when an HTTP/2 server without gRPC answers, such as the port of REST.
_NO_GRPC = "Received http2 header with status: 404"


def error_from_status(code: grpc.StatusCode, details: str | None, trailing: Any) -> TeimgrError:
    """Return the exception for a gRPC status; its message is the server's."""
    message = details or code.name
    fields = dict(trailing or ())
    if (name := fields.get(CODE_KEY, "")) in Code.__members__:
        wait = fields.get(PUSHBACK_KEY, "")
        return error_from_code(Code[name], message, retry_after_s=float(wait) / 1000 if wait.isdecimal() else None)
    if code is grpc.StatusCode.INTERNAL and message == _LOST_IN_CORE:
        return error_from_code(Code.BACKEND_UNAVAILABLE, "the stream was lost")
    if message.startswith(_NO_GRPC):
        message = f"the server at this address does not speak gRPC: is it the port of REST? ({message})"
        return error_from_code(Code.UNIMPLEMENTED, message)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and "message larger than max" in message:
        return error_from_code(Code.MESSAGE_TOO_LARGE, message)
    return error_from_code(_CODES.get(code, Code.INTERNAL_ERROR), message)


class GrpcChannel:
    """gRPC channel of an event loop. Its owner opens and closes it there."""

    def __init__(
        self,
        address: ServerAddress,
        tls: Tls,
        max_message_bytes: int,
        api_key: str | None = None,
        expect_fingerprint: str | None = None,
    ) -> None:
        if address.prefix:
            raise InvalidConfig(f"gRPC has no path: {address.url!r}; give host and port of the gRPC server")
        self._address = address
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._metadata: Metadata = () if api_key is None else (("authorization", f"Bearer {api_key}"),)
        if expect_fingerprint is not None:
            self._metadata += ((EXPECT_KEY, expect_fingerprint),)
        self._proxy: Proxy | None = None
        self._channel: Any = None
        self._unary: dict[str, Any] = {}
        # grpcio may exceed the server's limit of streams before it knows it, and the server refuses those calls.
        self._turns = asyncio.Semaphore(MAX_CALLS)

    async def open(self) -> None:
        """Create the channel; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", self._max_message_bytes),
            ("grpc.max_send_message_length", self._max_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
        ]
        self._proxy = self._address.grpc_proxy()
        if self._proxy is not None:
            options[-1:] = [("grpc.http_proxy", self._proxy.url)]
        if self._address.path:
            options.append(("grpc.default_authority", self._address.host))  # the default would be the path
        if not self._address.secure:
            self._channel = grpc.aio.insecure_channel(self._address.grpc_target, options=options)
            return
        if self._tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        credentials = self._tls.grpc_credentials()
        self._channel = grpc.aio.secure_channel(self._address.grpc_target, credentials, options=options)

    async def close(self) -> None:
        self._unary.clear()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def connect(self, timeout_s: float) -> None:
        """Connect now instead of at the first call.

        Raises:
            Unreachable: the connection was refused, or TLS failed; the message has the reason.
        """
        channel = self._opened()
        try:
            async with asyncio.timeout(timeout_s):
                while (state := channel.get_state(try_to_connect=True)) in _CONNECTING:
                    await channel.wait_for_state_change(state)
        except TimeoutError as error:
            raise self._unreachable(f"no connection within {timeout_s:g} s") from error
        if state is grpc.ChannelConnectivity.READY:
            return
        # Only a call returns the reason of a failed connection. On a broken channel it fails at once and is not sent.
        try:
            await self.unary("Info", b"", timeout_s)
        except Unavailable as error:
            found = _LAST_ERROR.search(error.message)
            reason = found[1] if found else error.message
            if reason == "Socket closed":
                reason += _CERTIFICATE_HINT if self._address.secure else _TLS_HINT
            raise self._unreachable(reason) from error

    def _unreachable(self, reason: str) -> Unreachable:
        return Unreachable(self._address.url, f"through the proxy {self._proxy}: {reason}" if self._proxy else reason)

    def _failure(self, code: grpc.StatusCode, details: str | None, trailing: Any) -> TeimgrError:
        """Return the exception for a status; names the proxy if the call may have failed because of it."""
        if self._proxy is not None and code in _OF_CONNECTIONS:
            details = f"{details or code.name} (through the proxy {self._proxy})"
        return error_from_status(code, details, trailing)

    async def unary(self, method: str, request: bytes, timeout_s: float, metadata: Metadata = ()) -> bytes:
        """Send one request and return the reply; `method` is a method of the multiplexer service, or a full path.

        At most `MAX_CALLS` calls are in flight; others wait for their turn within `timeout_s`.

        Raises:
            TeimgrError: the error of the reply's status; DeadlineExceeded after `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                await self._turns.acquire()
        except TimeoutError as error:
            raise self._failure(*_no_reply("before its turn", timeout_s)) from error
        try:
            return await self._sent(method, request, max(0.0, deadline - time.monotonic()), metadata)
        finally:
            self._turns.release()

    async def _sent(self, method: str, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        call = self._unary.get(method)
        if call is None:
            call = self._unary[method] = self._opened().unary_unary(_path(method))
        try:
            reply: bytes = await call(request, timeout=timeout_s, metadata=self._metadata + metadata)
        except grpc.aio.AioRpcError as error:
            raise self._failure(error.code(), error.details(), error.trailing_metadata()) from error
        except asyncio.CancelledError:
            _raise_if_closed()
            raise
        return reply

    async def stream(
        self, method: str, requests: AsyncIterator[bytes], *, window: int, idle_s: float, metadata: Metadata = ()
    ) -> AsyncIterator[bytes]:
        """Yield one reply per request, in order, with at most `window` requests sent and not answered.

        The call begins with the first request: without any, nothing is sent and nothing comes back. If `requests`
        itself fails, requests sent before are still answered and then that failure is raised.

        Raises:
            Cancelled: the client was closed.
            TeimgrError: the error of the final status; DeadlineExceeded when a reply is owed for over `idle_s`.
        """
        channel = self._opened()
        first = await anext(requests, None)
        if first is None:
            return
        if self._channel is not channel:
            raise Cancelled("the client was closed during the call")
        call = channel.stream_stream(_path(method))(metadata=self._metadata + metadata)
        bidi = BidiStream(call, first, requests, window, self._failure)
        try:
            while (reply := await bidi.reply(idle_s)) is not None:
                yield reply
        finally:
            await bidi.end()

    async def collect(
        self, method: str, requests: AsyncIterator[bytes], *, idle_s: float, metadata: Metadata = ()
    ) -> bytes:
        """Return the one reply to a stream of requests, sent no faster than the server takes them.

        The call begins with the first request. If `requests` itself fails, the call is cancelled.

        Raises:
            Cancelled: the client was closed.
            TeimgrError: the error of the final status; DeadlineExceeded without progress for `idle_s`.
        """
        call = self._opened().stream_unary(_path(method))(metadata=self._metadata + metadata)
        status = CallStatus(call)
        try:
            async for request in requests:
                async with asyncio.timeout(idle_s):
                    await call.write(request)
            async with asyncio.timeout(idle_s):
                await call.done_writing()
                reply: bytes = await call
        except TimeoutError as error:
            raise self._failure(*_no_reply("to the stream", idle_s)) from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if not call.done():
                raise
            raise self._failure(*await status.final()) from None
        except asyncio.CancelledError:
            _raise_if_closed()
            raise
        finally:
            call.cancel()
        return reply

    def _opened(self) -> Any:
        if self._channel is None:
            raise Internal("the client is not open: use it in a `with` block")
        return self._channel


def _path(method: str) -> str:
    return method if method.startswith("/") else SERVICE + method


def _no_reply(where: str, idle_s: float) -> FinalStatus:
    return grpc.StatusCode.DEADLINE_EXCEEDED, f"no reply {where} for {idle_s:g} s", None


def _raise_if_closed() -> None:
    """Raise Cancelled if a call was cancelled because its channel was closed, and not with its task."""
    task = asyncio.current_task()
    if task is None or not task.cancelling():
        raise Cancelled("the client was closed during the call") from None


# Text that grpc.aio sets instead of the server's status after a late write (grpc issue 36066).
_CORE_ERROR = "Internal error from Core"
_TRUE_STATUS_LIMIT_S = 1.0
_STATUS_POLL_S = 0.002


class CallStatus:
    """The final status of one streaming call, despite grpc issue 36066.

    The core's own status may come after the server's, so the server's is recorded at once. It may also come before, and
    is then replaced a moment later without notice.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._status: FinalStatus | None = None
        call.add_done_callback(self._note)

    async def final(self) -> FinalStatus:
        if self._status is None:
            self._status = (await self._call.code(), await self._call.details(), None)
        end = time.monotonic() + _TRUE_STATUS_LIMIT_S
        while self._status[1] == _CORE_ERROR and time.monotonic() < end:
            await asyncio.sleep(_STATUS_POLL_S)
            self._note(self._call)
        return self._status

    def _note(self, call: Any) -> None:
        self._status = (_at_once(call.code()), _at_once(call.details()), _at_once(call.trailing_metadata()))


def _at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as finished:
        result: T = finished.value
        return result
    raise RuntimeError("the call is not over")


_EOF: Any = grpc.aio.EOF
_SENDER_LIMIT_S = 1.0


class BidiStream:
    """Both directions of one bidirectional call: sends while fewer than `window` requests wait for a reply.

    Owns the sending task until `end`.
    """

    def __init__(
        self,
        call: Any,
        first: bytes,
        requests: AsyncIterator[bytes],
        window: int,
        failure: Callable[[grpc.StatusCode, str | None, Any], TeimgrError],
    ) -> None:
        self._call = call
        self._failure = failure
        self._requests = requests
        self._window = asyncio.Semaphore(window)
        self._status = CallStatus(call)
        self._owed = 0
        self._waiting_since = 0.0
        self._reading: asyncio.Future[Any] | None = None
        self._sending = asyncio.create_task(self._send(first))

    async def reply(self, idle_s: float) -> bytes | None:
        """Return the next reply, None after the last.

        Raises:
            DeadlineExceeded: a reply is owed and did not come for `idle_s`.
            TeimgrError: the error of the final status.
            Exception: the failure of `requests`, after everything sent before was answered.
        """
        self._reading = asyncio.ensure_future(self._call.read())
        while not (await asyncio.wait((self._reading,), timeout=idle_s - self._waited_s()))[0]:
            if self._waited_s() >= idle_s:
                raise self._failure(*_no_reply("on the stream", idle_s))
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
        self._window.release()
        return bytes(received)

    async def end(self) -> None:
        """Cancel unfinished work; returns when both directions have ended."""
        self._sending.cancel()
        self._call.cancel()
        running = [self._sending] if self._reading is None else [self._sending, self._reading]
        await asyncio.gather(*running, return_exceptions=True)

    def _waited_s(self) -> float:
        """Return the seconds without a reply while one is owed."""
        return time.monotonic() - self._waiting_since if self._owed else 0.0

    async def _finish(self) -> None:
        """Raise the error of the final status, otherwise the sender's own failure."""
        status = await self._status.final()
        if status[0] is not grpc.StatusCode.OK:
            raise self._failure(*status)
        sent, _ = await asyncio.wait((self._sending,), timeout=_SENDER_LIMIT_S)
        if not sent:
            raise Internal("the server ended the stream while requests were still to come")
        await self._sending
        if self._owed:
            raise Internal(f"the server ended the stream without answering {self._owed} requests")

    async def _send(self, first: bytes) -> None:
        request: bytes | None = first
        await self._window.acquire()
        try:
            while request is not None:
                if not self._owed:
                    self._waiting_since = time.monotonic()
                self._owed += 1
                try:
                    await self._call.write(request)
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    return  # the call is over; `reply` raises the reason
                await self._window.acquire()
                request = await anext(self._requests, None)
        finally:
            if not self._call.done():
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._call.done_writing()
