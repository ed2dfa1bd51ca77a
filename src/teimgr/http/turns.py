"""Does a few things in each turn of the event loop, so that many together never hold it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class Rotation(Generic[ItemT]):
    """Items of callers, popped by callers in rotation."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, deque[ItemT]] = OrderedDict()  # by caller, the next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, caller: Hashable, item: ItemT) -> None:
        self._queues.setdefault(caller, deque()).append(item)
        self._count += 1

    def pop(self) -> ItemT:
        """The next item; raises KeyError if empty."""
        caller, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[caller] = queue  # behind the others
        self._count -= 1
        return item


class Turns:
    """`per_turn` callers of `begin` go on in each turn of the loop; the others in later turns, by callers in rotation.

    For one event loop at a time.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: Rotation[asyncio.Future[None]] = Rotation()
        self._loop: asyncio.AbstractEventLoop | None = None  # the one in which the next turn is scheduled

    async def begin(self, caller: Hashable) -> None:
        """Return when `caller` may go on: at once unless this turn is used up or others wait."""
        if self._left and not self._waiting:
            self._left -= 1
            self._schedule()
            return
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(caller, begins)
        self._schedule()
        await begins

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._loop, self._left = None, self._per_turn
        while self._left and self._waiting:
            begins = self._waiting.pop()
            if not begins.done():  # else its client has gone
                begins.set_result(None)
                self._left -= 1
        if self._waiting:
            self._schedule()


class CallTurns:
    """Makes `per_turn` calls in each turn of the event loop; further ones in later turns, by callers in rotation.

    For one event loop.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: Rotation[Callable[[], object]] = Rotation()
        self._is_scheduled = False

    def call(self, caller: Hashable, function: Callable[[], object]) -> bool:
        """Call `function` in a later turn and return True, or return False: the caller may do so now."""
        is_now = bool(self._left) and not self._waiting
        if is_now:
            self._left -= 1
        else:
            self._waiting.put(caller, function)
        self._schedule()
        return not is_now

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_scheduled = False
        called = min(self._per_turn, len(self._waiting))
        self._left = self._per_turn - called
        if called:
            self._schedule()
        for _ in range(called):
            self._waiting.pop()()
