"""The bound on a batch's tokens that running out of memory teaches."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_TOKENS = 256
_RAISE_AFTER_S = 60.0


class TokenCap:
    """The most tokens of a batch: `most`, and fewer after a batch did not fit; used by one thread.

    What is short may be another process's memory, so the bound is doubled after every minute without such a batch. A
    batch that runs out of memory costs several times its own time: it is computed in vain, and memory that torch keeps
    is given back.
    """

    def __init__(self, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._tokens = most
        self._clock = clock
        self._changed_at = clock()

    @property
    def tokens(self) -> int:
        if self._tokens < self._most and self._clock() - self._changed_at >= _RAISE_AFTER_S:
            self._tokens, self._changed_at = min(self._most, 2 * self._tokens), self._clock()
        return self._tokens

    def did_not_fit(self, tokens: int) -> None:
        """A batch of this many tokens ran out of memory."""
        self._tokens = min(self._tokens, max(MIN_TOKENS, tokens // 2))
        self._changed_at = self._clock()
