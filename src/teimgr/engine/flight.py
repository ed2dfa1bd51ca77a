"""What was started on the device and is not finished: bounded, so that a query never waits behind many batches."""

from __future__ import annotations

import threading

_BATCHES = 2  # one that runs, and one that is ready when it ends: more gains nothing and delays the next query


class Flight:
    """Counts batches and their tokens between start and finish. One thread enters, another leaves."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._batches = 0
        self._abandoned = False
        self.tokens = 0

    def wait_for_room(self) -> bool:
        """Return when another batch may start; False where it never may, since nobody finishes any more."""
        with self._changed:
            self._changed.wait_for(lambda: self._abandoned or self._batches < _BATCHES)
            return not self._abandoned

    def enter(self, tokens: int) -> None:
        """A batch of so many tokens is about to start."""
        with self._changed:
            self._batches += 1
            self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """A batch of so many tokens is finished, or did not start after all."""
        with self._changed:
            self._batches -= 1
            self.tokens -= tokens
            self._changed.notify()

    def abandon(self) -> None:
        """Let nobody wait for room any more."""
        with self._changed:
            self._abandoned = True
            self._changed.notify()
