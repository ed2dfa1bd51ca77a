"""Who waits for an instance to change, by the instance's name."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StateWatchers:
    """Events of those that wait, which `changed` sets."""

    def __init__(self) -> None:
        self._events: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def changed(self, name: str) -> None:
        """The instance changed, or is gone."""
        for event in self._events.get(name, ()):
            event.set()

    @contextmanager
    def watching(self, name: str) -> Iterator[asyncio.Event]:
        """An event that is set at each change of the instance within the block."""
        event = asyncio.Event()
        self._events[name].add(event)
        try:
            yield event
        finally:
            self._events[name].discard(event)
            if not self._events[name]:
                del self._events[name]
