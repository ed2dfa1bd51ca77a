"""Whether small batches are better computed by one thread: while other processes hold up the threads that help.

A step ends with its slowest thread. Where a core is shared with a process that the load of our workers (`core_load`)
does not tell of, a thread on it may stand still for milliseconds, and a query with it; one thread alone would move.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

_HELD_UP_S = 0.001  # a batch that waited for longer was held up
_LATEST, _MAX_HELD_UP = 8, 2  # window of batches; slow if more than `_MAX_HELD_UP` of them waited
_ALONE_S = 1.0


class HelperWaits:
    """How long the latest small batches waited for the threads that helped. Safe from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._latest: deque[bool] = deque(maxlen=_LATEST)
        self._alone_until = 0.0

    def threads(self, most: int) -> int:
        """How many threads to compute a small batch with: `most`, or one for a second after several were held up."""
        return 1 if self._clock() < self._alone_until else most

    def note(self, waited_s: float) -> None:
        """A batch on several threads has waited so long for them."""
        with self._lock:
            self._latest.append(waited_s > _HELD_UP_S)
            if sum(self._latest) > _MAX_HELD_UP:
                self._latest.clear()
                self._alone_until = self._clock() + _ALONE_S
