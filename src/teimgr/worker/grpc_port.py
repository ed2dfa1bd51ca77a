"""gRPC on the instance port: dispatch of each RPC by its shape, statuses, API key, health and reflection.

Imported only after the fork, which keeps the fork server small. Workers do not load grpcio, which starts threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from teimgr.errors import DeadlineExceeded, InvalidInput, TeimgrError, Unavailable
from teimgr.http.byte_budget import ByteBudget, Charge, UnreadReplies
from teimgr.http.connection_gate import Ticket
from teimgr.http.http1 import ServerConnections
from teimgr.http.http2.connection import Connection
from teimgr.http.http2.requests import HttpStreams
from teimgr.http.http2.stream import Stream, StreamLost
from teimgr.http.turns import TURNS_OF
from teimgr.observability.request_context import CURRENT, REQUEST_ID, RequestContext
from teimgr.spec import LANE_KEY, Kind
from teimgr.wire.frames import in_lane
from teimgr.wire.grpc_core import health_reflection
from teimgr.wire.grpc_core.health_reflection import NOT_SERVING, SERVING, HealthService, Reflection, StandardCalls
from teimgr.wire.grpc_core.rpc import (
    BUDGET_WAIT_S,
    MESSAGE_S,
    RPCS,
    TEI_PACKAGE,
    Rpc,
    RpcStatusError,
    RpcStream,
    Shape,
    is_rpc,
)
from teimgr.wire.grpc_core.streams import STREAM_PAUSE_S, PairCollector, StreamPump
from teimgr.wire.pb.tei.v1 import tei_pb2
from teimgr.wire.protobuf import Octets
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import NOT_FOUND, UNAUTHENTICATED, UNIMPLEMENTED, GrpcStatus
from teimgr.worker.calls import AwaitedReply, MethodCall
from teimgr.worker.dispatcher import Dispatcher, masked
from teimgr.worker.methods import handle

_BY_PATH = {rpc.path: rpc for rpc in RPCS if rpc.service.startswith(f"{TEI_PACKAGE}.")}
# One connection may hold this part of the port's budgets for received messages and unread replies.
_CONNECTION_SHARE = 4
# Messages of one stream in flight, as TEI's default of GRPC_MAX_PARALLEL_STREAM_REQUESTS.
_WINDOW = 1024
# Limit on the wait for the next message of a collected stream, whose earlier messages are held in memory.
_PAUSE_S = 30.0
# Watches poll the engine's health flag: its only `on_fault` callback belongs to the worker process.
_HEALTH_POLL_S = 1.0
_ALWAYS_SERVING = ("", "tei.v1.Info", "tei.v1.Tokenize")
_KINDS_OF_SERVICE = {
    "tei.v1.Embed": (Kind.EMBEDDING, Kind.SPARSE, Kind.MULTI_VECTOR),
    "tei.v1.Predict": (Kind.CLASSIFIER, Kind.RERANKER),
    "tei.v1.Rerank": (Kind.RERANKER,),
}


class GrpcCall(AwaitedReply, MethodCall):
    """A message of the instance port's gRPC."""

    __slots__ = ("_dispatcher", "answer")

    def __init__(
        self, dispatcher: Dispatcher, method: int, payload: Octets, flags: int, deadline: float | None
    ) -> None:
        super().__init__(method, payload, flags, deadline)
        self._dispatcher = dispatcher
        self.answer = asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Remove the call from the worker; no effect once it is answered."""
        self._dispatcher.cancel(self)


class PortStream(RpcStream):
    """An RPC of tei.v1; `unread` counts the replies that the client of its connection has not read."""

    def __init__(
        self, rpc: Rpc, stream: Stream, max_message_bytes: int, budget: ByteBudget, unread: UnreadReplies
    ) -> None:
        super().__init__(stream, max_message_bytes, budget, keeps_messages=rpc.shape is Shape.CLIENT_STREAM)
        self.unread = unread


class PortHealth(HealthService):
    """Health by service: SERVING for what the model's kind serves, while the self-test passes."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(_HEALTH_POLL_S)
        self._dispatcher = dispatcher

    def status_of(self, service: str) -> int:
        """Return the ServingStatus; raises RpcStatusError for an unknown service."""
        if service not in _ALWAYS_SERVING and service not in _KINDS_OF_SERVICE:
            raise RpcStatusError(NOT_FOUND, "service not registered")
        if self.is_stopped:
            return NOT_SERVING
        if service in _ALWAYS_SERVING:
            return SERVING
        engine = self._dispatcher.engine
        serves = engine.info.kind in _KINDS_OF_SERVICE[service] and engine.stats().healthy
        return SERVING if serves else NOT_SERVING


