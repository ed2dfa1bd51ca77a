"""Budgets of bytes in memory, shared by calls: FIFO semaphores for one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress

from teimgr.errors import Overloaded


class ByteBudget:
    """FIFO semaphore over bytes: at most `limit_bytes` taken at a time, except that a single taker always fits.

    FIFO order keeps a large waiter from starving. What is taken counts against `parent` too, where there is one.
    """

    def __init__(self, limit_bytes: int, parent: ByteBudget | None = None) -> None:
        self.taken_bytes = 0
        self.limit_bytes = limit_bytes
        self._parent = parent
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    def try_take(self, count: int) -> bool:
        """Take `count` bytes if they fit now and nothing waits."""
        if self._waiting or not self._fits(count):
            return False
        if self._parent is not None and not self._parent.try_take(count):
            return False
        self.taken_bytes += count
        return True

    async def take(self, count: int) -> None:
        """Wait until `count` bytes fit, and take them."""
        if self.try_take(count):
            return
        await self._take_own(count)
        if self._parent is not None:
            try:
                await self._parent.take(count)
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

    async def _take_own(self, count: int) -> None:
        if not self._waiting and self._fits(count):
            self.taken_bytes += count
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (granted, count)
        self._waiting.append(waiter)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._give_back_own(count)
            else:
                with suppress(ValueError):  # `_serve` has dropped it
                    self._waiting.remove(waiter)
                self._serve()
            raise

    def _give_back_own(self, count: int) -> None:
        self.taken_bytes -= count
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            granted, count = self._waiting[0]
            if not granted.cancelled():  # else its task has not run since
                if not self._fits(count):
                    return
                self.taken_bytes += count
                granted.set_result(None)
            self._waiting.popleft()

    def _fits(self, count: int) -> bool:
        return self.taken_bytes == 0 or self.taken_bytes + count <= self.limit_bytes


class UnreadReplies(ByteBudget):
    """The bytes of replies that the client of one connection has not read, a part of those of all connections.

    Replies are in memory already, so they are charged whether or not they fit. Where they do not, no more calls of the
    connection begin until its client has read: those of clients that read theirs never wait for those that do not.
    """

    def __init__(self, of_all: ByteBudget, share: int) -> None:
        super().__init__(of_all.limit_bytes // share, of_all)
        self._of_all = of_all

    @property
    def has_room(self) -> bool:
        """Whether another call may begin: its client has read all, or these and those of all connections fit."""
        return self.taken_bytes == 0 or (self._fits(0) and self._of_all._fits(0))

    async def room(self, wait_s: float) -> None:
        """Wait at most `wait_s` until `has_room`; where those of all exceed their limit, until the client has read all.

        Raises:
            Overloaded: the client did not read.
        """
        count = 0 if self._of_all._fits(0) else self.limit_bytes
        try:
            async with asyncio.timeout(wait_s):
                await self._take_own(count)
        except TimeoutError:
            raise Overloaded("Too many bytes of replies on this connection are not read; try again later") from None
        self._give_back_own(count)


class Charge:
    """The bytes that one call has taken from a budget, given back together."""

    __slots__ = ("_budget", "bytes")

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.bytes = 0

    async def take(self, count: int, wait_s: float) -> None:
        """Take `count` bytes more, waiting at most `wait_s`.

        Raises:
            Overloaded: the budget stayed exhausted.
        """
        if not self.try_take(count):
            try:
                async with asyncio.timeout(wait_s):
                    await self._budget.take(count)
            except TimeoutError:
                raise Overloaded from None
            self.bytes += count

    def try_take(self, count: int) -> bool:
        """Take `count` bytes more if they fit now and nothing waits."""
        if not self._budget.try_take(count):
            return False
        self.bytes += count
        return True

    def add(self, count: int) -> None:
        """Take `count` bytes that are in memory already."""
        self._budget.charge(count)
        self.bytes += count

    def release(self) -> None:
        """Give everything back."""
        if self.bytes:
            self._budget.give_back(self.bytes)
            self.bytes = 0
