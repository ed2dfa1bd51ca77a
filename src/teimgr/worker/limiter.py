"""Limits on a worker's running and waiting calls and on their bytes; chooses the lane of a key's calls."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack

from teimgr.engine.job import Lane, Share
from teimgr.errors import Overloaded
from teimgr.wire.gil import short_turns
from teimgr.worker.calls import WorkerCall

# Interactive calls that a key may have in flight, per unit of its weight, while other keys call: a query of another key
# then waits for at most one batch of them.
_INTERACTIVE_CALLS = 2
# A key counts as calling for this time after its latest call.
_ACTIVE_S = 10.0


class CallLimiter:
    """A FIFO limiter of the number and bytes of admitted calls, and of those in its queue.

    If no other call is admitted (or waits), a call of any size fits. Calls are admitted in order of arrival: small ones
    do not overtake large ones. `on_error` gets a call whose `proceed` raised, and the error. For the loop's thread.
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
        self._admitted: dict[WorkerCall, int] = {}  # size by call
        self._admitted_bytes = 0
        self._queue: dict[WorkerCall, tuple[int, Callable[[], None]]] = {}  # in order of arrival
        self._queued_bytes = 0
        self._is_admitting = False

    def __len__(self) -> int:
        return len(self._admitted) + len(self._queue)

    def __contains__(self, call: WorkerCall) -> bool:
        return call in self._admitted or call in self._queue

    def enter(self, call: WorkerCall, size_bytes: int, proceed: Callable[[], None], may_wait: bool = True) -> None:
        """Admit `call` and run `proceed`, now or, if it `may_wait`, when enough calls have left.

        Raises:
            Overloaded: it does not fit now, and it may not wait or the queue is full.
        """
        if not self._queue and self._fits(size_bytes):
            self._admit(call, size_bytes, proceed)
        elif may_wait and self._fits_in_queue(size_bytes):
            self._queue[call] = size_bytes, proceed
            self._queued_bytes += size_bytes
        else:
            raise Overloaded

    def add(self, call: WorkerCall, size_bytes: int) -> None:
        """Add `size_bytes`, which are in memory already, to an admitted call, even beyond the limit."""
        self._admitted[call] += size_bytes
        self._admitted_bytes += size_bytes

    def pass_on(self, call: WorkerCall, to: WorkerCall) -> None:
        """Replace `call` by `to`, with the size of `to`; no-op if `call` is not admitted."""
        if (size_bytes := self._admitted.pop(call, None)) is not None:
            self._admitted[to] = to.size_bytes
            self._admitted_bytes += to.size_bytes - size_bytes

    def leave(self, call: WorkerCall) -> bool:
        """Release what an answered or cancelled call holds and admit the next ones; False if it holds nothing."""
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
        """Admit queued calls. Not reentrant: a call whose `proceed` raises is released in `_admit`; `leave` checks
        the flag."""
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


class InteractiveCalls:
    """Interactive calls in flight by key. Further calls of a key with many move to the bulk lane while others call.

    In the interactive lane, keys with few calls would wait for its batches, which take as long as those of bulk work.
    In the bulk lane the key keeps its throughput. For the loop's thread.
    """

    def __init__(self) -> None:
        self._tenant_of: dict[WorkerCall, int] = {}
        # By tenant: calls in flight; those of them in the bulk lane; time of the latest call and priority, latest last.
        self._in_flight: dict[int, int] = {}
        self._in_bulk_lane: dict[int, int] = {}
        self._called: dict[int, tuple[float, int]] = {}
        self._turns = ExitStack()
        self._are_turns_short = False

    def enter(self, call: WorkerCall, share: Share) -> None:
        """Count an interactive call until it leaves.

        It is moved to the bulk lane if its key has `_INTERACTIVE_CALLS` calls in flight per unit of its weight, and
        another key of at least its priority has called within `_ACTIVE_S`.
        """
        tenant = call.tenant
        if call.lane is not Lane.INTERACTIVE or not (tenant or self._called):
            return
        self._called.pop(tenant, None)
        self._called[tenant] = call.received, share.priority
        under_way = self._in_flight.get(tenant, 0)
        self._in_flight[tenant] = under_way + 1
        self._tenant_of[call] = tenant
        if under_way >= _INTERACTIVE_CALLS * share.weight and self._others_call(call, share.priority):
            call.give_way()
            self._in_bulk_lane[tenant] = self._in_bulk_lane.get(tenant, 0) + 1
        self._set_turns()

    def leave(self, call: WorkerCall) -> None:
        """Stop counting a call; no effect if it is not counted."""
        if (tenant := self._tenant_of.pop(call, None)) is None:
            return
        _count_down(self._in_flight, tenant)
        if call.gave_way:
            _count_down(self._in_bulk_lane, tenant)
        self._set_turns()

    def _set_turns(self) -> None:
        """Shorten the switch interval of threads while a key has a query in flight next to many of another key.

        The threads of a batch with many calls run Python for milliseconds each, and a query needs the GIL half a dozen
        times. Short intervals cost a busy worker some percent, so they apply only then.
        """
        are_short = bool(self._in_bulk_lane) and len(self._in_flight) > len(self._in_bulk_lane)
        if are_short is self._are_turns_short:
            return
        self._are_turns_short = are_short
        if are_short:
            self._turns.enter_context(short_turns())
        else:
            self._turns.close()

    def _others_call(self, call: WorkerCall, priority: int) -> bool:
        for tenant, (at, its_priority) in reversed(self._called.items()):
            if call.received - at > _ACTIVE_S:
                return False
            if tenant != call.tenant and its_priority <= priority:
                return True
        return False


def _count_down(counts: dict[int, int], tenant: int) -> None:
    counts[tenant] -= 1
    if not counts[tenant]:
        del counts[tenant]