class GrpcPort:
    """Server of `tei.v1`, health and reflection; other requests of a connection go to the HTTP application.

    Health and reflection are open; everything else requires the instance's API key, if it has one.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._health = PortHealth(dispatcher)
        self._reflection = Reflection((tei_pb2.DESCRIPTOR,))
        self._calls = StandardCalls()
        self._unread = ByteBudget(dispatcher.port_budget.limit_bytes)  # unread replies of all connections
        self._standard: dict[str, Callable[[RpcStream], Awaitable[None]]] = {
            f"/{health_reflection.HEALTH_SERVICE}/Check": self._check_health,
            f"/{health_reflection.HEALTH_SERVICE}/Watch": self._watch_health,
        }
        for name in health_reflection.REFLECTION_SERVICES:
            self._standard[f"/{name}/{health_reflection.REFLECTION_METHOD}"] = self._reflect

    def protocol(self, state: ServerConnections, ticket: Ticket) -> Connection:
        """Make the protocol of an HTTP/2 connection: it serves RPCs here, and HTTP requests by the server's
        application."""
        port_budget, http = self._dispatcher.port_budget, HttpStreams(state)
        budget = ByteBudget(port_budget.limit_bytes // _CONNECTION_SHARE, port_budget)
        unread = UnreadReplies(self._unread, _CONNECTION_SHARE)

        def serve(stream: Stream) -> Coroutine[Any, Any, None]:
            path = stream.head.target.decode("ascii")
            inference = _BY_PATH.get(path)
            if inference is None and path not in self._standard and not is_rpc(dict(stream.headers)):
                return http.serve(stream)
            stream.connection.keep_open()  # gRPC channels stay open while idle
            limit = self._dispatcher.spec.max_message_bytes
            rpc: RpcStream
            if inference is None:
                rpc = self._calls.call(stream, limit)
            else:
                rpc = PortStream(inference, stream, limit, budget, unread)
            stream.call_when(stopping=partial(rpc.stop, Unavailable("the instance is stopping")))
            return self._serve(rpc)

        return Connection(serve, state, ticket)

    def stop(self) -> None:
        """Report NOT_SERVING and end the watches of health."""
        self._health.stop()

    async def _serve(self, stream: RpcStream) -> None:
        """Answer one RPC; the only place that turns failures into statuses."""
        context = RequestContext.from_headers(stream.metadata)
        CURRENT.set(context)  # this task serves nothing else
        TURNS_OF.set(stream.stream.connection.caller)
        if stream.http_refusal:
            await stream.refuse(stream.http_refusal)
            return
        try:
            timeout_s = stream.timeout_s()
            async with asyncio.timeout(timeout_s) as limit:
                await self._answer(stream, None if timeout_s is None else time.monotonic() + timeout_s)
            status = GrpcStatus()
        except TeimgrError as error:
            status = GrpcStatus.of(error)
        except RpcStatusError as error:
            status = error.status
        except StreamLost:
            raise  # the client left
        except TimeoutError as error:
            status = GrpcStatus.of(DeadlineExceeded() if limit.expired() else masked(error))
        except Exception as error:
            status = GrpcStatus.of(masked(error))
        finally:
            stream.charge.release()
        await stream.finish(status, {REQUEST_ID: context.request_id})

    async def _answer(self, stream: RpcStream, deadline: float | None) -> None:
        rpc = _BY_PATH.get(stream.path)
        if rpc is None:
            standard = self._standard.get(stream.path)
            if standard is None:
                raise RpcStatusError(UNIMPLEMENTED, "Method not found")
            async with self._calls.bounded(stream):
                await standard(stream)
            return
        if not self._dispatcher.spec.accepts(stream.metadata.get("authorization", "").encode()):
            raise RpcStatusError(UNAUTHENTICATED, "No valid auth token")
        assert isinstance(stream, PortStream)
        if not stream.unread.has_room:
            await stream.unread.room(BUDGET_WAIT_S)
        lane = stream.metadata.get(LANE_KEY)
        self._dispatcher.check_space(stream.metadata.get(EXPECT_KEY))
        if rpc.shape is Shape.UNARY:
            message = await stream.receive(MESSAGE_S)
            if message is None:
                raise InvalidInput("Missing message")
            await self._single(rpc, message, in_lane(rpc.lane, lane), deadline, stream)
        elif rpc.shape is Shape.CLIENT_STREAM:
            pairs = PairCollector(self._dispatcher.spec.max_message_bytes)
            await pairs.collect(stream.receive, _PAUSE_S)
            await self._single(rpc, pairs.payload(), in_lane(pairs.flags, lane), deadline, stream)
        else:

            async def start(message: Octets, flags: int) -> GrpcCall:
                return self._start(rpc, message, in_lane(flags, lane), deadline, stream)

            await stream.open(None, self._dispatcher.space_marks)
            receive = partial(stream.receive, STREAM_PAUSE_S)
            await StreamPump(rpc, _WINDOW, stream.unread, receive=receive, start=start, send=stream.send).run()

    async def _single(self, rpc: Rpc, payload: Octets, flags: int, deadline: float | None, stream: PortStream) -> None:
        """Send the only reply, after initial metadata with its compute cost."""
        call, held = self._start(rpc, payload, flags, deadline, stream), Charge(stream.unread)
        try:
            reply = await call.answer
            held.add(len(reply.payload))
            costs = reply.timings.headers() if rpc.reports_compute and reply.timings is not None else None
            await stream.open(costs, self._dispatcher.space_marks)
            await stream.send(reply.payload)
        finally:
            call.cancel()
            held.release()
            del call  # breaks the cycle of call, error and this frame, which would keep the payload

    def _start(self, rpc: Rpc, payload: Octets, flags: int, deadline: float | None, stream: PortStream) -> GrpcCall:
        call = GrpcCall(self._dispatcher, rpc.worker_method(), payload, flags, deadline)
        handle(self._dispatcher, call)
        stream.charge.release()  # from now on the dispatcher counts the payload
        return call

    async def _check_health(self, stream: RpcStream) -> None:
        request = await _health_request(stream)
        status: Any = self._health.status_of(request.service)
        await stream.send(HealthCheckResponse(status=status).SerializeToString())

    async def _watch_health(self, stream: RpcStream) -> None:
        async def send(response: Message) -> None:
            await stream.send(response.SerializeToString())

        request = await _health_request(stream)
        await self._health.watch(request.service, send)

    async def _reflect(self, stream: RpcStream) -> None:
        await self._calls.reflect(stream, self._reflection)


async def _health_request(stream: RpcStream) -> Any:
    raw = await stream.receive(health_reflection.MESSAGE_S)
    return HealthCheckRequest() if raw is None else stream.parse(HealthCheckRequest, raw)
