"""Limits of a worker: the calls, payload bytes and result bytes it holds at once, in order of arrival."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from teimgr.engine.job import Input, Output, characters
from teimgr.errors import Overloaded
from teimgr.spec import LoadedModel
from teimgr.worker.calls import WorkerCall

_NUMBER_BYTES = 4
# Tokens that an input may have beyond its characters: special tokens, a prompt, the padding of a query.
_EXTRA_TOKENS = 64


class FairLimiter:
    """A first-come-first-served limiter: bounded calls and bytes admitted, bounded calls and bytes waiting in a queue.

    A call alone always fits, admitted or waiting, whatever its size; a small call never overtakes a large one.
    `on_error` gets a call whose `proceed` raised, and the error. For the loop's thread.
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
        """A call that fails in `proceed` leaves at once, which must not recurse into here."""
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


def max_token_bytes(model: LoadedModel, outputs: frozenset[Output], inputs: Iterable[Input]) -> int:
    """An upper bound of the float32 bytes that the vectors per token of `inputs` take; 0 where none are asked for.

    Generous: a text seldom has as many tokens as characters.
    """
    width = sum(token_width(model, output) for output in outputs)
    if not width:
        return 0
    tokens = sum(min(characters(item) + _EXTRA_TOKENS, model.max_input_length) for item in inputs)
    return tokens * width * _NUMBER_BYTES


def token_width(model: LoadedModel, output: Output) -> int:
    """Numbers of a vector per token; 0 for an output that has none."""
    if output is Output.MULTI_VECTOR:
        return model.multi_vector_dimension
    return model.token_dimension if output is Output.TOKENS else 0


def over_limit(count: int, limit: int) -> str | None:
    """TEI's sentence for a batch of too many inputs; None for one within the limit."""
    return f"batch size {count} > maximum allowed batch size {limit}" if count > limit else None
