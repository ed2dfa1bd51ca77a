"""gRPC around the mux's calls: one handler per shape of RPC, raw bytes in and out, one place for statuses."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import grpc
import grpc.aio

from teimgr.auth.callers import authenticate_call
from teimgr.auth.policy import PolicyInForce, Right
from teimgr.errors import TeimgrError
from teimgr.mux.calls import INSTANCE_KEY, Collection, answer_one, named_target
from teimgr.mux.counters import CallCounters, CallRecord
from teimgr.mux.services import grpc_status
from teimgr.mux.stream_relay import StreamRelay
from teimgr.observability import telemetry
from teimgr.observability.request_context import CURRENT, REQUEST_ID, TRACEPARENT, TRACESTATE, RequestContext
from teimgr.observability.telemetry import Telemetry
from teimgr.routing.links import WorkerReply
from teimgr.routing.router import Router, RouterView, router_view
from teimgr.wire.element_types import OUTPUT_DTYPE_KEY, output_dtype_field
from teimgr.wire.frames import Method
from teimgr.wire.protobuf import Target
from teimgr.wire.rpc import RPCS, SERVICES, Rpc, Shape

_log = logging.getLogger(__name__)

# Statuses travel in trailers, which clients bound at a few kilobytes.
_MESSAGE_CHARS = 2000

# Trailing metadata with the name of our code, for clients that tell more failures apart than gRPC does.
CODE_KEY = "x-teimgr-code"

# Every RPC of the table asks a model something.
_NEEDED = frozenset({Right.INFERENCE})

_ORIGINS = frozenset({REQUEST_ID, TRACEPARENT, TRACESTATE})

# grpcio carries no types of its own.
Context = Any
Body = Callable[[Rpc, RouterView, Any, Context, CallRecord], Coroutine[Any, Any, bytes | None]]


class MuxHandlers:
    """Every service of the table over a router.

    `request_timeout_s` limits single calls (0 = no limit); `window` is how many messages of a stream may be in flight;
    `policy` says who may call, which every call is judged by before its first message is looked at.
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

    def generic_handlers(self) -> tuple[Any, ...]:
        """For `grpc.aio.Server.add_generic_rpc_handlers`; no serializers, so bytes go through untouched."""
        return tuple(
            grpc.method_handlers_generic_handler(
                service, {rpc.name: self._handler(rpc) for rpc in RPCS if rpc.service == service}
            )
            for service in SERVICES
        )

    def _handler(self, rpc: Rpc) -> Any:
        if rpc.shape is Shape.UNARY:
            return grpc.unary_unary_rpc_method_handler(self._guarded(rpc, self._unary))
        if rpc.shape is Shape.BIDI:
            return grpc.stream_stream_rpc_method_handler(self._guarded(rpc, self._bidi))
        return grpc.stream_unary_rpc_method_handler(self._guarded(rpc, self._client_stream))

    def _guarded(self, rpc: Rpc, body: Body) -> Callable[[Any, Context], Coroutine[Any, Any, bytes | None]]:
        """`body`, counted and traced, its failure turned into a status: the only place that does."""
        name = f"{rpc.service}/{rpc.name}"
        about = {"rpc.system": "grpc", "rpc.service": rpc.service, "rpc.method": rpc.name}

        async def handle(request: Any, context: Context) -> bytes | None:
            note = self._counters.begin(rpc.name)
            status, failure = grpc.StatusCode.CANCELLED, ""
            said = _said(context)
            request_context = self._telemetry.begin(name, said, about)
            CURRENT.set(request_context)  # for this call's task, and those that it starts
            if said:  # trailers cost a call some percent: who does not ask for them gets them with failures alone
                context.set_trailing_metadata(((REQUEST_ID, request_context.request_id),))
            try:
                caller = authenticate_call(self._policy.now, context)
                caller.require(_NEEDED)
                answer = await body(rpc, router_view(caller, self._router), request, context, note)
                status = grpc.StatusCode.OK
                return answer
            except TeimgrError as error:
                status = grpc_status(error)
                failure = error.message
                told = ((CODE_KEY, error.code.name), (REQUEST_ID, request_context.request_id))
                await context.abort(status, error.message[:_MESSAGE_CHARS], told)
            except Exception:
                status = grpc.StatusCode.INTERNAL
                _log.exception("call failed", extra={"method": rpc.name, "instance": note.instance})
                await context.abort(status, "Internal error", ((REQUEST_ID, request_context.request_id),))
            finally:
                self._counters.end(note, status.name)
                self._ended(request_context, note, status, failure)
            return None

        return handle

    def _ended(self, request_context: RequestContext, note: CallRecord, status: Any, failure: str) -> None:
        """The call's span and its line of the log, where there are such."""
        if self._telemetry.is_on:
            facts = {"rpc.grpc.status_code": status.value[0], "tei.instance": note.instance}
            telemetry.end(request_context, facts, None if status is grpc.StatusCode.OK else failure or status.name)
        if _log.isEnabledFor(logging.DEBUG):
            took_ms = round((time.perf_counter() - note.began_s) * 1000, 3)
            _log.debug(
                "call answered",
                extra={"method": note.method, "instance": note.instance, "status": status.name, "ms": took_ms},
            )

    async def _unary(self, rpc: Rpc, router: RouterView, message: bytes, context: Context, note: CallRecord) -> bytes:
        named = self._named(rpc, router, context)
        whole = message + _output_dtype(rpc, context)
        reply = await answer_one(rpc, router, whole, named, self._timeout_s(rpc, context), note)
        return await _told(rpc, reply, context)

    async def _bidi(self, rpc: Rpc, router: RouterView, messages: Any, context: Context, note: CallRecord) -> None:
        relay = StreamRelay(rpc, router, self._named(rpc, router, context), self._window, note)
        reader = asyncio.create_task(_read(relay, aiter(messages), _output_dtype(rpc, context)))
        try:
            await _write(relay, context)
        finally:
            reader.cancel()
            await asyncio.wait((reader,))
            relay.close()

    async def _client_stream(
        self, rpc: Rpc, router: RouterView, messages: Any, context: Context, note: CallRecord
    ) -> bytes:
        collection = Collection(rpc, router, self._named(rpc, router, context), self._request_timeout_s, note)
        return await _told(rpc, await collection.answer(aiter(messages), context.time_remaining()), context)

    def _named(self, rpc: Rpc, router: RouterView, context: Context) -> Target | None:
        """Whom the metadata says the call is for; not read where the messages say it."""
        if rpc.has_target:
            return None
        metadata = dict(context.invocation_metadata() or ())
        return named_target(rpc, router, metadata.get(INSTANCE_KEY))

    def _timeout_s(self, rpc: Rpc, context: Context) -> float | None:
        remaining: float | None = context.time_remaining()
        if not rpc.limited or self._request_timeout_s is None:
            return remaining
        return self._request_timeout_s if remaining is None else min(remaining, self._request_timeout_s)


