"""Budgets shared by calls on one event loop: bytes in memory (FIFO semaphores) and places."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Hashable
from contextlib import suppress

from teimgr.errors import Overloaded

# A body slower than this loses its reservation to waiting calls, checked every `_RECLAIM_S`.
_BYTES_PER_S = 2**20
_RECLAIM_S = 0.1


class ByteBudget:
    """FIFO semaphore over bytes: at most `limit_bytes` are taken, but a single taker always fits.

    FIFO order prevents starvation of large takers. Taken bytes also count against `parent`.
    """

    def __init__(self, limit_bytes: int, parent: ByteBudget | None = None) -> None:
        self.taken_bytes = 0
        self.limit_bytes = limit_bytes
        self._parent = parent
        self._idle_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, bool]] = deque()
        self._arriving: dict[Charge, None] = parent._arriving if parent is not None else {}
        self._timer: asyncio.TimerHandle | None = None  # set while calls wait

    @property
    def is_over(self) -> bool:
        """True if more is taken than the limit, or than a parent's limit."""
        return self.taken_bytes > self.limit_bytes or (self._parent is not None and self._parent.is_over)

    def fits(self, count: int) -> bool:
        """True if `count` more bytes are within the limit and the parents' limits, or nothing else is taken."""
        return self._fits(count) and (self._parent is None or self._parent.fits(count))

    def try_take(self, count: int) -> bool:
        """Take `count` bytes if they fit now and nothing waits."""
        if self._waiting or not self._fits(count):
            return False
        if self._parent is not None and not self._parent.try_take(count):
            return False
        self.taken_bytes += count
        return True

    async def take(self, count: int, *, exceeds: bool = False) -> None:
        """Wait until `count` bytes fit, and take them; with `exceeds` also beyond the limit if all that is taken
        belongs to callers that wait for more, which would wait for each other."""
        if self.try_take(count):
            return
        await self._take_own(count, exceeds)
        if self._parent is not None:
            try:
                await self._parent.take(count, exceeds=exceeds)
            except BaseException:
                self._give_back_own(count)
                raise

    def charge(self, count: int) -> None:
        """Take `count` bytes that are in memory already, whether or not they fit."""
        self.taken_bytes += count
        if self._parent is not None:
            self._parent.charge(count)

    def give_back(self, count: int) -> None:
        """Return taken bytes, which lets the next waiters that fit proceed."""
        self._give_back_own(count)
        if self._parent is not None:
            self._parent.give_back(count)

    def add_idle(self, count: int) -> None:
        """Count taken bytes that wait for more to be taken; a negative `count` for those that no longer do."""
        self._idle_bytes += count
        if self._parent is not None:
            self._parent.add_idle(count)
        self._serve()

    async def _take_own(self, count: int, exceeds: bool = False) -> None:
        if not self._waiting and self._fits(count, exceeds):
            self.taken_bytes += count
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (granted, count, exceeds)
        self._waiting.append(waiter)
        try:
            self._reclaim()
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back_own(count)
            else:
                with suppress(ValueError):  # already removed by `_serve`
                    self._waiting.remove(waiter)
                self._serve()
            raise

    def _reclaim(self) -> None:
        """Give waiters the bytes that are reserved for bodies that arrive too slowly, repeatedly while they wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = time.monotonic()
        for charge in [one for one in self._arriving if one.is_late(now)]:
            charge.give_up_reserve()
        if self._waiting:
            self._timer = asyncio.get_running_loop().call_later(_RECLAIM_S, self._reclaim)

    def _give_back_own(self, count: int) -> None:
        self.taken_bytes -= count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            granted, count, exceeds = self._waiting[0]
            if not granted.cancelled():
                if not self._fits(count, exceeds):
                    return
                self.taken_bytes += count
                granted.set_result(None)
            self._waiting.popleft()

    def _fits(self, count: int, exceeds: bool = False) -> bool:
        is_alone = self.taken_bytes == (self._idle_bytes if exceeds else 0)
        return is_alone or self.taken_bytes + count <= self.limit_bytes


class Shares:
    """Shares of a budget, one per sharer, each with a limit, so that one sharer leaves room for others."""

    def __init__(self, of_all: ByteBudget, share: int) -> None:
        self._of_all = of_all
        self._limit_bytes = of_all.limit_bytes // share
        self._parts: dict[Hashable, tuple[ByteBudget, int]] = {}  # with the number of charges

    def charge(self, sharer: Hashable) -> Charge:
        """Make a charge to the part of `sharer`, which its release gives back."""
        part, users = self._parts.get(sharer) or (ByteBudget(self._limit_bytes, self._of_all), 0)
        self._parts[sharer] = part, users + 1
        return _PartCharge(part, self, sharer)

    def leave(self, sharer: Hashable) -> None:
        """Called by released charges."""
        part, users = self._parts.pop(sharer)
        if users > 1:
            self._parts[sharer] = part, users - 1


def leaves_as_much(own: int, left: int) -> bool:
    """True if a caller that holds `own` of something bounded may take more, if `left` is free after that.

    It takes at most as much as it leaves: half, if no other has any. So callers, however many, leave room for another.
    """
    return own <= left


class Places:
    """A limited number of places, given by the rule of `leaves_as_much`."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._taken: dict[Hashable, int] = {}

    def take(self, caller: Hashable) -> bool:
        """Take a place, which `leave` gives back; False if the caller may not have more."""
        taken = self._taken.get(caller, 0)
        if not leaves_as_much(taken, self._left - 1):
            return False
        self._taken[caller] = taken + 1
        self._left -= 1
        return True

    def leave(self, caller: Hashable) -> None:
        self._left += 1
        self._taken[caller] -= 1
        if not self._taken[caller]:
            del self._taken[caller]


