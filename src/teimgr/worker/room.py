"""Memory for the results that grow with every token of a call, until the call is answered.

Requests are bounded when they come in, and every other result is about as large as what was asked. A vector per token
is not: a kilobyte of text may become a megabyte of them, and no batch can tell how many calls are yet unanswered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from teimgr.engine.job import Input, Output, characters
from teimgr.spec import ModelInfo
from teimgr.worker.calls import Call

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


class Room:
    """What calls may hold at once, `max_bytes` of results; the others stand in line. Loop thread only.

    A lone call always fits, whatever its size. Who asks for nothing passes the line.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._inside: dict[Call, int] = {}
        self._line: dict[Call, tuple[int, Callable[[], None]]] = {}  # in order of arrival
        self._letting_in = False

    def enter(self, call: Call, size_bytes: int, proceed: Callable[[], None]) -> None:
        """`proceed`, which may not raise, now or when there is room for `size_bytes` of results."""
        if not size_bytes:
            proceed()
            return
        self._line[call] = size_bytes, proceed
        self._let_in()

    def leave(self, call: Call) -> None:
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
