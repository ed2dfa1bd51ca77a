"""gRPC of the mux: authentication, counters, spans and statuses around forwarding; health, reflection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from teimgr.errors import DeadlineExceeded, Forbidden, InvalidInput, Overloaded, TeimgrError
from teimgr.http.auth.policy import (
    ANONYMOUS,
    Caller,
    CertificateNames,
    Policy,
    PolicyInForce,
    Right,
    authenticate_call,
    certificate_from_tls,
)
from teimgr.http.byte_budget import ByteBudget, Places, UnreadReplies
from teimgr.http.connection_gate import Ticket
from teimgr.http.http1 import ListenerState
from teimgr.http.http2.connection import Connection, MaxAge
from teimgr.http.http2.stream import Stream, StreamLost
from teimgr.http.turns import TURNS_OF
from teimgr.mux.forwarding import (
    INSTANCE_KEY,
    CallCounters,
    CallRecord,
    StreamForwarder,
    forward_collected,
    forward_message,
    named_target,
)
from teimgr.mux.health import MuxHealth, StandardServices
from teimgr.observability.request_context import CURRENT, REQUEST_ID, TRACEPARENT, TRACESTATE, RequestContext, Telemetry
from teimgr.spec import LANE_KEY
from teimgr.wire.frames import Method
from teimgr.wire.grpc_core.rpc import BUDGET_WAIT_S, BY_PATH, Rpc, RpcStream, Shape
from teimgr.wire.grpc_core.streams import STREAM_PAUSE_S
from teimgr.wire.protobuf import Octets, Target
from teimgr.wire.quantisation import OUTPUT_DTYPE_KEY, output_dtype_field
from teimgr.wire.routing.links import WorkerReply
from teimgr.wire.routing.on_demand import NO_LOADS, ModelLoads
from teimgr.wire.routing.router import Router, RouterView, router_view
from teimgr.wire.spaces import EXPECT_KEY
from teimgr.wire.status import CANCELLED, INTERNAL, GrpcStatus, status_name

_log = logging.getLogger(__name__)

# Each RPC of the table needs this right.
_RIGHTS = frozenset({Right.INFERENCE})
_UNCHARGED = "The key '{}' has a quota, which the daemon's host alone charges: call the gRPC port there"
# Limit on calls that wait for their first message, and how long a client may take to send it.
_OPEN_CALLS = 4096
_MESSAGE_S = 120.0
# Limit on the bytes of arriving messages in all processes that share the port, and the same limit on unread replies.
# A client stream counts as a whole: it is collected into one request. One key may hold half of the message bytes, and
# one connection a quarter of its key's part; one connection may hold a quarter of the reply bytes.
_HELD_BYTES = 512 * 2**20
_CONNECTION_SHARE = 4
_KEY_SHARE = 2
# The longest pause between messages of a stream while the mux drains.
_LEAVING_PAUSE_S = 2.0
_CONTEXT_KEYS = (REQUEST_ID, TRACEPARENT, TRACESTATE)
_OK = GrpcStatus()


class FirstMessages:
    """Reads the messages of unary calls; at most `limit` calls may wait at a time, each for at most `limit_s`."""

    def __init__(self, limit: int, limit_s: float) -> None:
        self._limit_s = limit_s
        self._places = Places(limit)

    async def next(self, call: RpcStream) -> Octets | None:
        """The call's message, None if the client has half-closed.

        Raises:
            Overloaded: too many calls in total, or of this caller, wait for their message.
            TeimgrError: as `RpcStream.receive`.
        """
        if (message := call.received()) is not None:
            return message
        caller = call.stream.connection.caller
        if not self._places.take(caller):
            raise Overloaded("Too many calls have sent no message yet; try again later")
        try:
            return await call.receive(self._limit_s)
        finally:
            self._places.leave(caller)


class Peer:
    """State that the calls of a connection share: the names in the client's certificate, and a budget per key."""

    def __init__(self, unread: ByteBudget) -> None:
        self._budgets: dict[ByteBudget, ByteBudget] = {}
        self.unread = UnreadReplies(unread, _CONNECTION_SHARE)
        self._certificate: CertificateNames | None = None

    def budget(self, of_key: ByteBudget) -> ByteBudget:
        """Return the part of a key's budget that this connection may hold."""
        budget = self._budgets.get(of_key)
        if budget is None:
            budget = self._budgets[of_key] = ByteBudget(of_key.limit_bytes // _CONNECTION_SHARE, of_key)
        return budget

    def certificate(self, stream: Stream) -> CertificateNames:
        if self._certificate is None:
            self._certificate = certificate_from_tls(stream.connection.transport.get_extra_info("peercert") or {})
        return self._certificate


class InferenceCall(RpcStream):
    """An RPC of the table.

    Attributes:
        rpc: Its entry in the table.
        record: Its counters.
        unread: The replies that the client of its connection has not read.
        deadline: Monotonic time of the client's deadline; None without one.
    """

    def __init__(
        self,
        rpc: Rpc,
        stream: Stream,
        max_message_bytes: int,
        budget: ByteBudget,
        unread: UnreadReplies,
        record: CallRecord,
    ) -> None:
        super().__init__(stream, max_message_bytes, budget, keeps_messages=rpc.shape is Shape.CLIENT_STREAM)
        self.rpc = rpc
        self.record = record
        self.unread = unread
        self.deadline: float | None = None
        self.still_allowed: Callable[[], None] = lambda: None
        """Raises Unauthenticated, Forbidden: the caller has lost its right since the call began."""

    def remaining_s(self) -> float | None:
        """The time to the client's deadline."""
        return None if self.deadline is None else self.deadline - time.monotonic()

    @property
    def lane(self) -> str | None:
        """The lane that the client chose, unchecked."""
        return self.metadata.get(LANE_KEY)

    @property
    def expected(self) -> str | None:
        """The fingerprint that the client expects, unchecked."""
        return self.metadata.get(EXPECT_KEY)

    def named_target(self, router: RouterView) -> Target | None:
        """The target in the metadata; None if the messages have targets."""
        if self.rpc.has_target:
            return None
        return named_target(router, self.metadata.get(INSTANCE_KEY), self.rpc.kinds)

    def output_dtype(self) -> bytes:
        """Return the field to append to every message to apply the element type in the metadata; usually empty."""
        word = self.metadata.get(OUTPUT_DTYPE_KEY) if self.rpc.method is Method.EMBED_ARROW else None
        return b"" if word is None else output_dtype_field(word)


class MuxHandlers:
    """Serves every RPC of the table, health and reflection.

    `request_timeout_s` limits unary calls (0 = no limit); `window` bounds the messages of a stream in flight. Limits on
    memory and open calls are divided among the `processes` that share the port. `policy` authenticates and authorises
    each call of the table before its first message is read. Connections close after `max_age`, None for never.
    `charges` returns False while quotas cannot be charged here: keys with a quota are refused then.
    """

    def __init__(
        self,
        router: Router,
        counters: CallCounters,
        *,
        request_timeout_s: float,
        window: int,
        processes: int = 1,
        policy: PolicyInForce,
        health: MuxHealth,
        charges: Callable[[], bool],
        telemetry: Telemetry | None = None,
        loads: ModelLoads = NO_LOADS,
        max_age: MaxAge | None = None,
    ) -> None:
        self._max_age = max_age
        self._charges = charges
        self._telemetry = telemetry or Telemetry()
        self._loads = loads
        self._router = router
        self._policy = policy
        self._counters = counters
        self._request_timeout_s = request_timeout_s or None
        self._window = window
        self._messages = FirstMessages(_OPEN_CALLS // processes, _MESSAGE_S)
        self._held = ByteBudget(_HELD_BYTES // processes)
        self._held_by_key: dict[str, ByteBudget] = {}  # only keys of the policy, so it stays small
        self._unread = ByteBudget(_HELD_BYTES // processes)
        self._standard = StandardServices(policy, health)
        self._bodies: dict[Shape, Callable[[InferenceCall, RouterView], Awaitable[WorkerReply | None]]] = {
            Shape.UNARY: self._unary,
            Shape.BIDI: self._bidi,
            Shape.CLIENT_STREAM: self._client_stream,
        }

    def protocol(self, state: ListenerState, ticket: Ticket) -> Connection:
        """The protocol of a connection."""
        serve = partial(self._serve, Peer(self._unread))
        return Connection(serve, state, ticket, stays_open=True, max_age=self._max_age)

    def _serve(self, peer: Peer, stream: Stream) -> Coroutine[Any, Any, None]:
        rpc = BY_PATH.get(stream.head.target.decode("ascii"))
        if rpc is None:
            return self._standard.serve(stream, self._router.limits.max_message_bytes, peer.certificate(stream))
        return self._answer(rpc, peer, stream)

    async def _answer(self, rpc: Rpc, peer: Peer, stream: Stream) -> None:
        """Answer one RPC; the only place that turns its failures into a status."""
        record = self._counters.begin(rpc.name)
        call = InferenceCall(rpc, stream, self._router.limits.max_message_bytes, self._held, peer.unread, record)
        given = {key: call.metadata[key] for key in _CONTEXT_KEYS if key in call.metadata}
        attributes = {"rpc.system": "grpc", "rpc.service": rpc.service, "rpc.method": rpc.name}
        context = self._telemetry.begin(f"{rpc.service}/{rpc.name}", given, attributes)
        CURRENT.set(context)  # for this call's task and those that it starts
        reply: WorkerReply | None = None
        status = GrpcStatus(CANCELLED)
        try:
            if call.http_refusal:
                await call.refuse(call.http_refusal)
                return
            caller = self._authorise(call, peer.certificate(stream))
            if caller is not ANONYMOUS:
                stream.connection.belongs_to(caller.name)
                context.belongs_to(caller.tenant)
            TURNS_OF.set(stream.connection.caller)
            call.charge_to(peer.budget(self._held_by(caller)))
            reply = await self._within_deadline(call, router_view(caller, self._router))
            status = _OK
        except TeimgrError as error:
            status = GrpcStatus.of(error)
        except StreamLost:
            raise  # the client left
        except Exception:
            status = GrpcStatus(INTERNAL, "Internal error")
            _log.exception("call failed", extra={"method": rpc.name, "instance": record.instance})
        finally:
            call.charge.release()
            self._counters.end(record, status_name(status.number))
            self._report(context, record, status)
        # Successful calls get an id only if they sent one.
        named = {REQUEST_ID: context.request_id} if given or status is not _OK else None
        if reply is not None:
            try:
                await self._send(call, reply)
            except TeimgrError as error:  # the client does not read its reply
                status = GrpcStatus.of(error)
        await call.finish(status, named)

    def _authorise(self, call: InferenceCall, certificate: CertificateNames) -> Caller:
        """Return the caller. Later messages require the same caller after each reload of the keys.

        Raises:
            Unauthenticated, Forbidden: it may not call.
        """
        policy, metadata = self._policy.now, call.metadata  # a check that held the call would be a reference cycle
        charges = self._charges

        def caller_by(rules: Policy) -> Caller:
            found = authenticate_call(rules, certificate, metadata)
            found.require(_RIGHTS)
            if found.has_quota and not charges():
                raise Forbidden(_UNCHARGED.format(found.name))
            return found

        caller = caller_by(policy)

        def still_allowed() -> None:
            nonlocal policy
            if (now := self._policy.now) is policy:
                return
            found = caller_by(now)
            if found.instances != caller.instances:  # the router of this call covers the former instances
                raise Forbidden("The key's instances have changed: begin a new call")
            policy = now

        call.still_allowed = still_allowed
        return caller

    def _held_by(self, caller: Caller) -> ByteBudget:
        """Return the budget of a key, which is a part of the whole; without authentication every caller may use the
        whole."""
        if caller is ANONYMOUS:
            return self._held
        budget = self._held_by_key.get(caller.name)
        if budget is None:
            budget = self._held_by_key[caller.name] = ByteBudget(self._held.limit_bytes // _KEY_SHARE, self._held)
        return budget

    async def _within_deadline(self, call: InferenceCall, router: RouterView) -> WorkerReply | None:
        """Return the reply of a unary call or a collected stream; the replies of a bidi stream are sent before it
        returns."""
        timeout_s = call.timeout_s()
        if timeout_s is None:
            return await self._body(call, router)
        call.deadline = time.monotonic() + timeout_s
        try:
            async with asyncio.timeout(timeout_s) as limit:
                return await self._body(call, router)
        except TimeoutError:
            if not limit.expired():
                raise
            raise DeadlineExceeded from None

    async def _body(self, call: InferenceCall, router: RouterView) -> WorkerReply | None:
        if not call.unread.has_room:
            await call.unread.room(BUDGET_WAIT_S)
        return await self._bodies[call.rpc.shape](call, router)

    async def _send(self, call: InferenceCall, reply: WorkerReply) -> None:
        """Send the only reply, after initial metadata with its compute cost."""
        size = len(reply.payload)
        call.unread.charge(size)
        try:
            costs = reply.timings.headers() if call.rpc.reports_compute and reply.timings is not None else None
            await call.open(costs, call.record.marks)
            await call.send(reply.payload)
        finally:
            call.unread.give_back(size)

    def _report(self, context: RequestContext, record: CallRecord, status: GrpcStatus) -> None:
        if self._telemetry.is_on:
            attributes: dict[str, str | int] = {"rpc.grpc.status_code": status.number, "tei.instance": record.instance}
            error = None if status is _OK else status.message or status_name(status.number)
            context.end(attributes, error)
        if _log.isEnabledFor(logging.DEBUG):
            took_ms = round((time.perf_counter() - record.began_s) * 1000, 3)
            extra = {"method": record.method, "instance": record.instance, "ms": took_ms}
            _log.debug("call answered", extra=extra | {"status": status_name(status.number)})

    async def _unary(self, call: InferenceCall, router: RouterView) -> WorkerReply:
        message = await self._messages.next(call)
        if message is None:
            raise InvalidInput("Missing message")
        call.record.restart()
        call.charge.release()  # the link counts it from here on
        named, timeout_s = call.named_target(router), call.remaining_s()
        if call.rpc.limited and self._request_timeout_s is not None:
            timeout_s = self._request_timeout_s if timeout_s is None else min(timeout_s, self._request_timeout_s)
        message += call.output_dtype()
        return await forward_message(
            call.rpc,
            router,
            message,
            named,
            lane=call.lane,
            expected=call.expected,
            timeout_s=timeout_s,
            record=call.record,
            loads=self._loads,
        )

    async def _bidi(self, call: InferenceCall, router: RouterView) -> None:
        async def receive() -> Octets | None:
            message = await call.receive(STREAM_PAUSE_S)
            call.charge.release()  # the window bounds those in flight
            call.still_allowed()
            return message

        # Otherwise an idle stream would delay a drain for the whole grace.
        call.stream.call_when(leaving=partial(call.leave, _LEAVING_PAUSE_S))
        named, suffix = call.named_target(router), call.output_dtype()
        forwarder = StreamForwarder(
            call.rpc,
            router,
            named,
            suffix=suffix,
            lane=call.lane,
            expected=call.expected,
            record=call.record,
            loads=self._loads,
        )
        await forwarder.run(receive, self._window, call.unread, on_first=partial(call.open, None), send=call.send)

    async def _client_stream(self, call: InferenceCall, router: RouterView) -> WorkerReply:
        async def receive() -> Octets | None:
            message = await call.receive()
            call.still_allowed()
            return message

        return await forward_collected(
            call.rpc,
            router,
            receive,
            call.named_target(router),
            lane=call.lane,
            expected=call.expected,
            message_timeout_s=self._request_timeout_s or _MESSAGE_S,
            timeout_s=call.remaining_s(),
            record=call.record,
            loads=self._loads,
        )
