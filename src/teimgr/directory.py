"""Directory of instances and their worker sockets: the interface from the control plane to the data plane.

Supervisors publish their own instance; routers, in the daemon and in each mux, read snapshots.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from teimgr.spec import State


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """One live replica: its unix socket, and the incarnation that its worker reports in reply to WATCH."""

    socket: str
    incarnation: str


@dataclass(frozen=True, slots=True)
class RouteEntry:
    """Route of one instance. `endpoints` is empty unless `state` is running."""

    name: str
    model_id: str
    state: State
    reason: str | None = None
    dimension: int = 0
    endpoints: tuple[WorkerEndpoint, ...] = ()

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RouteEntry:
        """The inverse of `dataclasses.asdict`, also after a way through JSON."""
        endpoints = tuple(WorkerEndpoint(**endpoint) for endpoint in values["endpoints"])
        return cls(**values | {"state": State(values["state"]), "endpoints": endpoints})


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """All instances in order of creation, which is that of `instance_index`."""

    entries: tuple[RouteEntry, ...] = ()

    def to_json(self) -> str:
        return json.dumps([asdict(entry) for entry in self.entries])

    @classmethod
    def from_json(cls, text: str) -> RoutingSnapshot:
        return cls(tuple(map(RouteEntry.from_dict, json.loads(text))))


RouteListener = Callable[[str, RouteEntry | None], None]
"""Gets the name of an instance and its new entry; None where it was deleted."""


class Directory:
    """The current entries, with listeners that are called synchronously with each change."""

    def __init__(self) -> None:
        self._entries: dict[str, RouteEntry] = {}
        self._listeners: list[RouteListener] = []

    def publish(self, entry: RouteEntry) -> None:
        """Add or replace the entry of one instance; a new name goes to the end."""
        if self._entries.get(entry.name) != entry:
            self._entries[entry.name] = entry
            self._notify(entry.name, entry)

    def remove(self, name: str) -> None:
        """Remove a deleted instance; no effect for an unknown name."""
        if self._entries.pop(name, None) is not None:
            self._notify(name, None)

    def snapshot(self) -> RoutingSnapshot:
        return RoutingSnapshot(tuple(self._entries.values()))

    def subscribe(self, listener: RouteListener) -> Callable[[], None]:
        """Call `listener` with each later change; the result unsubscribes."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def _notify(self, name: str, entry: RouteEntry | None) -> None:
        for listener in tuple(self._listeners):
            listener(name, entry)
