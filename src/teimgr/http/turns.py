"""Fair sharing of an event loop's turns between callers: new calls, units of work for connections, and milliseconds of
other work for requests. `SharedThreads` do longer work.

Until its credentials are checked, a request's caller is the network of its address.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from threading import Lock
from typing import Any, Generic, NamedTuple, TypeVar

from teimgr.errors import Overloaded

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

TURNS_OF: ContextVar[Hashable] = ContextVar("turns_of", default=None)
"""The caller whose turns the current task uses, on the loop and on threads."""


class Rotation(Generic[ItemT]):
    """Items of callers, popped from one caller after another."""

    def __init__(self) -> None:
        self._queues: OrderedDict[Hashable, deque[ItemT]] = OrderedDict()  # by caller, next one first
        self._newest_next: set[Hashable] = set()  # callers whose oldest item was popped last, of both ends
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def put(self, caller: Hashable, item: ItemT) -> None:
        self._queues.setdefault(caller, deque()).append(item)
        self._count += 1

    def waiting_of(self, caller: Hashable) -> int:
        """Return how many items of `caller` wait."""
        return len(self._queues.get(caller, ()))

    def pop(self, *, both_ends: bool = False) -> ItemT:
        """Remove and return the oldest item of the next caller, or of `both_ends` its oldest and newest alternately.

        Raises KeyError if empty.
        """
        caller, queue = self._queues.popitem(last=False)
        newest = both_ends and caller in self._newest_next
        item = queue.pop() if newest else queue.popleft()
        self._newest_next.discard(caller)
        if queue:
            self._queues[caller] = queue
            if both_ends and not newest:
                self._newest_next.add(caller)
        self._count -= 1
        return item


class _InTurns:
    """Calls `_turn` once in the next turn of the event loop after `_schedule`."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None  # loop with a scheduled turn

    def _schedule(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._loop = loop
            loop.call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._loop = None
        self._turn()

    def _turn(self) -> None:
        raise NotImplementedError


class CallTurns(_InTurns):
    """Makes `per_turn` calls in each turn of the event loop; callers alternate in later turns."""

    def __init__(self, per_turn: int) -> None:
        super().__init__()
        self._per_turn = self._left = per_turn
        self._waiting: Rotation[Callable[[], object]] = Rotation()

    def call(self, caller: Hashable, function: Callable[[], object]) -> bool:
        """Call `function` in a later turn and return True, or return False: the caller may do so now.

        A call that returns False is not counted.
        """
        if self.has_room():
            return False
        self._waiting.put(caller, function)
        self._schedule()
        return True

    def has_room(self) -> bool:
        """True if a call may be made now; such a call is counted."""
        if self._left <= 0 or self._waiting:
            return False
        self._left -= 1
        if 2 * self._left < self._per_turn:  # a turn of the loop costs microseconds: not for a few calls
            self._schedule()
        return True

    def waiting_of(self, caller: Hashable) -> int:
        """Return how many functions of `caller` are to be called in later turns."""
        return self._waiting.waiting_of(caller)

    def _turn(self) -> None:
        self._left = self._per_turn
        if self._waiting:
            self._schedule()
        while self._left > 0 and self._waiting:
            if self._waiting.pop()() is not False:
                self._left -= 1


class Turns:
    """Lets `per_turn` callers of `begin` continue in each turn of the loop; callers alternate in later turns.

    Without `max_waiting`, the number of waiting calls of a caller is unlimited.
    """

    def __init__(self, per_turn: int, max_waiting: int | None = None) -> None:
        self._calls = CallTurns(per_turn)
        self._max_waiting = max_waiting

    async def begin(self, caller: Hashable) -> None:
        """Return when `caller` may go on: at once unless this turn is used up or others wait.

        Raises:
            Overloaded: the maximum of this caller's calls already waits.
        """
        if self._max_waiting is not None and self._calls.waiting_of(caller) >= self._max_waiting:
            raise Overloaded(f"{self._max_waiting} requests of this caller wait to be begun; send fewer at a time")
        await self.go_on(caller)

    async def go_on(self, caller: Hashable) -> None:
        """Like `begin`, for a request that has begun and is not refused."""
        if not self._calls.has_room():
            begins: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._calls.call(caller, partial(_go_on, begins))
            await begins


def _go_on(begins: asyncio.Future[None]) -> bool:
    """Have the caller of `begin` go on; False if its client has gone."""
    if begins.done():
        return False
    begins.set_result(None)
    return True


_WORK_S = 0.006  # of a turn: enough for 64 small queries, so that they form one batch
# A piece of a long list.
_PIECE_S = 0.002


class WorkTurns(_InTurns):
    """Runs short work for requests on the event loop, `turn_s` per turn, alternating between callers (`TURNS_OF`).

    A turn runs at least one piece of work and ends after the piece that exceeds its time, so pieces must be short.
    """

    def __init__(self, turn_s: float = _WORK_S, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._turn_s = self._left_s = turn_s
        self._clock = clock
        self._waiting: Rotation[Callable[[], None]] = Rotation()

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return or raise what `work` does. It runs at once unless this turn is used up or others wait."""
        if self._left_s > 0 and not self._waiting:
            return self._timed(work)
        done: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._waiting.put(TURNS_OF.get(), partial(self._settle, done, work))
        self._schedule()
        try:
            return await done
        finally:
            del done, work  # breaks a reference cycle with an error

    async def listed(self, items: Iterable[ItemT]) -> list[ItemT]:
        """Return the items of an iterable that makes them: of thousands some in each turn of the loop."""
        made: list[ItemT] = []
        left = iter(items)
        while await self.run(partial(self._take, left, made)):
            pass
        return made

    def _take(self, items: Iterator[ItemT], made: list[ItemT]) -> bool:
        """Append items for `_PIECE_S`; False once there are no more."""
        until = self._clock() + _PIECE_S
        for item in items:
            made.append(item)
            if self._clock() >= until:
                return True
        return False

    def call(self, caller: Hashable, work: Callable[[], None]) -> None:
        """Like `run`, for work of `caller` that raises and returns nothing."""
        if self._left_s > 0 and not self._waiting:
            self._timed(work)
        else:
            self._waiting.put(caller, partial(self._timed, work))
            self._schedule()

    def _timed(self, work: Callable[[], ResultT]) -> ResultT:
        began = self._clock()
        try:
            return work()
        finally:
            self._left_s -= self._clock() - began
            if self._left_s < self._turn_s / 2:  # a turn of the loop costs microseconds: not for each small query
                self._schedule()

    def _settle(self, done: asyncio.Future[ResultT], work: Callable[[], ResultT]) -> None:
        if done.done():  # its client disconnected
            return
        try:
            done.set_result(self._timed(work))
        except Exception as error:
            done.set_exception(error)

    def _turn(self) -> None:
        self._left_s = self._turn_s
        try:
            while self._left_s > 0 and self._waiting:
                self._waiting.pop()()
        finally:  # a defect of one piece does not delay those behind it
            if self._waiting:
                self._schedule()


LISTING = WorkTurns()
"""The turns of all requests for lists that may have thousands of members."""

# Work of all connections of a protocol in one turn of the loop: in HTTP/2 (`FrameReader.receive`) at most 8 ms, the
# longest header block of Huffman strings; in HTTP/1 (chunks of a body) about 2 ms.
TURN_UNITS = 600
REQUEST_UNITS = 24  # cost of a request that a task answers, 0.1 ms or more
PART_UNITS = 48  # work of one connection while others wait: a small call
# After this many new connections of a caller, one that has waited before is served.
_NEW_BEFORE_OLD = 3


class _Waiting(NamedTuple):
    catch_up: Callable[[], int]
    units: int


class _Group:
    """The waiting connections of one caller."""

    def __init__(self) -> None:
        self.new: deque[_Waiting] = deque()  # waiting for the first time
        self.old: deque[_Waiting] = deque()
        self._new_in_a_row = 0

    def next(self) -> deque[_Waiting]:
        """The queue whose first is served next; an empty one if none waits."""
        takes_new = bool(self.new) and (not self.old or self._new_in_a_row < _NEW_BEFORE_OLD)
        return self.new if takes_new else self.old

    def take(self) -> _Waiting:
        waiting = self.next()
        self._new_in_a_row = self._new_in_a_row + 1 if waiting is self.new else 0
        return waiting.popleft()


class LoopTurns(_InTurns):
    """Units of work for the connections of one event loop, `TURN_UNITS` per turn.

    Connections that need more wait. Callers alternate with `PART_UNITS` each, and so do the connections of a caller. A
    connection that starts to wait comes first, so that occasional calls overtake busy clients (as in fq_codel, RFC
    8290).
    """

    def __init__(self) -> None:
        super().__init__()
        self._left = TURN_UNITS
        self._part: int | None = None  # units of the connection in service
        self._groups: OrderedDict[Hashable, _Group] = OrderedDict()  # waiting callers, next one first

    @property
    def units(self) -> int:
        """The work that a connection may have done now."""
        if self._part is not None:
            return self._part
        if not self._groups:
            return max(self._left, 0)
        return PART_UNITS if self._left >= PART_UNITS else 0

    def spend(self, units: float) -> None:
        """Count what was processed for a connection."""
        self._left -= int(units)
        if self._left < TURN_UNITS // 2:  # a turn of the loop costs microseconds: not for each small request
            self._schedule()

    def wait(self, caller: Hashable, catch_up: Callable[[], int]) -> None:
        """Call `catch_up` in a later turn, and again in turns after that while it returns the units that it needs."""
        self._groups.setdefault(caller, _Group()).new.append(_Waiting(catch_up, PART_UNITS))
        self._schedule()

    def _turn(self) -> None:
        self._left = TURN_UNITS
        try:
            while self._groups and self._serve_next():
                pass
        finally:  # a defect of one connection does not delay those behind it
            if self._groups:
                self._schedule()

    def _serve_next(self) -> bool:
        """Let a connection of the next caller catch up; False if too few units are left in this turn."""
        caller, group = next(iter(self._groups.items()))
        if group.next()[0].units > self._left:
            return False
        one, needed = group.take(), 0
        self._part = one.units
        try:
            needed = one.catch_up()
        finally:
            self._part = None
            if needed:
                group.old.append(_Waiting(one.catch_up, max(needed, PART_UNITS)))
            if group.new or group.old:
                self._groups.move_to_end(caller)
            else:
                del self._groups[caller]
        return True


class _Work(Future[ResultT]):
    """One piece of work and its result. Cancelling releases `work` at once, since it may hold a message."""

    def __init__(self, work: Callable[[], ResultT]) -> None:
        super().__init__()
        self._work: Callable[[], ResultT] | None = work

    def cancel(self) -> bool:
        if cancelled := super().cancel():
            self._work = None
        return cancelled

    def begin(self) -> Callable[[], ResultT] | None:
        """Return the work, for a thread that does it now; None if it is cancelled."""
        if not self.set_running_or_notify_cancel():
            return None
        work, self._work = self._work, None
        return work


class SharedThreads:
    """Runs work on `count` threads, alternating between callers (`TURNS_OF`)."""

    def __init__(self, count: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(count, name)
        self._waiting: Rotation[_Work[Any]] = Rotation()
        self._lock = Lock()

    async def run(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """Return or raise what `work` does. If the call is cancelled before its work begins, the work does not run."""
        return await asyncio.wrap_future(self.submit(work, *arguments))

    def submit(self, work: Callable[..., ResultT], *arguments: object) -> Future[ResultT]:
        """Queue `work`; raises RuntimeError after `close`."""
        result = _Work(partial(work, *arguments))
        with self._lock:
            self._waiting.put(TURNS_OF.get(), result)
        self._threads.submit(self._next)
        return result

    def close(self) -> None:
        """Stop beginning work; what has not begun is cancelled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            while self._waiting:
                self._waiting.pop().cancel()

    def _next(self) -> None:
        with self._lock:
            if not self._waiting:
                return  # closed
            result = self._waiting.pop()
        if (work := result.begin()) is None:
            return
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        finally:
            del result, work  # breaks a reference cycle with an error
