"""`FairLimiter`: how many calls run and wait in a worker, and their bytes, fair among connections."""

from __future__ import annotations

import math
from collections.abc import Callable

from teimgr.errors import Overloaded
from teimgr.worker.calls import WorkerCall


class FairLimiter:
    """A FIFO limiter: bounds on the number and bytes of the calls admitted, and of those waiting in its queue.

    Where no other call is admitted (or none waits), a call of any size fits. Strictly in order of arrival: small calls
    do not pass large ones. `on_error` gets a call whose `proceed` raised, and the error. For the loop's thread.
    """

    def __init__(
        self,
        on_error: Callable[[WorkerCall, Exception], None],
        *,
        max_bytes: float,
        max_calls: float = math.inf,
        max_waiting: float = math.inf,
        max_waiting_bytes: float = math.inf,
    ) -> None:
        self._on_error = on_error
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._admitted: dict[WorkerCall, int] = {}  # sizes
        self._admitted_bytes = 0
        self._queue: dict[WorkerCall, tuple[int, Callable[[], None]]] = {}  # in order of arrival
        self._queued_bytes = 0
        self._is_admitting = False

    def __len__(self) -> int:
        return len(self._admitted) + len(self._queue)

    def __contains__(self, call: WorkerCall) -> bool:
        return call in self._admitted or call in self._queue

    def enter(self, call: WorkerCall, size_bytes: int, proceed: Callable[[], None], may_wait: bool = True) -> None:
        """Admit `call` and run `proceed`, now or, where it `may_wait`, when enough calls have left.

        Raises:
            Overloaded: it does not fit now, and may not wait or the queue is full.
        """
        if not self._queue and self._fits(size_bytes):
            self._admit(call, size_bytes, proceed)
        elif may_wait and self._fits_in_queue(size_bytes):
            self._queue[call] = size_bytes, proceed
            self._queued_bytes += size_bytes
        else:
            raise Overloaded

    def add(self, call: WorkerCall, size_bytes: int) -> None:
        """Count `size_bytes` more for an admitted call, whether or not they fit; they are in memory already."""
        self._admitted[call] += size_bytes
        self._admitted_bytes += size_bytes

    def leave(self, call: WorkerCall) -> bool:
        """Release what an answered or cancelled call holds, admit the next ones; False when it holds nothing."""
        if (size_bytes := self._admitted.pop(call, None)) is not None:
            self._admitted_bytes -= size_bytes
        elif (entry := self._queue.pop(call, None)) is not None:
            self._queued_bytes -= entry[0]
        else:
            return False
        if self._queue and not self._is_admitting:
            self._admit_from_queue()
        return True

    def _fits(self, size_bytes: int) -> bool:
        if not self._admitted:
            return True
        return len(self._admitted) < self._max_calls and self._admitted_bytes + size_bytes <= self._max_bytes

    def _fits_in_queue(self, size_bytes: int) -> bool:
        if not self._queue:
            return True
        return len(self._queue) < self._max_waiting and self._queued_bytes + size_bytes <= self._max_waiting_bytes

    def _admit(self, call: WorkerCall, size_bytes: int, proceed: Callable[[], None]) -> None:
        self._admitted[call] = size_bytes
        self._admitted_bytes += size_bytes
        try:
            proceed()
        except Exception as error:
            self._on_error(call, error)

    def _admit_from_queue(self) -> None:
        """Not reentrant: a call whose `proceed` raises is released within `_admit`, and `leave` checks the flag."""
        self._is_admitting = True
        try:
            while self._queue:
                call, (size_bytes, proceed) = next(iter(self._queue.items()))
                if not self._fits(size_bytes):
                    return
                del self._queue[call]
                self._queued_bytes -= size_bytes
                self._admit(call, size_bytes, proceed)
        finally:
            self._is_admitting = False
