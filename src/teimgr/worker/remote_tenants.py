"""The worker's end of quotas between hosts: the host that admitted a caller charges and counts its jobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from teimgr.engine.job import Decided, Share
from teimgr.errors import TeimgrError, Unavailable
from teimgr.wire.frames import FrameType, Header, Received, unpack_error
from teimgr.wire.tenants.remote import CHARGE, COUNT, SETTLE, SHADOWED, TERMS, Note
from teimgr.wire.tenants.table import COUNTERS, Counter

_LOST = "The link to the host that admitted the call was lost"


class RemoteStanding:
    """A tenant's limits, from the TERMS of the other host."""

    __slots__ = ("_meter", "has_quota", "share")

    def __init__(self, meter: RemoteMeter, share: Share, *, has_quota: bool) -> None:
        self._meter = meter
        self.share = share
        self.has_quota = has_quota

    def refuses(self, least: int) -> TeimgrError | None:
        """Always None: the other host decides once, when the tokens are known."""
        return None

    def open_account(self) -> RemoteAccount:
        return RemoteAccount(self._meter, self.share.tenant)


class RemoteMeter:
    """The tenants that call over one link from another host. For the loop's thread; `send` is the link's method."""

    def __init__(self, send: Callable[..., None]) -> None:
        self.loop = asyncio.get_running_loop()
        self._send: Callable[..., None] | None = send  # None after the link is lost
        self._standings: dict[int, RemoteStanding] = {}
        self._asked: dict[int, RemoteAccount] = {}
        self._last = 0

    def knows(self, tenant: int) -> bool:
        """True if the other host charges and counts for a tenant; it has no table otherwise."""
        return tenant in self._standings

    def standing(self, tenant: int) -> RemoteStanding:
        """Return the standing of a known tenant."""
        return self._standings[tenant]

    def count(self, tenant: int, counter: Counter, by: int = 1) -> None:
        counts = [0] * COUNTERS
        counts[counter] = by
        self._count(tenant, counts)

    def answered(self, tenant: int, tokens: int, texts: int, calls: int) -> None:
        """Count a call that is answered with results."""
        self._count(tenant, [tokens, texts, calls, 0, 0])

    def received(self, header: Header, payload: Received) -> None:
        if header.method == Note.TERMS:
            tenant, weight, priority, has_quota = TERMS.unpack(payload)
            share = Share(tenant, max(1, weight), priority)
            self._standings[tenant] = RemoteStanding(self, share, has_quota=bool(has_quota))
        elif header.method == Note.CHARGED and (account := self._asked.pop(header.id, None)) is not None:
            refusal = unpack_error(payload, header.deadline_ms) if payload else None
            account.decide(refusal, is_shadowed=bool(header.flags & SHADOWED))

    def ask(self, account: RemoteAccount, tenant: int, tokens: int) -> int:
        """Send a charge and return its number; `account` gets the decision."""
        if self._send is None:
            account.decide(Unavailable(_LOST))
            return 0
        self._last += 1
        self._asked[self._last] = account
        self._send(FrameType.TENANT, Note.CHARGE, self._last, CHARGE.pack(tenant, tokens))
        return self._last

    def settle(self, number: int, computed: int) -> None:
        if self._send is not None:
            self._send(FrameType.TENANT, Note.SETTLE, number, SETTLE.pack(computed))

    def close(self) -> None:
        """Drop all waiting decisions: the link is lost and its calls are cancelled."""
        self._send = None
        asked, self._asked = self._asked, {}
        for account in asked.values():
            account.decide(Unavailable(_LOST))

    def _count(self, tenant: int, counts: list[int]) -> None:
        if self._send is not None and self.knows(tenant):
            self._send(FrameType.TENANT, Note.COUNT, 0, COUNT.pack(tenant, *counts))


class RemoteAccount:
    """The charge of one job by another host: `charge` once its tokens are known, `settle` when it is over.

    Both may be called on any thread; the loop's thread does their work, in order.
    """

    __slots__ = ("_decided", "_is_over", "_is_settled", "_meter", "_number", "_taken", "_tenant", "is_shadowed")
    decides_later = True

    def __init__(self, meter: RemoteMeter, tenant: int) -> None:
        self.is_shadowed = False  # whether only `shadow` prevented a refusal
        self._meter = meter
        self._tenant = tenant
        self._number = self._taken = 0
        self._decided: Decided | None = None
        self._is_settled = self._is_over = False

    def charge(self, tokens: int, later: Decided | None = None) -> None:
        """Ask for the job's charge; `later` gets the decision, on the loop's thread."""
        self._meter.loop.call_soon_threadsafe(self._begin, tokens, later)

    def decide(self, refusal: TeimgrError | None, *, is_shadowed: bool = False) -> None:
        """Take the other host's decision; on the loop's thread."""
        self.is_shadowed = is_shadowed
        if refusal is not None:
            self._number = 0  # nothing to settle
        decided, self._decided = self._decided, None
        if decided is not None:
            decided(refusal)

    def took(self, tokens: int) -> None:
        """Count the job's tokens that are in a batch. By one thread at a time."""
        self._taken += tokens

    def settle(self, computed: int | None) -> None:
        """End the charge: refund tokens that were not `computed`, None: not taken. No-op the second time."""
        if not self._is_settled:
            self._is_settled = True
            self._meter.loop.call_soon_threadsafe(self._end, computed)

    def _begin(self, tokens: int, later: Decided | None) -> None:
        self._decided = later
        if self._is_over:  # the caller has left meanwhile
            self.decide(None)
        else:
            self._number = self._meter.ask(self, self._tenant, tokens)

    def _end(self, computed: int | None) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._number:
            self._meter.settle(self._number, self._taken if computed is None else computed)
            self._number = 0
