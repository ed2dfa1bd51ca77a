"""Client side of workers: links (framed connections with multiplexed calls and a byte budget), and replicas.

A replica is one worker: two links, reconnection, and its load for balancing.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from teimgr.errors import Broken, DeadlineExceeded, Overloaded, TeimgrError, TooLarge, Unavailable
from teimgr.http.byte_budget import ByteBudget
from teimgr.observability.request_context import CURRENT
from teimgr.spec import WorkerEndpoint
from teimgr.wire.frames import (
    MAX_DEADLINE_MS,
    Flag,
    FrameProtocol,
    FrameType,
    Header,
    Method,
    Payload,
    Received,
    Timings,
    split_timings,
    unpack_error,
)
from teimgr.wire.spaces import reply_marks

# Stops corrupt lengths only. Workers are trusted: a reply over the message limit fails its call, not the link.
_MAX_FRAME_BYTES = 1 << 30
# Cost of a call besides its payload, so that the byte budget also bounds the number of small calls in flight.
CALL_BYTES = 512
# With more bulk calls in flight the worker is busy, so a new frame may wait to be written with others.
_BUSY_CALLS = 8
RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 5.0
# A replica with this many failures in a row is avoided until it passes a health check. Timeouts below one second do
# not count.
_MAX_FAILURES = 3
_MIN_FAILURE_TIMEOUT_S = 1.0
_CHECK_TIMEOUT_S = 5.0
_CHECK_FIRST_PAUSE_S = 0.2
# Equal calls vary slightly in size and remaining time: within 10 % they count as equal.
_ALIKE = 0.9
# Limit on waiting for a connection or for room in the byte budget; it also applies to calls without a deadline.
_WAIT_LIMIT_S = 300.0
# The largest share of the waiting bytes that calls for one replica may hold.
_REPLICA_SHARE = 4
# Errors that mean that no process listens. After others, such as a full backlog, the worker may live.
_GONE = (ConnectionRefusedError, ConnectionResetError, FileNotFoundError)


@dataclass(slots=True)
class LinkStats:
    """Counters of one instance; they outlive its replicas. Bytes are payload bytes."""

    connects: int = 0
    expired: int = 0
    losses: int = 0
    received_bytes: int = 0
    requests: int = 0
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLimits:
    """Bounds of every link of one router.

    `max_message_bytes` bounds a payload in either direction; `max_reply_bytes` overrides it for replies.
    `max_inflight_bytes` is per link; `max_waiting_bytes` bounds all requests that wait for a connection or for room on
    their link.
    """

    max_message_bytes: int = 40 * 1024 * 1024
    max_reply_bytes: int | None = None
    max_inflight_bytes: int = 256 * 1024 * 1024
    max_waiting_bytes: int = 1024 * 1024 * 1024
    connect_timeout_s: float = 5.0


class WorkerReply(NamedTuple):
    """A worker's reply. `timings` is None if the method has none."""

    payload: Received
    timings: Timings | None


class ConnectionLost(Unavailable):
    """The link broke after the request was sent, so the worker may have begun it."""


