"""Replicas on other hosts: links over mutual TLS, replaced without a gap before a certificate expires.

`MeteredReplica` charges and counts calls in this process, also those to a worker of this host.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from teimgr.errors import TeimgrError, Unavailable
from teimgr.http.byte_budget import ByteBudget
from teimgr.observability.request_context import CURRENT
from teimgr.spec import WorkerEndpoint
from teimgr.wire.fleet_tls import FleetIdentity
from teimgr.wire.frames import FrameType, Header, Method, Payload, Received
from teimgr.wire.remote_frames import RemoteAddress, RemoteFrames, connect
from teimgr.wire.routing.links import LinkLimits, LinkStats, PendingCall, Replica, WorkerLink
from teimgr.wire.tenants.remote import EntryDesk, Meters

log = logging.getLogger(__name__)

_RENEW_AT = 0.75
"""A link is replaced after this part of its validity."""
_RENEW_RETRY_S = 5.0
_MIN_RENEWAL_S = 1.0
_LEAVE_POLL_S = 1.0
_HELLO_ID = 0  # calls count from 1


class MeteredLink(WorkerLink):
    """A connection whose calls are charged and counted in this process, after `charge_by`.

    If a `leaving` link closes, the worker is not lost: the link has no calls left.
    """

    leaving = False
    _desk: EntryDesk | None = None
    _greeted: asyncio.Future[bool] | None = None

    def charge_by(self, meters: Meters, model: str, *, is_heard: bool = True) -> None:
        """Charge and count its calls by these; `is_heard`: the worker takes part in it."""
        self._desk = EntryDesk(meters, self.owner.instance, model, self.send, is_heard=is_heard)

    async def is_heard(self) -> bool:
        """True if a worker of this host understands TENANT frames; an earlier version also refuses this HELLO."""
        self._greeted = self._loop.create_future()
        self.send(FrameType.REQUEST, Method.HELLO, _HELLO_ID)
        return await self._greeted

    def request(
        self, method: Method, payload: Payload, flags: int, timeout_s: float | None, cost_bytes: int, before: bytes
    ) -> PendingCall:
        if self._desk is not None and self.is_open and (context := CURRENT.get()) is not None:
            try:
                self._desk.introduce(context.tenant)
            except BaseException:
                self.budget.give_back(cost_bytes)
                raise
        return super().request(method, payload, flags, timeout_s, cost_bytes, before)

    def frame_received(self, header: Header, payload: Received) -> None:
        if header.type == FrameType.TENANT:
            if self._desk is not None:
                self._desk.received(header, payload)
        elif header.id == _HELLO_ID:
            if self._greeted is not None and not self._greeted.done():
                self._greeted.set_result(header.type == FrameType.REPLY)
        else:
            super().frame_received(header, payload)

    def link_lost(self, error: Exception | None) -> None:
        if self.leaving:
            self.end_calls()
        else:
            super().link_lost(error)

    def end_calls(self) -> None:
        if self._greeted is not None and not self._greeted.done():
            self._greeted.set_exception(ConnectionResetError("the worker closed the link"))
        if self._desk is not None:
            self._desk.close()
            self._desk = None  # breaks the cycle of desk and link
        super().end_calls()


class MeteredReplica(Replica):
    """One incarnation of a worker of this host that has no table: this process charges and counts its calls."""

    def __init__(
        self,
        instance: str,
        endpoint: WorkerEndpoint,
        limits: LinkLimits,
        stats: LinkStats,
        waiting: ByteBudget,
        meters: Meters,
        model: str,
    ) -> None:
        super().__init__(instance, endpoint, limits, stats, waiting)
        self._meters = meters
        self._model = model

    async def _new_link(self) -> WorkerLink:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_unix_connection(lambda: MeteredLink(self, self._limits), self.endpoint.socket)
        try:
            link.charge_by(self._meters, self._model, is_heard=await link.is_heard())
        except BaseException:
            link.leaving = True
            link.abort()
            raise
        self._count_connect()
        return link


class RemoteLink(RemoteFrames, MeteredLink):
    """A connection of a replica on another host."""

    async def prove(self, address: RemoteAddress, identity: FleetIdentity) -> None:
        try:
            await super().prove(address, identity)
        except asyncio.CancelledError:
            self.leaving = not self.owner.is_closed  # the replica still has its other link
            raise


class RemoteReplica(Replica):
    """One incarnation of a worker on another host.

    A reconnect may reach another process on the same address. HELLO then refuses it, and the replica is closed as if
    its process had exited. Any other failure, such as a cut network, is retried for as long as the route exists.
    """

    _gone = (ConnectionRefusedError,)  # includes WrongPeer; a reset may come from a device in between
    is_remote = True

    def __init__(
        self,
        instance: str,
        endpoint: WorkerEndpoint,
        limits: LinkLimits,
        stats: LinkStats | None = None,
        waiting: ByteBudget | None = None,
        identity: FleetIdentity | None = None,
        meters: Meters | None = None,
        model: str = "",
    ) -> None:
        super().__init__(instance, endpoint, limits, stats, waiting)
        self._identity = identity
        self._meters = meters
        self._model = model
        self._address = RemoteAddress.parse(endpoint.address, endpoint.node, endpoint.incarnation)
        self._problem = ""
        self._leaving: set[RemoteLink] = set()
        self._renewals: dict[RemoteLink, asyncio.TimerHandle] = {}
        self._renewing: set[asyncio.Task[None]] = set()

    @property
    def is_closed(self) -> bool:
        return super().is_closed and not self._renewing

    def retire(self) -> None:
        self._end_timers()
        super().retire()

    async def close(self) -> None:
        self._end_timers()
        for task in self._renewing:
            task.cancel()
        if self._renewing:
            await asyncio.wait(self._renewing)
        await super().close()

    async def _new_link(self) -> WorkerLink:
        loop = asyncio.get_running_loop()
        try:
            if self._identity is None:
                raise Unavailable("this process has no identity in the fleet")
            link = await connect(lambda: RemoteLink(self, self._limits), self._address, self._identity)
        except (OSError, TeimgrError) as error:
            self._report(reason := str(error) or type(error).__name__)
            if isinstance(error, TeimgrError):  # a fault of this node, such as unreadable files, not of the caller
                raise Unavailable(f"Failed to connect to backend: {reason}") from error
            raise
        if self._meters is not None:
            link.charge_by(self._meters, self._model)
        self._problem = ""
        self._count_connect()
        pause_s = max(_MIN_RENEWAL_S, link.valid_s * _RENEW_AT)
        self._renewals[link] = loop.call_later(pause_s, self._begin_renewal, link)
        return link

    def _report(self, problem: str) -> None:
        """Log why the link is down, once per reason, since reconnects go on for as long as the network is cut."""
        if problem != self._problem:
            facts: dict[str, Any] = {"instance": self.instance, **self._address._asdict(), "reason": problem}
            log.warning("no link to a worker on another host", extra=facts)
        self._problem = problem

    def _open_links(self) -> list[WorkerLink]:
        return [*super()._open_links(), *self._leaving]

    def _begin_renewal(self, link: RemoteLink) -> None:
        del self._renewals[link]
        if link in self._links and not self.retired and link.is_open:
            task = asyncio.create_task(self._renew(link), name=f"renewal of a link to {self.instance}")
            self._renewing.add(task)
            task.add_done_callback(self._renewing.discard)

    async def _renew(self, link: RemoteLink) -> None:
        """Replace a link with one made with the current certificates; calls in flight finish on the old link."""
        try:
            async with asyncio.timeout(self._limits.connect_timeout_s):
                fresh = await self._new_link()
        except (OSError, TeimgrError):
            loop = asyncio.get_running_loop()
            self._renewals[link] = loop.call_later(_RENEW_RETRY_S, self._begin_renewal, link)
            return
        if self.lost or self.retired or link not in self._links:
            fresh.abort()
            return
        link.leaving = True
        self._leaving.add(link)
        self._links[self._links.index(link)] = fresh
        try:
            while link.is_open:
                # Calls that waited for room on the old link are sent on it within this pass of the loop.
                is_idle = link.calls_in_flight == 0
                await asyncio.wait({link.closed}, timeout=_LEAVE_POLL_S)
                if is_idle and link.calls_in_flight == 0:
                    link.close()
                    break
        finally:
            self._leaving.discard(link)
            if link.is_open:
                link.abort()

    def _end_timers(self) -> None:
        for timer in self._renewals.values():
            timer.cancel()
        self._renewals.clear()
