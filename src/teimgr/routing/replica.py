"""One replica of an instance, as its callers see it: two links to its worker, and how busy it is."""

from __future__ import annotations

import asyncio

from teimgr.directory import WorkerEndpoint
from teimgr.errors import DeadlineExceeded, Overloaded, Unavailable
from teimgr.routing.links import CALL_BYTES, LinkLimits, LinkStats, PendingCall, WorkerLink, too_large
from teimgr.wire.frames import Flag, Method
from teimgr.wire.stream import Payload

SEARCH_FIRST_S = 0.05
SEARCH_MAX_S = 5.0
# Nobody listens there. Any other refusal, such as a full backlog or too many open files, says nothing of the worker.
_GONE = (ConnectionRefusedError, ConnectionResetError, FileNotFoundError)


class Replica:
    """One incarnation of a worker, over one link for small calls and one for bulk: no text waits behind an Arrow batch.

    The links connect when first needed. Once either is lost both are, and the replica takes no calls until a search has
    found its worker alive. A socket belongs to one incarnation, so what answers there is never another one.
    """

    def __init__(
        self, instance: str, endpoint: WorkerEndpoint, limits: LinkLimits, traffic: LinkStats | None = None
    ) -> None:
        self.endpoint = endpoint
        self.traffic = traffic or LinkStats()
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
        self._search: asyncio.Task[None] | None = None
        self._search_pause_s = SEARCH_FIRST_S

    @property
    def usable(self) -> bool:
        """Whether a new call may be put on these links."""
        return not (self.lost or self.retired)

    @property
    def is_closed(self) -> bool:
        """Whether no socket is left open, nor will be."""
        searching = self._search is not None and not self._search.done()
        return not searching and all(link is None or link.closed.done() for link in self._links)

    async def start(self, method: Method, payload: Payload, flags: Flag, timeout_s: float | None) -> PendingCall:
        """Put a request on the link of its lane, waiting for the connection, and with `Flag.WAIT` for room.

        Raises:
            TooLarge: the payload is over the message limit.
            Overloaded: too many bytes are under way and the call may not wait.
            Unavailable: the worker cannot be reached.
            DeadlineExceeded: `timeout_s` passed while waiting.
        """
        size = len(payload)
        if size > self._limits.max_message_bytes:
            raise too_large("Request", size, self._limits.max_message_bytes)
        bulk = bool(flags & Flag.BULK)
        cost = size + CALL_BYTES
        self._begin(cost)
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
        if self._search is not None:
            self._search.cancel()
        self._close_when_idle()

    async def close(self) -> None:
        """Close now, failing what is in flight, and wait until the sockets are gone."""
        self.retired = self.lost = True
        if self._search is not None:
            self._search.cancel()
            await asyncio.wait({self._search})
        links = [link for link in self._links if link is not None]
        for link in links:
            link.abort()
        for link in links:
            await link.closed

    def unavailable(self) -> Unavailable:
        """What a caller is told when the links are gone."""
        return Unavailable(f"Instance '{self.instance}' lost its worker: the connection closed")

    def call_ended(self, cost_bytes: int) -> None:
        """A call is answered, given up or failed; called once for each."""
        self.outstanding_bytes -= cost_bytes
        self.outstanding_calls -= 1
        if self.retired:
            self._close_when_idle()

    def link_lost(self) -> None:
        """One link is gone, and with it, as far as we know, the worker: the other is closed too."""
        if not self.lost:
            self.lost = True
            self.traffic.losses += not self.retired
            if asyncio.get_running_loop().time() - self._connected_at > SEARCH_MAX_S:
                self._search_pause_s = SEARCH_FIRST_S  # one that keeps closing its links is asked less and less often
            for link in self._links:
                if link is not None:
                    link.abort()
            self.look_again()

    def look_again(self) -> None:
        """Begin to find out whether a lost worker lives, unless that is under way; the replica is usable if it does."""
        if self.lost and not self.retired and (self._search is None or self._search.done()):
            self._search = asyncio.create_task(self._find(), name=f"search for a worker of {self.instance}")

    def _begin(self, cost_bytes: int) -> None:
        self.outstanding_bytes += cost_bytes
        self.outstanding_calls += 1
        self.calls += 1

    def _close_when_idle(self) -> None:
        if self.outstanding_calls == 0:
            for link in self._links:
                if link is not None:
                    link.close()

    async def _when_ready(
        self, bulk: bool, cost: int, flags: Flag, timeout_s: float | None
    ) -> tuple[WorkerLink, float | None]:
        """The connected link with `cost` granted, and what is left of the time."""
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
        self.traffic.connects += 1
        return link

    async def _find(self) -> None:
        """Connect to a lost worker again; give up once it is certain that nobody listens."""
        while self.lost:
            await asyncio.sleep(self._search_pause_s)
            self._search_pause_s = min(SEARCH_MAX_S, self._search_pause_s * 2)
            try:
                async with asyncio.timeout(self._limits.connect_timeout_s), self._connecting:
                    await self._reconnect()
            except _GONE:
                return
            except OSError:  # TimeoutError is one of them
                continue

    async def _reconnect(self) -> None:
        for link in self._links:
            if link is not None:
                await link.closed  # so that its end is not taken for that of its successor
        fresh = await self._new_link()
        self._links = [fresh, None]
        self.lost = not fresh.is_open
