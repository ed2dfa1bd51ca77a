"""One gRPC connection to a multiplexer: serialized messages in and out, failures as `TeimgrError`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import grpc

from teimgr.client.bidi_stream import BidiStream, CallStatus
from teimgr.client.endpoints import Endpoint, Tls
from teimgr.client.failures import from_grpc, from_status
from teimgr.errors import Cancelled, DeadlineExceeded, Internal, Unavailable

SERVICE = "/tei_multiplexer.v1.TeiMultiplexer/"
_CONNECTING = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
# grpc's "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9001: reason"
_LAST_ERROR = re.compile(r"last error: [A-Z_]+: (?:\w+:\S+: )?(.+)")
_CERTIFICATE_HINT = " (the server may want a client certificate, or speak no TLS)"
_TLS_HINT = " (the server may speak TLS: https://)"


class Calls:
    """Opened and closed by its owner, inside a running event loop."""

    def __init__(self, endpoint: Endpoint, tls: Tls, max_message_bytes: int, api_key: str | None = None) -> None:
        self._endpoint = endpoint
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._metadata = None if api_key is None else (("authorization", f"Bearer {api_key}"),)
        self._channel: Any = None
        self._unary: dict[str, Any] = {}

    async def open(self) -> None:
        """Prepare; nothing is sent yet.

        Raises:
            InvalidConfig: a certificate file cannot be used.
        """
        options: list[tuple[str, Any]] = [
            ("grpc.max_receive_message_length", self._max_message_bytes),
            ("grpc.max_send_message_length", self._max_message_bytes),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if not self._endpoint.secure:
            self._channel = grpc.aio.insecure_channel(self._endpoint.authority, options=options)
            return
        if self._tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        credentials = self._tls.grpc_credentials()
        self._channel = grpc.aio.secure_channel(self._endpoint.authority, credentials, options=options)

    async def close(self) -> None:
        """Cancel what is under way and close the connection."""
        self._unary.clear()
        if self._channel is not None:
            await self._channel.close()
            self._channel = None

    async def connect(self, timeout_s: float) -> None:
        """Return once the connection stands, instead of finding out with the first call.

        Raises:
            Unavailable: the address refuses, or TLS fails; the message says which.
        """
        channel = self._opened()
        try:
            async with asyncio.timeout(timeout_s):
                while (state := channel.get_state(try_to_connect=True)) in _CONNECTING:
                    await channel.wait_for_state_change(state)
        except TimeoutError as error:
            raise Unavailable(f"{self._endpoint.url}: no connection within {timeout_s:g} s") from error
        if state is not grpc.ChannelConnectivity.READY:
            await self._explain(timeout_s)

    async def unary(self, method: str, request: bytes, timeout_s: float) -> bytes:
        """The reply to one request; `method` is one of the multiplexer's, or a whole path.

        Raises:
            TeimgrError: what the status meant; DeadlineExceeded after `timeout_s`.
        """
        call = self._unary.get(method)
        if call is None:
            call = self._unary[method] = self._opened().unary_unary(_path(method))
        try:
            reply: bytes = await call(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise from_grpc(error) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the client was closed during the call") from None
        return reply

    async def stream(
        self,
        method: str,
        requests: AsyncIterator[bytes],
        *,
        window: int,
        idle_s: float,
    ) -> AsyncIterator[bytes]:
        """One reply per request, in order, with at most `window` requests sent and not answered.

        The call begins with the first request: without any, nothing is sent and nothing comes back. When `requests`
        itself fails, what was sent is still answered and then that failure is raised.

        Raises:
            Cancelled: the client was closed.
            TeimgrError: what the status meant; DeadlineExceeded when a reply is owed for over `idle_s`.
        """
        channel = self._opened()
        first = await anext(requests, None)
        if first is None:
            return
        if self._channel is not channel:
            raise Cancelled("the client was closed during the call")
        conversation = BidiStream(
            channel.stream_stream(_path(method))(metadata=self._metadata), first, requests, window
        )
        try:
            while (reply := await conversation.reply(idle_s)) is not None:
                yield reply
        finally:
            await conversation.end()

    async def collect(self, method: str, requests: AsyncIterator[bytes], *, idle_s: float) -> bytes:
        """The one reply to a stream of requests, sent no faster than the server takes them.

        The call begins with the first request. When `requests` itself fails the call is given up.

        Raises:
            Cancelled: the client was closed.
            TeimgrError: what the status meant; DeadlineExceeded when the server takes or says nothing for `idle_s`.
        """
        call = self._opened().stream_unary(_path(method))(metadata=self._metadata)
        ending = CallStatus(call)
        try:
            async for request in requests:
                async with asyncio.timeout(idle_s):
                    await call.write(request)
            async with asyncio.timeout(idle_s):
                await call.done_writing()
                reply: bytes = await call
        except TimeoutError as error:
            raise DeadlineExceeded(f"no reply to the stream for {idle_s:g} s") from error
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            if not call.done():
                raise
            raise from_status(*await ending.status()) from None
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Cancelled("the client was closed during the call") from None
        finally:
            call.cancel()
        return reply

    async def _explain(self, timeout_s: float) -> None:
        """Only a call is told why a connection failed; on a broken channel it fails at once and is never sent."""
        try:
            await self.unary("Info", b"", timeout_s)
        except Unavailable as error:
            found = _LAST_ERROR.search(error.message)
            reason = found[1] if found else error.message
            if reason == "Socket closed":
                reason += _CERTIFICATE_HINT if self._endpoint.secure else _TLS_HINT
            raise Unavailable(f"{self._endpoint.url}: {reason}") from error

    def _opened(self) -> Any:
        if self._channel is None:
            raise Internal("the client is not open: use it in a `with` block")
        return self._channel


def _path(method: str) -> str:
    return method if method.startswith("/") else SERVICE + method
