"""Does a few things in each turn of the event loop, so that many together never hold it."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

from teimgr.errors import Overloaded

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

    def waiting_of(self, caller: Hashable) -> int:
        """How many items of `caller` are to be popped."""
        return len(self._queues.get(caller, ()))

    def pop(self) -> ItemT:
        """The next item; raises KeyError if empty."""
        caller, queue = self._queues.popitem(last=False)
        item = queue.popleft()
        if queue:
            self._queues[caller] = queue  # behind the others
        self._count -= 1
        return item


class CallTurns:
    """Makes `per_turn` calls in each turn of the event loop; further ones in later turns, by callers in rotation.

    For one event loop at a time.
    """

    def __init__(self, per_turn: int) -> None:
        self._per_turn = self._left = per_turn
        self._waiting: Rotation[Callable[[], object]] = Rotation()
        self._loop: asyncio.AbstractEventLoop | None = None  # the one in which the next turn is scheduled

    def call(self, caller: Hashable, function: Callable[[], object]) -> bool:
        """Call `function` in a later turn and return True, or return False: the caller may do so now.

        A call that returns False is not counted.
        """
        is_now = self._left > 0 and not self._waiting
        if is_now:
            self._left -= 1
        else:
            self._waiting.put(caller, function)
        self._schedule()
        return not is_now

    def waiting_of(self, caller: Hashable) -> int:
        """How many functions of `caller` are to be called in later turns."""
        return self._waiting.waiting_of(caller)

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._loop, self._left = None, self._per_turn
        if self._waiting:
            self._schedule()
        while self._left > 0 and self._waiting:
            if self._waiting.pop()() is not False:
                self._left -= 1


class Turns:
    """`per_turn` callers of `begin` go on in each turn of the loop; the others in later turns, by callers in rotation.

    For one event loop at a time. Without `max_waiting` any number of calls of a caller may wait.
    """

    def __init__(self, per_turn: int, max_waiting: int | None = None) -> None:
        self._calls = CallTurns(per_turn)
        self._max_waiting = max_waiting

    async def begin(self, caller: Hashable) -> None:
        """Return when `caller` may go on: at once unless this turn is used up or others wait.

        Raises:
            Overloaded: as many calls of this caller wait as may.
        """
        if self._max_waiting is not None and self._calls.waiting_of(caller) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests of this caller wait to be begun; send fewer at a time")
        begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._calls.call(caller, partial(_go_on, begins)):
            await begins


def _go_on(begins: asyncio.Future[None]) -> bool:
    """Have the caller of `begin` go on; False if its client has gone."""
    if begins.done():
        return False
    begins.set_result(None)
    return True