def _said(context: Context) -> dict[str, str]:
    """What the metadata say of where the call comes from."""
    return {key: value for key, value in context.invocation_metadata() or () if key in _ORIGINS}


def _output_dtype(rpc: Rpc, context: Context) -> bytes:
    """What stands behind every message of the call, so that the metadata's element type counts; mostly nothing."""
    if rpc.method is not Method.EMBED_ARROW:
        return b""
    word = dict(context.invocation_metadata() or ()).get(OUTPUT_DTYPE_KEY)
    return b"" if word is None else output_dtype_field(str(word))


async def _told(rpc: Rpc, reply: WorkerReply, context: Context) -> bytes:
    """The answer's bytes, once the initial metadata has said what they cost."""
    if rpc.tells_compute and reply.timings is not None:
        await context.send_initial_metadata(tuple(reply.timings.headers().items()))
    return reply.payload


async def _read(relay: StreamRelay, messages: AsyncIterator[bytes], behind: bytes) -> None:
    """Run ahead of the writer as far as the window allows; `behind` is put behind each message."""
    try:
        while True:
            await relay.room()
            message = await anext(messages, None)
            if message is None:
                break
            await relay.feed(message + behind)
    except Exception as error:  # not swallowed: it ends the stream in its place
        relay.fail(error)
    else:
        relay.end()


async def _write(relay: StreamRelay, context: Context) -> None:
    """Answer in order; the response headers go out as soon as the first target is found."""
    await relay.opened.wait()
    if relay.has_target:
        await context.send_initial_metadata(())
    while (answer := await relay.next()) is not None:
        await context.write(answer)
