"""What a worker takes in at once: calls by count, payloads by bytes, and a bounded line for those that may wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from teimgr.engine.job import Input, Output, characters
from teimgr.errors import Overloaded
from teimgr.spec import ModelInfo
from teimgr.worker.calls import WorkerCall


class CallLimiter:
    """Who is inside and who stands in line. Loop thread only.

    `max_calls` calls and `max_bytes` of requests are inside at once. Beyond that a call that may not wait is refused,
    and one that may (a message of a stream, whose front bounds how many it sends ahead) stands in line, up to
    `max_waiting` calls and `max_waiting_bytes`. A lone call always fits, inside or in line, whatever its size.
    """

    def __init__(self, max_calls: int, max_bytes: int, max_waiting: int, max_waiting_bytes: int) -> None:
        self._max_calls = max_calls
        self._max_bytes = max_bytes
        self._max_waiting = max_waiting
        self._max_waiting_bytes = max_waiting_bytes
        self._inside: set[WorkerCall] = set()
        self._inside_bytes = 0
        self._line: dict[WorkerCall, Callable[[], None]] = {}  # in order of arrival
        self._line_bytes = 0
        self._letting_in = False

    def __len__(self) -> int:
        return len(self._inside) + len(self._line)

    def __contains__(self, call: WorkerCall) -> bool:
        return call in self._inside or call in self._line

    def enter(self, call: WorkerCall, proceed: Callable[[], None]) -> None:
        """Let `call` in and `proceed` with it, now or when there is room.

        Raises:
            Overloaded: no room, and it does not wait or the line is full.
        """
        if not self._line and self._has_room(call):
            self._let_in(call, proceed)
        elif call.may_wait and self._line_has_room(call):
            self._line[call] = proceed
            self._line_bytes += call.size_bytes
        else:
            raise Overloaded

    def leave(self, call: WorkerCall) -> bool:
        """`call` is answered or given up; False when it had left already."""
        if call in self._line:
            self._pop_from_line(call)
        elif call in self._inside:
            self._inside.remove(call)
            self._inside_bytes -= call.size_bytes
        else:
            return False
        self._let_in_next()
        return True

    def _has_room(self, call: WorkerCall) -> bool:
        if not self._inside:
            return True
        return len(self._inside) < self._max_calls and self._inside_bytes + call.size_bytes <= self._max_bytes

    def _line_has_room(self, call: WorkerCall) -> bool:
        if not self._line:
            return True
        return len(self._line) < self._max_waiting and self._line_bytes + call.size_bytes <= self._max_waiting_bytes

    def _let_in(self, call: WorkerCall, proceed: Callable[[], None]) -> None:
        self._inside.add(call)
        self._inside_bytes += call.size_bytes
        proceed()

    def _let_in_next(self) -> None:
        """Work off the line. A call that fails while it is let in leaves at once: that must not nest."""
        if self._letting_in:
            return
        self._letting_in = True
        try:
            while self._line:
                call = next(iter(self._line))
                if not self._has_room(call):
                    return
                self._let_in(call, self._pop_from_line(call))
        finally:
            self._letting_in = False

    def _pop_from_line(self, call: WorkerCall) -> Callable[[], None]:
        self._line_bytes -= call.size_bytes
        return self._line.pop(call)


_NUMBER_BYTES = 4
# Tokens that an input may have beyond its characters: special ones, a prompt, those that fill up a query.
_MORE_TOKENS = 64


def most_token_bytes(model: ModelInfo, outputs: frozenset[Output], inputs: Iterable[Input]) -> int:
    """What the float32 vectors per token of `inputs` may take until they are a reply; 0 where none are asked for.

    Rather too much: a text seldom has as many tokens as characters.
    """
    width = sum(token_width(model, output) for output in outputs)
    if not width:
        return 0
    tokens = sum(min(characters(item) + _MORE_TOKENS, model.max_input_length) for item in inputs)
    return tokens * width * _NUMBER_BYTES


def token_width(model: ModelInfo, output: Output) -> int:
    """Numbers of a vector per token; 0 for an output that has none."""
    if output is Output.MULTI_VECTOR:
        return model.multi_vector_dimension
    return model.token_dimension if output is Output.TOKENS else 0


class ResultBudget:
    """What calls may hold at once, `max_bytes` of results; the others stand in line. Loop thread only.

    A lone call always fits, whatever its size. Who asks for nothing passes the line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._inside: dict[WorkerCall, int] = {}
        self._line: dict[WorkerCall, tuple[int, Callable[[], None]]] = {}  # in order of arrival
        self._letting_in = False

    def enter(self, call: WorkerCall, size_bytes: int, proceed: Callable[[], None]) -> None:
        """`proceed`, which may not raise, now or when there is room for `size_bytes` of results."""
        if not size_bytes:
            proceed()
            return
        self._line[call] = size_bytes, proceed
        self._let_in()

    def leave(self, call: WorkerCall) -> None:
        """`call` is answered or given up; one that never entered is no fault."""
        self._line.pop(call, None)
        self._held_bytes -= self._inside.pop(call, 0)
        self._let_in()

    def _let_in(self) -> None:
        """Work off the line. A call that fails while it is let in leaves at once: that must not nest."""
        if self._letting_in:
            return
        self._letting_in = True
        try:
            while self._line:
                call, (size_bytes, proceed) = next(iter(self._line.items()))
                if self._inside and self._held_bytes + size_bytes > self._max_bytes:
                    return
                del self._line[call]
                self._inside[call] = size_bytes
                self._held_bytes += size_bytes
                proceed()
        finally:
            self._letting_in = False
