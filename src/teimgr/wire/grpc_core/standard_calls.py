"""Bounds on the calls of health and reflection, which need no key, on the mux port and on the ports of instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest

from teimgr.errors import Overloaded
from teimgr.http.byte_budget import ByteBudget, Places
from teimgr.http.http2.connection import MAX_TASKS
from teimgr.http.http2.stream import Stream
from teimgr.wire.grpc_core.health_reflection import Reflection
from teimgr.wire.grpc_core.rpc_stream import RpcStream

# Half of the streams that a server may have; watches do not end. An open call holds below 20 KiB: a message, and a
# reply that is not read, of which the descriptors of a service are the longest.
MAX_OPEN = MAX_TASKS // 2
# A request is the name of a service, a symbol or a file.
MAX_MESSAGE_BYTES = 4096
# For the first message and the next.
MESSAGE_S = 20.0


class StandardCalls:
    """The calls of health and reflection of one server: of at most `MAX_OPEN` that wait for something (`Places`).

    A call whose message has come with its head, and whose reply the client lets through, waits for nothing and is
    answered in any case. The budget is that of all others' messages together, so none waits for it.
    """

    def __init__(self) -> None:
        self._budget = ByteBudget(MAX_OPEN * MAX_MESSAGE_BYTES)
        self._places = Places(MAX_OPEN)

    def call(self, stream: Stream, max_reply_bytes: int) -> RpcStream:
        """The call on `stream`."""
        return RpcStream(stream, MAX_MESSAGE_BYTES, self._budget, max_reply_bytes)

    async def reflect(self, call: RpcStream, reflection: Reflection) -> None:
        """Answer the requests of a reflection stream, one in each turn of the event loop."""
        while (raw := await call.receive(MESSAGE_S)) is not None:
            request = call.parse(ServerReflectionRequest, raw)
            await call.send(reflection.answer(request).SerializeToString())
            await asyncio.sleep(0)

    @asynccontextmanager
    async def bounded(self, call: RpcStream) -> AsyncIterator[None]:
        """For the body of `call`: it is counted if it has not ended by the next turn of the event loop.

        Raises:
            Overloaded: too many others are open, or of its caller.
        """
        loop, caller, is_counted = asyncio.get_running_loop(), call.stream.connection.caller, False

        def count() -> None:
            nonlocal is_counted
            is_counted = self._places.take(caller)
            if not is_counted:
                limit.reschedule(loop.time())

        counting = loop.call_soon(count)
        try:
            async with asyncio.timeout(None) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            raise Overloaded("Too many calls of health and reflection are open; try again later") from None
        finally:
            counting.cancel()
            if is_counted:
                self._places.leave(caller)
