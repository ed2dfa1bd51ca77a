"""Pinned host memory for copies between host and device: a few reused buffers.

Only copies of pinned memory overlap with the host and with kernels, and pinning takes longer than copying.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_MIN_BYTES = 4096
_MAX_BYTES = 32 << 20  # the largest buffer that is kept


class Event(Protocol):
    """An event in a device's queue of work, like `torch.cuda.Event`."""

    def record(self) -> None:
        """Record the event after everything that this thread has launched."""

    def query(self) -> bool:
        """True if the device has reached the event."""

    def synchronize(self) -> None:
        """Wait until the device has reached the event."""


def pinned_memory(size: int) -> Tensor:
    """Allocate `size` bytes of pinned memory."""
    with torch.inference_mode(False):  # so that it is writable outside of inference mode
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def new_event() -> Event:
    """An event of the current device."""
    made: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return made


class _Buffer:
    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.is_taken = True
        self.copied: Event | None = None  # it may be reused after this event
        self.event: Event | None = None  # made once, recorded at every copy

    def is_free(self) -> bool:
        if not self.is_taken and self.copied is not None and self.copied.query():
            self.copied = None
        return not self.is_taken and self.copied is None


class Loan:
    """Pinned memory of a ring, uint8 [size]; the borrower owns it until it calls one of the two methods, once."""

    def __init__(self, memory: Tensor, buffer: _Buffer | None, events: Callable[[], Event]) -> None:
        self.memory = memory
        self._buffer = buffer
        self._events = events

    def free_after_copy(self) -> None:
        """Give it back once the device has done what this thread launched until now."""
        if (buffer := self._buffer) is not None:
            buffer.event = buffer.event or self._events()
            buffer.event.record()
            buffer.copied, buffer.is_taken = buffer.event, False

    def free(self) -> None:
        """Give it back; neither the device nor the borrower may use it afterwards."""
        if self._buffer is not None:
            self._buffer.is_taken = False


class PinnedRing:
    """At most `buffers` pieces of pinned memory; further or larger requests allocate their own.

    Safe from any thread; never waits for the device.
    """

    def __init__(
        self, buffers: int, memory: Callable[[int], Tensor] = pinned_memory, events: Callable[[], Event] = new_event
    ) -> None:
        self._most = buffers
        self._memory = memory
        self._events = events
        self._buffers: list[_Buffer] = []
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all buffers."""
        return sum(len(buffer.memory) for buffer in self._buffers)

    def take(self, size: int) -> Loan:
        """Memory of `size` bytes that no copy uses.

        Raises:
            RuntimeError: torch's own, if memory runs out.
        """
        buffer = self._free_buffer(size) if size <= _MAX_BYTES else None
        memory = self._memory(size) if buffer is None else buffer.memory[:size]
        return Loan(memory, buffer, self._events)

    def _free_buffer(self, size: int) -> _Buffer | None:
        """Return the smallest free buffer that is large enough, or a new one, which replaces a smaller free one if
        the ring is full."""
        with self._lock:
            free = sorted((each for each in self._buffers if each.is_free()), key=lambda each: len(each.memory))
            found = next((each for each in free if len(each.memory) >= size), None)
            if found is not None:
                found.is_taken = True
                return found
            if len(self._buffers) >= self._most:
                if not free:
                    return None
                self._buffers.remove(free[0])
            made = _Buffer(self._memory(max(_MIN_BYTES, 1 << (size - 1).bit_length())))
            self._buffers.append(made)
            return made


INPUTS = PinnedRing(32)
"""For copies to the device: some eight arrays a batch."""
RESULTS = PinnedRing(16)
"""For copies from the device: up to three arrays a batch, kept until the finisher has written them into jobs."""
