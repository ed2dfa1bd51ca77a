"""A thread that runs generators step by step, in turn.

Every step holds the GIL. Two threads at work would leave an event loop that waits for it every third step at best, and
one after the other a small body would wait for a large one. So there is one thread, which takes a step of each, and
rests now and then.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from threading import Lock
from typing import Any, TypeVar

from teimgr.wire.gil_interval import Rests

ResultT = TypeVar("ResultT")


class StepThread:
    """Runs generators on one thread, a step of each in turn, until they return."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, name)
        self._turns: deque[tuple[Generator[None, None, Any], Future[Any]]] = deque()
        self._lock = Lock()
        self._is_running = False

    async def run(self, steps: Generator[None, None, ResultT]) -> ResultT:
        """What the generator returns. A call that is cancelled ends it at its next turn.

        Raises:
            Exception: what the generator raises.
        """
        result: Future[ResultT] = Future()
        with self._lock:
            self._turns.append((steps, result))
            if not self._is_running:
                self._is_running = True
                self._thread.submit(self._take_turns)
        return await asyncio.wrap_future(result)

    def close(self) -> None:
        """Wait for the generators that are left."""
        self._thread.shutdown()

    def _take_turns(self) -> None:
        rest = Rests()
        while True:
            rest()
            with self._lock:
                if not self._turns:
                    self._is_running = False
                    return
                steps, result = self._turns.popleft()
            if result.cancelled():
                steps.close()
                continue
            with suppress(InvalidStateError):  # cancelled during the step
                try:
                    next(steps)
                except StopIteration as end:
                    result.set_result(end.value)
                except Exception as error:
                    result.set_exception(error)
                else:
                    with self._lock:
                        self._turns.append((steps, result))