class UnreadReplies(ByteBudget):
    """Unread reply bytes of one connection, part of a limit for all connections.

    Replies are already in memory, so they are charged even beyond the limit. Then the connection's next calls wait
    until its client has read, so clients that read never wait for clients that do not.
    """

    def __init__(self, of_all: ByteBudget, share: int) -> None:
        super().__init__(of_all.limit_bytes // share, of_all)
        self._of_all = of_all

    @property
    def has_room(self) -> bool:
        """True if another call may begin: its client has read all, or these and those of all connections fit."""
        return self.taken_bytes == 0 or not self.is_over

    async def room(self, wait_s: float) -> None:
        """Wait at most `wait_s` until `has_room`; if all connections exceed their limit, until the client has read all.

        Raises:
            Overloaded: the client did not read.
        """
        count = self.limit_bytes if self._of_all.is_over else 0
        try:
            async with asyncio.timeout(wait_s):
                await self._take_own(count)
        except TimeoutError:
            raise Overloaded("Too many unread reply bytes on this connection; read them and try again") from None
        self._give_back_own(count)


class Charge:
    """The bytes that one call has taken from a budget, released together."""

    __slots__ = ("_arrived", "_budget", "_since", "bytes", "reserved_bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.reserved_bytes = self._arrived = (
            0  # announced bytes that have not arrived, and those that have since `_since`
        )
        self._since = 0.0
        self.bytes = 0

    async def take(self, count: int, wait_s: float, *, exceeds: bool = False) -> None:
        """Take `count` more bytes, waiting at most `wait_s`; for `exceeds` see `ByteBudget.take`.

        Raises:
            Overloaded: the budget stayed exhausted.
        """
        if not self.try_take(count):
            idle = self.bytes
            self._budget.add_idle(idle)
            try:
                async with asyncio.timeout(wait_s):
                    await self._budget.take(count, exceeds=exceeds)
            except TimeoutError:
                raise Overloaded from None
            finally:
                self._budget.add_idle(-idle)
            self.bytes += count

    def try_take(self, count: int) -> bool:
        """Take `count` more bytes if they fit now and nothing waits."""
        if not self._budget.try_take(count):
            return False
        self.bytes += count
        return True

    def add(self, count: int) -> None:
        """Take `count` bytes that are in memory already."""
        self._budget.charge(count)
        self.bytes += count

    async def reserve(self, count: int, wait_s: float) -> None:
        """Take `count` bytes that are still to arrive; while they arrive slowly, others get the rest.

        Raises:
            Overloaded: the budget stayed exhausted.
        """
        self.give_up_reserve()
        await self.take(count, wait_s, exceeds=True)
        self.reserved_bytes, self._arrived, self._since = count, 0, time.monotonic()
        self._budget._arriving[self] = None

    async def arrived(self, count: int, wait_s: float) -> None:
        """Take `count` bytes that have arrived, from what is reserved as far as it goes.

        Raises:
            Overloaded: the budget stayed exhausted.
        """
        self._arrived += count
        reserved = min(count, self.reserved_bytes)
        self.reserved_bytes -= reserved
        if count > reserved:
            await self.take(count - reserved, wait_s)

    def is_late(self, now: float) -> bool:
        """True if less has arrived since `reserve` than should have by `now`, a `time.monotonic` value."""
        return self._arrived < (now - self._since) * _BYTES_PER_S

    def give_up_reserve(self) -> None:
        """Give back the bytes that have not arrived."""
        self._budget._arriving.pop(self, None)
        count, self.reserved_bytes = self.reserved_bytes, 0
        if count:
            self.bytes -= count
            self._budget.give_back(count)

    def release(self) -> None:
        """Give everything back."""
        self._budget._arriving.pop(self, None)
        self.reserved_bytes = 0
        if self.bytes:
            self._budget.give_back(self.bytes)
            self.bytes = 0


class _PartCharge(Charge):
    """A charge to one part of shares, until its release."""

    __slots__ = ("_sharer", "_shares")

    def __init__(self, budget: ByteBudget, shares: Shares, sharer: Hashable) -> None:
        super().__init__(budget)
        self._shares: Shares | None = shares
        self._sharer = sharer

    def release(self) -> None:
        super().release()
        if self._shares is not None:
            self._shares.leave(self._sharer)
            self._shares = None
