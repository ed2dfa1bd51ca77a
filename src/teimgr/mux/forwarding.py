"""Forwarding of messages to workers, without gRPC: find the target, lease a replica, send the inner request.

`CallRecord` and `CallCounters` count the calls and their latencies.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from teimgr.errors import AmbiguousInstance, DeadlineExceeded, InvalidInput, NotLoaded, TeimgrError, Unavailable
from teimgr.http.byte_budget import UnreadReplies
from teimgr.observability.catalogue import MUX_SECONDS
from teimgr.wire.arrow_limits import read_outline
from teimgr.wire.frames import in_lane
from teimgr.wire.grpc_core.rpc import SERVICE, Rpc
from teimgr.wire.grpc_core.streams import PairCollector, Receive, StreamPump
from teimgr.wire.protobuf import (
    TARGET_FIELD,
    Envelope,
    Octets,
    Slice,
    Target,
    read_envelope,
    read_target,
    without_fields,
)
from teimgr.wire.routing.links import PendingCall, WorkerReply
from teimgr.wire.routing.on_demand import NO_LOADS, ModelLoads, as_unloaded, call_when_ready
from teimgr.wire.routing.router import Lease, RouterView, check_target
from teimgr.wire.spaces import Marks

# Metadata that names the instance of a call whose messages have no target.
INSTANCE_KEY = "x-teimgr-instance"
# Limit on the Arrow options of a stream. They are put before each later message.
_MAX_OPTIONS_BYTES = 256 * 1024


def named_target(router: RouterView, name: str | None, kinds: Sequence[str] = ()) -> Target:
    """Return the target of a call whose messages have none: `name`, else the choice of `RouterView.unnamed`.

    Raises:
        InvalidInput: the name is empty.
        AmbiguousInstance: the name is missing, and not exactly one instance serves one of `kinds`.
    """
    if name is None:
        try:
            return router.unnamed(kinds)
        except AmbiguousInstance as error:
            raise AmbiguousInstance(f"Name an instance in the metadata `{INSTANCE_KEY}`: {error.message}") from None
    target = Target(instance_name=name)
    check_target(target)
    return target


async def forward_message(
    rpc: Rpc,
    router: RouterView,
    message: Octets,
    named: Target | None,
    *,
    lane: str | None,
    expected: str | None,
    timeout_s: float | None,
    record: CallRecord,
    loads: ModelLoads | None = NO_LOADS,
) -> WorkerReply:
    """Forward a unary message. `named` is the target of a message without one; `lane` and `expected` are the values of
    `LANE_KEY` and `EXPECT_KEY`.

    `loads` loads a model on demand while the call waits. If it is None, the call fails instead.

    Raises:
        TeimgrError: the first check failed of: target, inner request, lookup, worker.
    """
    envelope = rpc.open(message)
    target = _target_of(envelope) if named is None else named
    if envelope.inner is None:
        raise InvalidInput(rpc.missing)
    try:
        with _lease_for(rpc, router, target, message) as lease:
            record.found(lease.instance)
            record.count()
            flags = in_lane(rpc.lane, lane)
            lease.expect(expected)
            reply = await lease.call(rpc.worker_method(), envelope.inner, flags=flags, timeout_s=timeout_s)
            record.note_marks(lease.marks)
            return reply
    except Unavailable as error:
        missing = as_unloaded(router, record.instance, error)
        if missing is None:
            raise
        if loads is None:
            raise missing from None
    again = partial(
        forward_message, rpc, router, message, named, lane=lane, expected=expected, record=record, loads=None
    )
    return await call_when_ready(loads, missing, timeout_s, lambda left_s: again(timeout_s=left_s), len(message))


async def forward_collected(
    rpc: Rpc,
    router: RouterView,
    receive: Receive,
    named: Target | None,
    *,
    lane: str | None,
    expected: str | None,
    message_timeout_s: float | None,
    timeout_s: float | None,
    record: CallRecord,
    loads: ModelLoads = NO_LOADS,
) -> WorkerReply:
    """Collect a client stream into one request and forward it to the target of the first message, or to `named`.

    `message_timeout_s` bounds the wait for each message, `timeout_s` the whole call.

    Raises:
        InvalidInput: the stream is empty, its first message has no target, or no message has a request.
        TooLarge: the stream exceeds the router's message limit.
        DeadlineExceeded: a time limit has passed.
        TeimgrError: as `Router.lease` and `Lease.call`.
    """
    pairs = PairCollector(router.limits.max_message_bytes)
    target = named

    def request_of(message: Octets) -> Slice | None:
        nonlocal target
        envelope = rpc.open(message)
        if not record.messages:
            target = target or _target_of(envelope)
            with suppress(NotLoaded), _lease_for(rpc, router, target, message) as first:
                first.expect(expected)  # fail before the rest is sent
        record.count()
        return envelope.inner

    try:
        async with asyncio.timeout(timeout_s) as limit:
            await pairs.collect(receive, message_timeout_s, request_of)
            assert target is not None
            flags = in_lane(pairs.flags, lane)
            call = partial(_call_collected, rpc, router, target, pairs, flags, expected, record)
            try:
                return await call()
            except NotLoaded as error:
                missing = error
            return await call_when_ready(loads, missing, None, lambda left_s: call())
    except TimeoutError:
        if not limit.expired():
            raise
        raise DeadlineExceeded from None


async def _call_collected(
    rpc: Rpc,
    router: RouterView,
    target: Target,
    pairs: PairCollector,
    flags: int,
    expected: str | None,
    record: CallRecord,
) -> WorkerReply:
    with router.lease(target) as lease:
        record.found(lease.instance)
        lease.expect(expected)
        try:
            reply = await lease.call(rpc.worker_method(), pairs.payload(), flags=flags)
        except Unavailable as error:
            raise as_unloaded(router, lease.instance, error) or error from None
        record.note_marks(lease.marks)
        return reply


class StreamForwarder:
    """Forwards a bidi stream, each message to its own target; a message without one goes to the previous target.

    The first target may be `named`. `suffix` is appended to every message; `lane` is the value of `LANE_KEY`,
    `expected` that of `EXPECT_KEY`.
    """

    def __init__(
        self,
        rpc: Rpc,
        router: RouterView,
        named: Target | None,
        *,
        suffix: bytes,
        lane: str | None,
        expected: str | None,
        record: CallRecord,
        loads: ModelLoads = NO_LOADS,
    ) -> None:
        self._rpc = rpc
        self._router = router
        self._target = named
        self._suffix = suffix
        self._lane = lane
        self._expected = expected
        self._record = record
        self._loads = loads
        self._target_bytes: Slice | None = None
        self._lease: Lease | None = None
        self._leases = contextlib.ExitStack()
        self._options: bytes | None = None
        self._is_open = False

    async def run(
        self,
        receive: Receive,
        window: int,
        unread: UnreadReplies,
        *,
        on_first: Callable[[Marks], Awaitable[None]],
        send: Callable[[Slice], Awaitable[None]],
    ) -> None:
        """Pump the stream that `receive` reads, as `StreamPump`. Once the first target is found, `on_first` is called
        with the space of its worker.

        Raises:
            TeimgrError: the error of the first message, in request order, that failed.
        """

        async def receive_whole() -> Octets | None:
            message = await receive()
            if message is not None:
                if self._suffix:
                    message += self._suffix  # a large message is a bytearray, which is not copied
                return message
            if self._target is None:
                raise InvalidInput("Empty stream")
            return None

        async def start(message: Octets, flags: int) -> PendingCall | None:
            try:
                return await begin(message, flags)
            except NotLoaded as error:
                missing = error
            return await call_when_ready(self._loads, missing, None, lambda _: begin(message, flags), len(message))

        async def begin(message: Octets, flags: int) -> PendingCall | None:
            envelope = self._rpc.open(message)
            lease = self._lease_of(envelope, message)
            if not self._is_open:
                self._is_open = True
                await on_first(lease.marks)
            if envelope.inner is None:
                return None
            # The message's own fields come after the options of the first message, so they override them.
            before = self._options_before(message) if self._rpc.arrow_field else b""
            try:
                return await lease.start(
                    self._rpc.worker_method(), envelope.inner, flags=in_lane(flags, self._lane), before=before
                )
            except Unavailable as error:
                raise as_unloaded(self._router, lease.instance, error) or error from None

        async def reply(payload: Slice) -> None:
            self._record.count()
            await send(payload)

        with self._leases:
            await StreamPump(self._rpc, window, unread, receive=receive_whole, start=start, send=reply).run()

    def _lease_of(self, envelope: Envelope, message: Octets) -> Lease:
        """Return a lease for the message's target; the previous lease if the message has no target and its worker
        still serves."""
        if envelope.target is not None and envelope.target != self._target_bytes:
            self._target = _target_of(envelope)
            self._target_bytes = envelope.target
            self._lease = None
        if self._target is None:
            raise InvalidInput("Missing target")
        if self._lease is None or self._lease.is_over:
            self._leases.close()
            self._lease = self._leases.enter_context(_lease_for(self._rpc, self._router, self._target, message))
            self._lease.expect(self._expected)
            self._record.found(self._lease.instance)
        return self._lease

    def _options_before(self, message: Octets) -> bytes:
        """Return the options of the first message, which are sent before each later message; b"" for the first."""
        if self._options is None:
            options = without_fields(message, TARGET_FIELD, self._rpc.arrow_field)
            if len(options) > _MAX_OPTIONS_BYTES:
                raise InvalidInput(
                    f"The first message has {len(options)} bytes beside its target and table, more than "
                    f"{_MAX_OPTIONS_BYTES}; these bytes are repeated before each later message"
                )
            self._options = bytes(options)
            return b""
        return self._options


def _target_of(envelope: Envelope) -> Target:
    if envelope.target is None:
        raise InvalidInput("Missing target")
    target = read_target(envelope.target)
    check_target(target)
    return target


def _lease_for(rpc: Rpc, router: RouterView, target: Target, message: Octets) -> Lease:
    """Lease a replica for `message`. If that fails and its Arrow is invalid, raise that error instead."""
    try:
        return router.lease(target)
    except TeimgrError:
        if rpc.arrow_field:
            _check_arrow(rpc, message)
        raise


def _check_arrow(rpc: Rpc, message: Octets) -> None:
    try:
        outline = read_outline(read_envelope(message, rpc.arrow_field, has_table=True).inner or b"")
    except ValueError as error:
        raise InvalidInput(f"Invalid Arrow IPC: {error}") from error
    if rpc.service != SERVICE.full_name:
        return  # its required columns depend on its other fields
    if not outline.has_text:
        raise InvalidInput("No string column: expected `text` (a StringArray is needed)")
    if not outline.has_batch:
        raise InvalidInput("No RecordBatch in stream")


_BOUNDS_S = MUX_SECONDS.bounds


class CallRecord:
    """State of one call while it runs: its method, its instance once known, the number of its messages (in a bidi
    stream those that are answered), and the space of its vectors."""

    __slots__ = ("began_s", "instance", "marks", "messages", "method")

    def __init__(self, method: str) -> None:
        self.method = method
        self.instance = ""
        self.marks: Marks = ()
        self.messages = 0
        self.began_s = time.perf_counter()

    def found(self, instance: str) -> None:
        self.instance = instance

    def count(self) -> None:
        """Count one more message."""
        self.messages += 1

    def note_marks(self, marks: Marks) -> None:
        """Record the space of the call's vectors."""
        self.marks = marks

    def restart(self) -> None:
        """Restart the clock: the time of a client's upload is not part of our latency."""
        self.began_s = time.perf_counter()


