"""Lets the event loop have the GIL during long work of threads: short switch interval, rests, steps, partial frees.

The default switch interval is 5 ms, and each callback of an event loop may wait that long for a computing thread. An
interval of 0.5 ms costs a worker 5 % of its processor time under 64 callers, because engine threads and loop interrupt
each other too often. So the interval is short only while long work of a caller runs.

A short interval alone is not enough: libuv takes the GIL again for each callback and waits for the interval each time.
So a thread that computes for seconds also sleeps briefly now and then.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Generator, Hashable, Iterator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from sys import getrefcount
from threading import Lock
from typing import Any, TypeVar

from teimgr.http.turns import TURNS_OF, Rotation

_SHORT_S = 0.0005
# A thread rests this long after each period of work, which makes the work a tenth slower.
_WORK_S, _REST_S = 0.001, 0.0001
_lock = Lock()
_users = 0
_usual_s = 0.0


def use_short_turns() -> None:
    """Keep the interval short for the life of this process. For a process without engine threads, or with a GPU."""
    sys.setswitchinterval(_SHORT_S)


@contextmanager
def short_turns() -> Iterator[None]:
    """Keep the interval short within the block, on any thread and for all threads of the process."""
    global _users, _usual_s
    with _lock:
        if not _users:
            _usual_s = sys.getswitchinterval()
            sys.setswitchinterval(_SHORT_S)
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users:
                sys.setswitchinterval(_usual_s)


class Rests:
    """Sleeps briefly, at intervals, so that event loops run. A working thread calls it between short steps."""

    __slots__ = ("_since",)

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        """Sleep for a moment if the last time was a millisecond ago, and this thread runs no loop."""
        if time.perf_counter() - self._since < _WORK_S:
            return
        if asyncio._get_running_loop() is None:
            time.sleep(_REST_S)
        self._since = time.perf_counter()


ResultT = TypeVar("ResultT")


class StepThread:
    """Runs generators on one thread until they return, one step of each in turn, in the rotation of `TURNS_OF`.

    Each step holds the GIL: with two such threads, an event loop would get every third turn at best.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turns: Rotation[tuple[Hashable, Generator[None, None, Any], Future[Any]]] = Rotation()
        self._lock = Lock()
        self._is_running = False

    async def run(self, steps: Generator[None, None, ResultT]) -> ResultT:
        """Run the generator and return its result. A call that is cancelled ends it at its next turn.

        Raises:
            Exception: any exception of the generator.
        """
        result: Future[ResultT] = Future()
        caller = TURNS_OF.get()
        with self._lock:
            self._turns.put(caller, (caller, steps, result))
            if not self._is_running:
                self._thread.submit(self._take_turns)
                self._is_running = True
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Begin nothing more; generators that wait for their next step are cancelled."""
        self._thread.shutdown(wait=False)
        with self._lock:
            while self._turns:
                self._turns.pop()[-1].cancel()

    def _take_turns(self) -> None:
        rest = Rests()
        while True:
            rest()
            with self._lock:
                if not self._turns:
                    self._is_running = False
                    return
                turn = self._turns.pop()
            caller, steps, result = turn
            if result.cancelled():
                steps.close()
                continue
            with suppress(InvalidStateError):  # cancelled during the step
                try:
                    next(steps)
                except StopIteration as end:
                    result.set_result(end.value)
                except BaseException as error:  # panics of the tokenizers library are not an `Exception`
                    result.set_exception(error)
                else:
                    with self._lock:
                        self._turns.put(caller, turn)


# Values freed in one call: a millisecond or two.
_AT_ONCE = 2**15
_LEAVES = frozenset((str, int, float, bool, bytes, type(None)))
# `getrefcount` in `_alone` of a value that only its list refers to: the list, the variable and the argument.
_ONE_OWNER = 3


def free(*values: Any) -> None:
    """Empty lists, dicts and objects that are no longer used, and their members that nothing else refers to.

    For a thread: others get the GIL between two parts.
    """
    rest = Rests()
    for value in values:
        for _ in freed(value):
            rest()


def freed(value: Any) -> Generator[None, None, None]:
    """Run `free` for one value in steps."""
    waiting = [taken] if (taken := _members(value)) else []
    while waiting:
        if not waiting[-1]:
            waiting.pop()
            continue
        few = waiting[-1][-_AT_ONCE:]
        del waiting[-1][-_AT_ONCE:]
        nested = _alone(few)
        few.clear()
        while nested:
            if members := _members(nested.pop()):
                waiting.append(members)
        yield


def _alone(values: list[Any]) -> list[Any]:
    """Return the values that may contain others and that only the list refers to."""
    return [one for one in values if type(one) not in _LEAVES and getrefcount(one) <= _ONE_OWNER]


def _members(value: Any) -> list[Any]:
    """Return the values in a list, dict or object; a dict or object is emptied."""
    if type(value) is list:
        return value
    holder = value if type(value) is dict else getattr(value, "__dict__", None)
    if type(holder) is not dict:
        return []
    taken = list(holder.values())
    with suppress(RuntimeError):  # another thread added a member
        holder.clear()
    return taken