class PendingCall:
    """One request in flight: await `answer`, or call `cancel`."""

    __slots__ = ("_timeout_s", "_timer", "answer", "context", "cost_bytes", "id", "link", "method")

    def __init__(self, link: WorkerLink, id: int, method: Method, cost_bytes: int, timeout_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self.link = link
        self.id = id
        self.method = method
        self.cost_bytes = cost_bytes
        self.context = CURRENT.get()
        self.answer: asyncio.Future[WorkerReply] = loop.create_future()
        self._timeout_s = timeout_s
        self._timer = loop.call_later(timeout_s, self._expire) if timeout_s is not None else None

    def cancel(self) -> None:
        """Send CANCEL to the worker; no effect once the call is answered."""
        if self.link.cancel(self):
            self.answer.cancel()

    def finish(self, outcome: WorkerReply | TeimgrError) -> None:
        """Resolve `answer`; called by the link, after `forget`."""
        if self._timer is not None:
            self._timer.cancel()
        if self.answer.done():
            return
        if isinstance(outcome, TeimgrError):
            self.answer.set_exception(outcome)
            self.answer.exception()  # marks it retrieved: asyncio logs errors that a cancelled caller never reads
        else:
            self.answer.set_result(outcome)

    def _expire(self) -> None:
        if self.link.cancel(self):
            self.link.stats.expired += 1
            if (self._timeout_s or 0.0) >= _MIN_FAILURE_TIMEOUT_S:
                self.link.owner.call_failed()
            self.finish(DeadlineExceeded())


class WorkerLink(FrameProtocol):
    """One connection of a replica, and its calls, which all fail when it is lost."""

    def __init__(self, owner: Replica, limits: LinkLimits) -> None:
        super().__init__(_MAX_FRAME_BYTES)
        self.budget = ByteBudget(limits.max_inflight_bytes)
        self.stats = owner.stats
        self.closed = asyncio.get_running_loop().create_future()
        self.owner = owner
        self._limits = limits
        self._calls: dict[int, PendingCall] = {}
        self._last_id = 0

    @property
    def calls_in_flight(self) -> int:
        return len(self._calls)

    def request(
        self, method: Method, payload: Payload, flags: int, timeout_s: float | None, cost_bytes: int, before: bytes
    ) -> PendingCall:
        """Send a request, `before` and `payload`, whose cost was taken from the budget.

        Raises:
            Unavailable: the link is lost.
            Exception: the request could not be sent; its cost has been returned to the budget.
        """
        if not self.is_open:
            self.budget.give_back(cost_bytes)
            raise self.owner.unavailable()
        self._last_id += 1
        call = PendingCall(self, self._last_id, method, cost_bytes, timeout_s)
        self.stats.requests += 1
        self.stats.sent_bytes += len(before) + len(payload)
        self._calls[call.id] = call
        deadline_ms = 0 if timeout_s is None else min(max(1, int(timeout_s * 1000)), MAX_DEADLINE_MS)
        linger = bool(flags & Flag.BULK) and len(self._calls) > _BUSY_CALLS
        context = b"" if call.context is None else call.context.pack()
        try:
            self.send(
                FrameType.REQUEST,
                method,
                call.id,
                payload,
                flags=flags,
                deadline_ms=deadline_ms,
                linger=linger,
                context=context,
                before=before,
            )
        except BaseException:
            del self._calls[call.id]
            self.budget.give_back(cost_bytes)
            call.finish(self.owner.unavailable())  # cancels its timer
            raise
        return call

    def forget(self, call: PendingCall) -> bool:
        """Remove the call and return its cost to the budget; False when it was removed before."""
        if self._calls.pop(call.id, None) is None:
            return False
        self.budget.give_back(call.cost_bytes)
        self.owner.call_ended(call.cost_bytes)
        return True

    def cancel(self, call: PendingCall) -> bool:
        """Like `forget`, and send CANCEL to the worker."""
        is_in_flight = self.forget(call)
        if is_in_flight:
            self.send(FrameType.CANCEL, call.method, call.id)
        return is_in_flight

    def frame_received(self, header: Header, payload: Received) -> None:
        """Resolve the reply's call; the reply of a cancelled call is dropped."""
        self.stats.received_bytes += header.length
        call = self._calls.get(header.id)
        if call is None:
            return
        self.forget(call)
        if header.context and call.context is not None:
            call.context.on_stats(header.context, self.owner.instance)
        outcome = self._outcome(header, payload)
        if isinstance(outcome, WorkerReply):
            self.owner.failures = 0
        elif isinstance(outcome, (Broken, Unavailable)):
            self.owner.call_failed()
        call.finish(outcome)

    def _outcome(self, header: Header, payload: Received) -> WorkerReply | TeimgrError:
        if header.type == FrameType.ERROR:
            return unpack_error(payload, header.deadline_ms)
        timings = None
        if header.flags & Flag.TIMINGS:
            timings, payload = split_timings(payload)
        limit = self._limits.max_reply_bytes or self._limits.max_message_bytes
        if len(payload) > limit:
            return too_large("Reply", len(payload), limit)
        return WorkerReply(payload, timings)

    def link_lost(self, error: Exception | None) -> None:
        self.owner.link_lost()
        self.end_calls()

    def end_calls(self) -> None:
        """Fail every call in flight; the link is closed."""
        for call in tuple(self._calls.values()):
            self.forget(call)
            call.finish(ConnectionLost(self.owner.unavailable().message))
        if not self.closed.done():
            self.closed.set_result(None)


def too_large(what: str, size: int, limit: int) -> TooLarge:
    return TooLarge(f"{what} message larger than max ({size} vs. {limit} bytes)")


class Refusal(NamedTuple):
    """A worker's refusal of a call that would have waited too long; valid until `until`, on the loop's clock."""

    size: int
    timeout_s: float | None
    until: float
    again_at: float

    def holds_for(self, size: int, timeout_s: float | None) -> bool:
        """True if the call is at least as demanding as this one, allowing for jitter of sizes and deadlines."""
        if (timeout_s is None) is not (self.timeout_s is None) or size < self.size * _ALIKE:
            return False
        return timeout_s is None or self.timeout_s is None or timeout_s * _ALIKE <= self.timeout_s


class Replica:
    """One incarnation of a worker, with separate links for interactive and bulk calls, so that bulk does not delay
    queries.

    The links connect on first use. Losing one closes both, and the replica takes no calls until a reconnect succeeds.
    A socket belongs to one incarnation, so a reconnect never reaches another one. Workers on other hosts are
    `RemoteReplica` (`wire/routing/remote_links.py`).

    A `suspended` replica failed several calls in a row and has not passed a health check since. It gets calls only if
    no other replica can take them.
    """

    is_remote = False
    _gone: tuple[type[OSError], ...] = _GONE

    def __init__(
        self,
        instance: str,
        endpoint: WorkerEndpoint,
        limits: LinkLimits,
        stats: LinkStats | None = None,
        waiting: ByteBudget | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.marks = reply_marks(endpoint.space, endpoint.precision)
        self.stats = stats or LinkStats()
        self.outstanding_bytes = 0
        self.outstanding_calls = 0
        self.calls = 0
        self.leases = 0
        self.failures = 0  # calls in a row
        self.refusals: dict[object, Refusal] = {}  # recent ones, by class of call
        self.suspended = False
        self.lost = False
        self.retired = False
        self.instance = instance
        self._limits = limits
        self._waiting_of_all = waiting
        self._waiting: ByteBudget | None = None  # made for the first call that waits; most replicas have none
        self._links: list[WorkerLink | None] = [None, None]
        self._connecting = asyncio.Lock()
        self._connected_at = float("-inf")
        self._reconnecting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._reconnect_pause_s = RECONNECT_FIRST_S

    @property
    def usable(self) -> bool:
        return not (self.lost or self.retired)

    @property
    def is_closed(self) -> bool:
        reconnecting = self._reconnecting is not None and not self._reconnecting.done()
        return not reconnecting and all(link is None or link.closed.done() for link in self._links)

    async def start(
        self, method: Method, payload: Payload, flags: int, timeout_s: float | None, before: bytes = b""
    ) -> PendingCall:
        """Send `before` and `payload` as a request on the link of its lane; waits for the connection and, with
        `Flag.WAIT`, for the byte budget.

        Raises:
            TooLarge: the payload exceeds the message limit.
            Overloaded: the byte budget is used up and the call may not wait, or too many bytes wait already.
            Unavailable: the worker cannot be reached.
            DeadlineExceeded: `timeout_s`, or else the limit on waits, passed while waiting.
        """
        size = len(before) + len(payload)
        if size > self._limits.max_message_bytes:
            raise too_large("Request", size, self._limits.max_message_bytes)
        bulk = bool(flags & Flag.BULK)
        cost = size + CALL_BYTES
        self.outstanding_bytes += cost
        self.outstanding_calls += 1
        self.calls += 1
        try:
            link = self._links[bulk]
            if link is None or not link.budget.try_take(cost):
                link, timeout_s = await self._when_ready(bulk, cost, flags, timeout_s)
            return link.request(method, payload, flags, timeout_s, cost, before)
        except BaseException:
            self.call_ended(cost)
            raise

    def retire(self) -> None:
        """Take no new leases; close once existing leases and calls in flight have ended."""
        self.retired = True
        for task in (self._reconnecting, self._checking):
            if task is not None:
                task.cancel()
        self._close_when_idle()

    async def close(self) -> None:
        """Fail the calls in flight, close, and wait until the sockets are closed."""
        self.retired = self.lost = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait({self._reconnecting})
        for link in self._open_links():
            link.abort()
        for link in self._open_links():
            await link.closed

    def unavailable(self) -> Unavailable:
        return Unavailable(f"Instance '{self.instance}' lost its worker: the connection closed")

    def call_ended(self, cost_bytes: int) -> None:
        self.outstanding_bytes -= cost_bytes
        self.outstanding_calls -= 1
        if self.retired:
            self._close_when_idle()

    def lease_began(self) -> None:
        self.leases += 1

    def lease_ended(self) -> None:
        self.leases -= 1
        if self.retired:
            self._close_when_idle()

    def call_failed(self) -> None:
        """Count a failure that the caller did not cause; after several in a row the replica is suspended."""
        self.failures += 1
        if self.failures >= _MAX_FAILURES and self.usable and not self.suspended:
            self.suspended = True
            self._checking = asyncio.create_task(self._check_health(), name=f"health check of {self.instance}")

    async def _check_health(self) -> None:
        """Send PROBE, at growing intervals, until the worker passes its self-test."""
        pause_s = _CHECK_FIRST_PAUSE_S
        while True:
            try:
                call = await self.start(Method.PROBE, b"", Flag.NONE, _CHECK_TIMEOUT_S)
                try:
                    await call.answer
                finally:
                    call.cancel()
            except TeimgrError:
                await asyncio.sleep(pause_s)
                pause_s = min(RECONNECT_MAX_S, pause_s * 2)
            else:
                self.failures, self.suspended = 0, False
                return

    def link_lost(self) -> None:
        """Assume that the worker is gone: close the other link too and start reconnecting."""
        if not self.lost:
            self.lost = True
            self.stats.losses += not self.retired
            if asyncio.get_running_loop().time() - self._connected_at > RECONNECT_MAX_S:
                self._reconnect_pause_s = RECONNECT_FIRST_S  # the link worked, so begin the back-off again
            for link in self._open_links():
                link.abort()
            self.reconnect_if_lost()

    def reconnect_if_lost(self) -> None:
        """Start reconnecting to a lost worker, unless that is under way."""
        if self.lost and not self.retired and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = asyncio.create_task(self._reconnect(), name=f"reconnect to {self.instance}")

    def _open_links(self) -> list[WorkerLink]:
        return [link for link in self._links if link is not None]

    def _close_when_idle(self) -> None:
        if self.outstanding_calls == 0 and self.leases == 0:
            for link in self._open_links():
                link.close()

    async def _when_ready(
        self, bulk: bool, cost: int, flags: int, timeout_s: float | None
    ) -> tuple[WorkerLink, float | None]:
        """Return the connected link, with `cost` taken from its budget, and the remaining time. Raises as `start`."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._waiting is None:
            of_all = self._waiting_of_all or ByteBudget(self._limits.max_waiting_bytes)
            self._waiting = ByteBudget(of_all.limit_bytes // _REPLICA_SHARE, of_all)
        if not self._waiting.try_take(cost):
            raise Overloaded(f"Instance '{self.instance}' is overloaded: too many bytes wait for it")
        try:
            async with asyncio.timeout(_WAIT_LIMIT_S if timeout_s is None else timeout_s):
                link = self._links[bulk] or await self._connect(bulk)
                if flags & Flag.WAIT:
                    await link.budget.take(cost)
                elif not link.budget.try_take(cost):
                    in_flight = link.calls_in_flight
                    raise Overloaded(f"Instance '{self.instance}' is overloaded: {in_flight} calls in flight")
        except TimeoutError:
            raise DeadlineExceeded from None
        finally:
            self._waiting.give_back(cost)
        return link, None if timeout_s is None else timeout_s - (loop.time() - began)

    async def _connect(self, bulk: bool) -> WorkerLink:
        limit_s = self._limits.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._connecting:
                if (link := self._links[bulk]) is not None:
                    return link
                if self.lost:
                    raise self.unavailable()
                link = self._links[bulk] = await self._new_link()
        except TimeoutError:
            raise Unavailable(f"Failed to connect to backend: no answer within {limit_s:g} s") from None
        except OSError as error:
            if isinstance(error, self._gone):
                self.link_lost()
            raise Unavailable(f"Failed to connect to backend: {error.strerror or error}") from error
        if self.lost:  # the replica was closed meanwhile
            link.abort()
        return link

    async def _new_link(self) -> WorkerLink:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: WorkerLink(self, self._limits), self.endpoint.socket)
        self._count_connect()
        return link

    def _count_connect(self) -> None:
        self._connected_at = asyncio.get_running_loop().time()
        self.stats.connects += 1

    async def _reconnect(self) -> None:
        """Reconnect with exponential backoff; give up once no process listens."""
        while self.lost:
            await asyncio.sleep(self._reconnect_pause_s)
            self._reconnect_pause_s = min(RECONNECT_MAX_S, self._reconnect_pause_s * 2)
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s), self._connecting:
                    for link in self._open_links():
                        await link.closed  # its late loss must not count as that of the new link
                    link = await self._new_link()
                    self._links = [link, None]
                    self.lost = not link.is_open
            except self._gone:
                return
            except (OSError, TeimgrError):
                continue