class CallLatency:
    """Non-cumulative histogram over the bounds of `MUX_SECONDS`, with an overflow bucket; sums of seconds and
    messages."""

    __slots__ = ("buckets", "messages", "sum_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(_BOUNDS_S) + 1)
        self.messages = 0
        self.sum_s = 0.0


class CallCounters:
    """Calls by method, instance and gRPC status; latency by method and instance.

    Only names in `instances` become labels: a call whose target was not found, or was deleted meanwhile, is counted
    under the empty name. `drop` removes the counters of a deleted instance.
    """

    def __init__(self, instances: Container[str]) -> None:
        self.in_flight = 0
        self._instances = instances
        self._calls: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self._latency: defaultdict[str, dict[str, CallLatency]] = defaultdict(dict)

    def begin(self, method: str) -> CallRecord:
        """Count a call as in flight; `end` must follow."""
        self.in_flight += 1
        return CallRecord(method)

    def end(self, record: CallRecord, status: str) -> None:
        """Count a finished call by the name of its gRPC status."""
        self.in_flight -= 1
        instance = record.instance if record.instance in self._instances else ""
        self._calls[instance][record.method, status] += 1
        latency = self._latency[instance].get(record.method)
        if latency is None:
            latency = self._latency[instance][record.method] = CallLatency()
        duration_s = time.perf_counter() - record.began_s
        latency.buckets[bisect_left(_BOUNDS_S, duration_s)] += 1
        latency.sum_s += duration_s
        latency.messages += record.messages

    def drop(self, instance: str) -> None:
        self._calls.pop(instance, None)
        self._latency.pop(instance, None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "calls": [
                {"method": method, "instance": instance, "status": status, "count": count}
                for instance, calls in self._calls.items()
                for (method, status), count in calls.items()
            ],
            "latency": [
                {
                    "method": method,
                    "instance": instance,
                    "messages": latency.messages,
                    "sum_s": round(latency.sum_s, 6),
                    "buckets": latency.buckets,
                }
                for instance, latencies in self._latency.items()
                for method, latency in latencies.items()
            ],
            "bounds_s": _BOUNDS_S,
        }
