"""gRPC handlers of the mux: authentication, counters, spans and statuses around forwarding; health, reflection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any
from weakref import WeakValueDictionary

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from teimgr.auth.policy import PolicyInForce, Right, authenticate_call
from teimgr.byte_budget import ByteBudget, Charge
from teimgr.errors import DeadlineExceeded, InvalidInput, Overloaded, TeimgrError
from teimgr.grpc_core import health_reflection
from teimgr.grpc_core.health_reflection import NOT_SERVING, SERVING, HealthService, Reflection
from teimgr.grpc_core.rpc_table import FILES, RPCS, Rpc, Shape
from teimgr.grpc_core.streams import STREAM_PAUSE_S
from teimgr.mux.forwarding import (
    INSTANCE_KEY,
    CallCounters,
    CallRecord,
    StreamForwarder,
    forward_collected,
    forward_message,
    named_target,
)
from teimgr.observability.request_context import (
    CURRENT,
    REQUEST_ID,
    TRACEPARENT,
    TRACESTATE,
    RequestContext,
    Telemetry,
)
from teimgr.routing.links import WorkerReply
from teimgr.routing.router import Router, RouterView, router_view
from teimgr.spec import RouteEntry, State
from teimgr.wire.frames import Method
from teimgr.wire.protobuf import Target
from teimgr.wire.quantisation import OUTPUT_DTYPE_KEY, output_dtype_field
from teimgr.wire.status import GrpcStatus

_log = logging.getLogger(__name__)

# Every RPC of the table is inference.
_RIGHTS = frozenset({Right.INFERENCE})
# Calls whose message has not come yet, and the time that a client has to send it.
_OPEN_CALLS = 4096
_MESSAGE_S = 120.0
# Those of health and reflection, most of which need no key.
_OPEN_STANDARD_CALLS = 64
_STANDARD_MESSAGE_S = 20.0
# Bytes of client streams that are collected into one request, and the part of them that one connection may hold.
_COLLECTED_BYTES = 512 * 2**20
_CONNECTION_SHARE = 4
_CONTEXT_KEYS = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})
STATUS_CODES = {status.value[0]: status for status in grpc.StatusCode}

# grpcio carries no types of its own.
Context = Any
Body = Callable[[Rpc, RouterView, Context, CallRecord], Coroutine[Any, Any, bytes | None]]


class MessageReader:
    """Reads messages of calls whose handlers stream requests, at most `limit` at a time, each within `limit_s`.

    Their bytes are unknown: gRPC's core receives a message by itself and hands it over when it is whole. One timer
    serves all reads, since a timer for each costs some percent of a call.
    """

    def __init__(self, limit: int | None, limit_s: float) -> None:
        self._limit = limit
        self._limit_s = limit_s
        self._since: dict[asyncio.Task[Any], float] = {}  # in order
        self._expired: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def next(self, context: Context) -> Any:
        """The call's next message, None where the client has half-closed.

        Raises:
            Overloaded: too many calls wait for theirs.
            DeadlineExceeded: it did not come in time.
        """
        if self._limit is not None and len(self._since) >= self._limit:
            raise Overloaded("Too many calls have sent no message yet; try again later")
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._since[task] = loop.time()
        if self._timer is None:
            self._timer = loop.call_later(self._limit_s, self._cancel_old)
        try:
            message = await context.read()
        except asyncio.CancelledError:
            if task not in self._expired:
                raise
            self._expired.discard(task)
            task.uncancel()
            raise DeadlineExceeded(f"Request timeout: no whole message within {self._limit_s:g} s") from None
        finally:
            del self._since[task]
        return None if message is grpc.aio.EOF else message

    def _cancel_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for task, since in self._since.items():
            due = since + self._limit_s
            if due > loop.time():
                self._timer = loop.call_at(due, self._cancel_old)
                return
            self._expired.add(task)
            task.cancel()


class MuxHandlers:
    """Handlers of every RPC of the table.

    `request_timeout_s` limits single calls (0 = no limit); `window` bounds the messages of a stream in flight;
    `policy` authenticates and authorises every call before its first message is read.
    """

    def __init__(
        self,
        router: Router,
        counters: CallCounters,
        *,
        request_timeout_s: float,
        window: int,
        policy: PolicyInForce,
        telemetry: Telemetry | None = None,
    ) -> None:
        self._telemetry = telemetry or Telemetry()
        self._router = router
        self._policy = policy
        self._counters = counters
        self._request_timeout_s = request_timeout_s or None
        self._window = window
        self._messages = MessageReader(_OPEN_CALLS, _MESSAGE_S)
        self._stream_messages = MessageReader(None, STREAM_PAUSE_S)
        self._collected = ByteBudget(_COLLECTED_BYTES)
        self._collected_of: WeakValueDictionary[str, ByteBudget] = WeakValueDictionary()  # by connection

    def generic_handlers(self) -> tuple[Any, ...]:
        """For `grpc.aio.Server.add_generic_rpc_handlers`; without serializers, so that handlers get raw bytes."""
        of_service: defaultdict[str, dict[str, Any]] = defaultdict(dict)
        for rpc in RPCS:
            of_service[rpc.service][rpc.name] = self._handler(rpc)
        return tuple(grpc.method_handlers_generic_handler(*each) for each in of_service.items())

    def _handler(self, rpc: Rpc) -> Any:
        """A handler that streams requests, for single calls too.

        gRPC receives the message of a unary handler by itself, before it calls it: without a time limit, and before the
        caller is authenticated.
        """
        if rpc.shape is Shape.BIDI:
            return grpc.stream_stream_rpc_method_handler(self._guarded(rpc, self._bidi))
        body = self._unary if rpc.shape is Shape.UNARY else self._client_stream
        return grpc.stream_unary_rpc_method_handler(self._guarded(rpc, body))

    def _guarded(self, rpc: Rpc, body: Body) -> Callable[[Any, Context], Coroutine[Any, Any, bytes | None]]:
        """`body` with authentication, counters and a span; its failures become statuses here."""
        name = f"{rpc.service}/{rpc.name}"
        attributes = {"rpc.system": "grpc", "rpc.service": rpc.service, "rpc.method": rpc.name}

        async def handle(_: Any, context: Context) -> bytes | None:
            record = self._counters.begin(rpc.name)
            status, failure = grpc.StatusCode.CANCELLED, ""
            given = {key: value for key, value in context.invocation_metadata() or () if key in _CONTEXT_KEYS}
            request_context = self._telemetry.begin(name, given, attributes)
            CURRENT.set(request_context)  # for this call's task and those that it starts
            if given:  # trailers cost some percent of a call: other clients get them with failures only
                context.set_trailing_metadata(((REQUEST_ID, request_context.request_id),))
            try:
                caller = authenticate_call(self._policy.now, context)
                caller.require(_RIGHTS)
                answer = await body(rpc, router_view(caller, self._router), context, record)
                status = grpc.StatusCode.OK
                return answer
            except TeimgrError as error:
                failed = GrpcStatus.of(error)
                status, failure = STATUS_CODES[failed.number], error.message
                await _abort(context, failed, (REQUEST_ID, request_context.request_id))
            except Exception:
                status = grpc.StatusCode.INTERNAL
                _log.exception("call failed", extra={"method": rpc.name, "instance": record.instance})
                await context.abort(status, "Internal error", ((REQUEST_ID, request_context.request_id),))
            finally:
                self._counters.end(record, status.name)
                self._report(request_context, record, status, failure)
            return None

        return handle

    def _report(self, request_context: RequestContext, record: CallRecord, status: Any, failure: str) -> None:
        if self._telemetry.is_on:
            attributes = {"rpc.grpc.status_code": status.value[0], "tei.instance": record.instance}
            error = None if status is grpc.StatusCode.OK else failure or status.name
            request_context.end(attributes, error)
        if _log.isEnabledFor(logging.DEBUG):
            took_ms = round((time.perf_counter() - record.began_s) * 1000, 3)
            _log.debug(
                "call answered",
                extra={"method": record.method, "instance": record.instance, "status": status.name, "ms": took_ms},
            )

    async def _unary(self, rpc: Rpc, router: RouterView, context: Context, record: CallRecord) -> bytes:
        message = await self._messages.next(context)
        if message is None:
            raise InvalidInput("Missing message")
        record.restart()
        named = _named_target(rpc, router, context)
        timeout_s: float | None = context.time_remaining()
        if rpc.limited and self._request_timeout_s is not None:
            timeout_s = self._request_timeout_s if timeout_s is None else min(timeout_s, self._request_timeout_s)
        whole = message + _output_dtype(rpc, context)
        return await _reply(rpc, await forward_message(rpc, router, whole, named, timeout_s, record), context)

    async def _bidi(self, rpc: Rpc, router: RouterView, context: Context, record: CallRecord) -> None:
        named = _named_target(rpc, router, context)
        forwarder = StreamForwarder(rpc, router, named, _output_dtype(rpc, context), record)
        await forwarder.run(
            lambda: self._stream_messages.next(context),
            self._window,
            on_first=lambda: context.send_initial_metadata(()),
            send=context.write,
        )

    async def _client_stream(self, rpc: Rpc, router: RouterView, context: Context, record: CallRecord) -> bytes:
        charge = Charge(self._collected_by(context.peer()))
        try:
            reply = await forward_collected(
                rpc,
                router,
                lambda: _next_message(context),
                _named_target(rpc, router, context),
                message_timeout_s=self._request_timeout_s or _MESSAGE_S,
                timeout_s=context.time_remaining(),
                charge=charge,
                record=record,
            )
        finally:
            charge.release()
        return await _reply(rpc, reply, context)

    def _collected_by(self, peer: str) -> ByteBudget:
        """The budget of one connection's client streams."""
        budget = self._collected_of.get(peer)
        if budget is None:
            budget = self._collected_of[peer] = ByteBudget(_COLLECTED_BYTES // _CONNECTION_SHARE, self._collected)
        return budget


async def _abort(context: Context, failed: GrpcStatus, *trailers: tuple[str, str]) -> None:
    """End the call with a status, its metadata and `trailers`; raises what grpcio ends the handler by."""
    await context.abort(STATUS_CODES[failed.number], failed.message, (*failed.metadata, *trailers))


async def _next_message(context: Context) -> bytes | None:
    message = await context.read()
    return None if message is grpc.aio.EOF else message


def _named_target(rpc: Rpc, router: RouterView, context: Context) -> Target | None:
    """The target in the call's metadata; None where the messages have targets."""
    if rpc.has_target:
        return None
    return named_target(router, dict(context.invocation_metadata() or ()).get(INSTANCE_KEY))


def _output_dtype(rpc: Rpc, context: Context) -> bytes:
    """Field to append to every message so that the element type in the metadata applies; mostly empty."""
    if rpc.method is not Method.EMBED_ARROW:
        return b""
    word = dict(context.invocation_metadata() or ()).get(OUTPUT_DTYPE_KEY)
    return b"" if word is None else output_dtype_field(str(word))


async def _reply(rpc: Rpc, reply: WorkerReply, context: Context) -> bytes:
    if rpc.reports_compute and reply.timings is not None:
        await context.send_initial_metadata(tuple(reply.timings.headers().items()))
    return reply.payload


class MuxHealth(HealthService):
    """Health by instance name, updated from the directory: SERVING while the instance is running.

    Check and Watch need no key, as /health does: monitors send none, and already have the name they ask for. List shows
    all names, so it requires the right to read by `policy`. `services` and "" are SERVING until `stop`.
    """

    def __init__(self, policy: PolicyInForce, *services: str) -> None:
        super().__init__()
        self._policy = policy
        self._messages = MessageReader(_OPEN_STANDARD_CALLS, _STANDARD_MESSAGE_S)
        self._services = dict.fromkeys(("", *services), SERVING)
        self._statuses: dict[str, int] = dict(self._services)

    def apply(self, name: str, entry: RouteEntry | None) -> None:
        """Take the state of an instance, None for a deleted one; `notify` must follow."""
        if self.is_stopped or name in self._services:
            return
        if entry is None:
            self._statuses.pop(name, None)
        else:
            self._statuses[name] = SERVING if entry.state is State.RUNNING else NOT_SERVING

    def stop(self) -> None:
        """Set everything to NOT_SERVING and end the watches."""
        self._statuses = dict.fromkeys(self._statuses, NOT_SERVING)
        super().stop()

    def status_of(self, service: str) -> int | None:
        return self._statuses.get(service)

    def generic_handler(self) -> Any:
        read = health_pb2.HealthCheckRequest.FromString
        write = health_pb2.HealthCheckResponse.SerializeToString
        check = grpc.stream_unary_rpc_method_handler(self._check, read, write)
        watch = grpc.stream_stream_rpc_method_handler(self._watch, read, write)
        read_list = health_pb2.HealthListRequest.FromString
        write_list = health_pb2.HealthListResponse.SerializeToString
        names = grpc.stream_unary_rpc_method_handler(self._list, read_list, write_list)
        return grpc.method_handlers_generic_handler(
            health_reflection.HEALTH_SERVICE, {"Check": check, "List": names, "Watch": watch}
        )

    async def _check(self, _: Any, context: Context) -> Any:
        request = await _standard_message(self._messages, context)
        status = self.status_of(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unknown service '{request.service[:200]}'")
        return health_pb2.HealthCheckResponse(status=status)

    async def _list(self, _: Any, context: Context) -> Any:
        try:
            caller = authenticate_call(self._policy.now, context)
            caller.require(frozenset({Right.READ}))
        except TeimgrError as error:
            await _abort(context, GrpcStatus.of(error))
        shown = {name: each for name, each in self._statuses.items() if name in self._services or caller.covers(name)}
        return health_pb2.HealthListResponse(
            statuses={name: health_pb2.HealthCheckResponse(status=each) for name, each in shown.items()}
        )

    async def _watch(self, _: Any, context: Context) -> None:
        request = await _standard_message(self._messages, context)
        await self.watch(request.service, context.write)


async def _standard_message(messages: MessageReader, context: Context) -> Any:
    """The message of a health check, which needs no key."""
    try:
        if (message := await messages.next(context)) is None:
            raise InvalidInput("Missing message")
        return message
    except TeimgrError as error:
        await _abort(context, GrpcStatus.of(error))


def reflection_handlers() -> tuple[Any, ...]:
    """One generic handler per version, for `grpc.aio.Server.add_generic_rpc_handlers`."""
    reflection = Reflection((*FILES, health_reflection.HEALTH_FILE))

    messages = MessageReader(_OPEN_STANDARD_CALLS, _STANDARD_MESSAGE_S)

    async def answers(_: Any, context: Context) -> AsyncIterator[Any]:
        while True:
            try:
                request = await messages.next(context)
            except TeimgrError as error:
                await _abort(context, GrpcStatus.of(error))
            if request is None:
                return
            yield reflection.answer(request)

    handler = grpc.stream_stream_rpc_method_handler(
        answers,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    return tuple(
        grpc.method_handlers_generic_handler(service, {health_reflection.REFLECTION_METHOD: handler})
        for service in health_reflection.REFLECTION_SERVICES
    )
