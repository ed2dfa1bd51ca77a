"""Name → where it answers: the one crossing from control to data.

The supervisors write, each its own instance; routers, in this process or in a mux, read snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from teimgr.spec import State


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One live replica: its unix socket, and the incarnation its worker says in reply to WATCH."""

    socket: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """One instance as the data plane sees it. `endpoints` is empty unless `state` is running."""

    name: str
    model_id: str
    state: State
    reason: str | None = None
    dimension: int = 0
    endpoints: tuple[WorkerEndpoint, ...] = ()


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """All instances, ordered by creation (what `instance_index` counts)."""

    entries: tuple[RouteEntry, ...] = ()

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps([asdict(entry) for entry in self.entries])

    @classmethod
    def from_json(cls, text: str) -> RoutingSnapshot:
        """The inverse of `to_json`."""
        return cls(tuple(_entry(item) for item in json.loads(text)))


def _entry(item: dict[str, object]) -> RouteEntry:
    endpoints = tuple(WorkerEndpoint(**endpoint) for endpoint in item.pop("endpoints"))  # type: ignore[attr-defined]
    state = State(str(item.pop("state")))
    return RouteEntry(**item, state=state, endpoints=endpoints)  # type: ignore[arg-type]


class Directory:
    """The current entries, and who wants to hear of a change.

    Listeners are called in the event loop, at once, with the new snapshot.
    """

    def __init__(self) -> None:
        self._entries: dict[str, RouteEntry] = {}
        self._listeners: list[Callable[[RoutingSnapshot], None]] = []

    def publish(self, entry: RouteEntry) -> None:
        """Add or replace the entry of one instance; a new name goes to the end."""
        if self._entries.get(entry.name) != entry:
            self._entries[entry.name] = entry
            self._notify()

    def remove(self, name: str) -> None:
        """Forget a deleted instance; an unknown name changes nothing."""
        if self._entries.pop(name, None) is not None:
            self._notify()

    def snapshot(self) -> RoutingSnapshot:
        """What is known now."""
        return RoutingSnapshot(tuple(self._entries.values()))

    def subscribe(self, listener: Callable[[RoutingSnapshot], None]) -> Callable[[], None]:
        """Call `listener` with the present snapshot and each later one; the result ends it."""
        self._listeners.append(listener)
        listener(self.snapshot())
        return lambda: self._listeners.remove(listener)

    def _notify(self) -> None:
        snapshot = self.snapshot()
        for listener in tuple(self._listeners):
            listener(snapshot)
