"""Client side of one replica: two links to its worker, reconnection, and the load used for balancing."""

from __future__ import annotations

import asyncio

from teimgr.directory import WorkerEndpoint
from teimgr.errors import DeadlineExceeded, Overloaded, Unavailable
from teimgr.routing.links import CALL_BYTES, LinkLimits, LinkStats, PendingCall, WorkerLink, too_large
from teimgr.wire.frames import Flag, Method, Payload

RECONNECT_FIRST_S = 0.05
RECONNECT_MAX_S = 5.0
# No process listens there. Other errors, such as a full backlog or too many open files, do not mean a dead worker.
_GONE = (ConnectionRefusedError, ConnectionResetError, FileNotFoundError)


class Replica:
    """One incarnation of a worker, with a link for interactive calls and one for bulk, which would delay them.

    The links connect on first use. Losing one closes both, and the replica takes no calls until a reconnect succeeds.
    A socket belongs to one incarnation, so a reconnect never reaches another one.
    """

    def __init__(
        self, instance: str, endpoint: WorkerEndpoint, limits: LinkLimits, stats: LinkStats | None = None
    ) -> None:
        self.endpoint = endpoint
        self.stats = stats or LinkStats()
        self.outstanding_bytes = 0
        self.outstanding_calls = 0
        self.calls = 0
        self.leases = 0
        self.lost = False
        self.retired = False
        self.instance = instance
        self._limits = limits
        self._links: list[WorkerLink | None] = [None, None]
        self._connecting = asyncio.Lock()
        self._connected_at = float("-inf")
        self._reconnecting: asyncio.Task[None] | None = None
        self._reconnect_pause_s = RECONNECT_FIRST_S

    @property
    def usable(self) -> bool:
        return not (self.lost or self.retired)

    @property
    def is_closed(self) -> bool:
        """Whether every socket is closed and none will be opened."""
        reconnecting = self._reconnecting is not None and not self._reconnecting.done()
        return not reconnecting and all(link is None or link.closed.done() for link in self._links)

    async def start(self, method: Method, payload: Payload, flags: Flag, timeout_s: float | None) -> PendingCall:
        """Send a request on the link of its lane; waits for the connection and, with `Flag.WAIT`, for the byte budget.

        Raises:
            TooLarge: the payload exceeds the message limit.
            Overloaded: the byte budget is used up and the call may not wait.
            Unavailable: the worker cannot be reached.
            DeadlineExceeded: `timeout_s` passed while waiting.
        """
        size = len(payload)
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
            return link.request(method, payload, flags, timeout_s, cost)
        except BaseException:
            self.call_ended(cost)
            raise

    def retire(self) -> None:
        """Take no new calls; close once those in flight are answered."""
        self.retired = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
        self._close_when_idle()

    async def close(self) -> None:
        """Fail the calls in flight, close, and wait until the sockets are closed."""
        self.retired = self.lost = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.wait({self._reconnecting})
        links = [link for link in self._links if link is not None]
        for link in links:
            link.abort()
        for link in links:
            await link.closed

    def unavailable(self) -> Unavailable:
        return Unavailable(f"Instance '{self.instance}' lost its worker: the connection closed")

    def call_ended(self, cost_bytes: int) -> None:
        self.outstanding_bytes -= cost_bytes
        self.outstanding_calls -= 1
        if self.retired:
            self._close_when_idle()

    def link_lost(self) -> None:
        """Assume that the worker is gone: close the other link too and start reconnecting."""
        if not self.lost:
            self.lost = True
            self.stats.losses += not self.retired
            if asyncio.get_running_loop().time() - self._connected_at > RECONNECT_MAX_S:
                self._reconnect_pause_s = (
                    RECONNECT_FIRST_S  # else the backoff goes on: the worker keeps closing its links
                )
            for link in self._links:
                if link is not None:
                    link.abort()
            self.reconnect_if_lost()

    def reconnect_if_lost(self) -> None:
        """Start reconnecting to a lost worker, unless that is under way."""
        if self.lost and not self.retired and (self._reconnecting is None or self._reconnecting.done()):
            self._reconnecting = asyncio.create_task(
                self._reconnect(), name=f"reconnect to a worker of {self.instance}"
            )

    def _close_when_idle(self) -> None:
        if self.outstanding_calls == 0:
            for link in self._links:
                if link is not None:
                    link.close()

    async def _when_ready(
        self, bulk: bool, cost: int, flags: Flag, timeout_s: float | None
    ) -> tuple[WorkerLink, float | None]:
        """The connected link with `cost` taken from its budget, and the remaining time."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            async with asyncio.timeout(timeout_s):
                link = self._links[bulk] or await self._connect(bulk)
                if flags & Flag.WAIT:
                    await link.budget.take(cost)
                elif not link.budget.try_take(cost):
                    raise Overloaded(
                        f"Instance '{self.instance}' is overloaded: {link.calls_in_flight} calls in flight"
                    )
        except TimeoutError:
            raise DeadlineExceeded from None
        return link, None if timeout_s is None else timeout_s - (loop.time() - began)

    async def _connect(self, bulk: bool) -> WorkerLink:
        limit_s = self._limits.connect_timeout_s
        try:
            async with asyncio.timeout(limit_s), self._connecting:
                return self._links[bulk] or await self._open(bulk)
        except TimeoutError:
            raise Unavailable(f"Failed to connect to backend: no answer within {limit_s:g} s") from None

    async def _open(self, bulk: bool) -> WorkerLink:
        if self.lost:
            raise self.unavailable()
        try:
            link = self._links[bulk] = await self._new_link()
        except OSError as error:
            if isinstance(error, _GONE):
                self.link_lost()
            raise Unavailable(f"Failed to connect to backend: {error.strerror or error}") from error
        if self.lost:  # closed meanwhile
            link.abort()
        return link

    async def _new_link(self) -> WorkerLink:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: WorkerLink(self, self._limits), self.endpoint.socket)
        self._connected_at = loop.time()
        self.stats.connects += 1
        return link

    async def _reconnect(self) -> None:
        """Reconnect with exponential backoff; give up once no process listens."""
        while self.lost:
            await asyncio.sleep(self._reconnect_pause_s)
            self._reconnect_pause_s = min(RECONNECT_MAX_S, self._reconnect_pause_s * 2)
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s), self._connecting:
                    for link in self._links:
                        if link is not None:
                            await link.closed  # else its late loss would be taken for that of the new link
                    link = await self._new_link()
                    self._links = [link, None]
                    self.lost = not link.is_open
            except _GONE:
                return
            except OSError:  # TimeoutError is one of them
                continue
