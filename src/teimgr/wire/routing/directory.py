"""`Directory`: the daemon's map from instances to worker endpoints, from which routers take their routes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace

from teimgr.spec import RouteEntry, RoutingSnapshot

RouteListener = Callable[[str, RouteEntry | None], None]
"""Gets the name of an instance and its new entry; None if it was deleted."""


class Directory:
    """The current routes of the daemon, with listeners that are called synchronously with each change.

    `version` counts the changes. Each `ManagedInstance` publishes its own entry. Routers of daemon and muxes listen.
    """

    def __init__(self) -> None:
        self.version = 0
        self._entries: dict[str, RouteEntry] = {}
        self._listeners: list[RouteListener] = []
        self._confirmations: list[Callable[[], Awaitable[None]]] = []
        self._defaults: Mapping[str, str] = {}

    def set_defaults(self, defaults: Mapping[str, str]) -> None:
        """Set the default instance of each kind, for calls that name none; it need not exist yet."""
        self._defaults = defaults
        for entry in tuple(self._entries.values()):
            self.publish(entry)

    def publish(self, entry: RouteEntry) -> None:
        """Add or replace the entry of one instance; the entry of a new name is appended."""
        if self._defaults or entry.default_for:
            kinds = tuple(kind for kind, name in self._defaults.items() if name == entry.name)
            entry = replace(entry, default_for=kinds)
        if self._entries.get(entry.name) != entry:
            self._entries[entry.name] = entry
            self._notify(entry.name, entry)

    def remove(self, name: str) -> None:
        """Remove a deleted instance; no effect for an unknown name."""
        if self._entries.pop(name, None) is not None:
            self._notify(name, None)

    def entry(self, name: str) -> RouteEntry | None:
        """Return the entry of one instance; None for an unknown name."""
        return self._entries.get(name)

    def snapshot(self) -> RoutingSnapshot:
        return RoutingSnapshot(tuple(self._entries.values()))

    def subscribe(self, listener: RouteListener) -> Callable[[], None]:
        """Call `listener` with each later change; return the function that unsubscribes it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def confirm_by(self, confirmation: Callable[[], Awaitable[None]]) -> None:
        """Have `confirmed` also wait for `confirmation`, which returns when other processes use the present routes."""
        self._confirmations.append(confirmation)

    async def confirmed(self) -> None:
        """Return when every router of another process uses the routes as they are now."""
        await asyncio.gather(*(confirmation() for confirmation in self._confirmations))

    def _notify(self, name: str, entry: RouteEntry | None) -> None:
        self.version += 1
        for listener in tuple(self._listeners):
            listener(name, entry)
