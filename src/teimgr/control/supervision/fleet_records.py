"""Follows up on a change of an instance: wakes waiting calls, records events, divides CPU threads among workers.

The cost of one change does not depend on the number of instances.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, Protocol

from teimgr.control.events.fleet_events import EventLog
from teimgr.control.placement.planner import Planner
from teimgr.control.supervision.crash_reports import Crash, CrashReports
from teimgr.observability.metrics import DaemonMetrics
from teimgr.observability.request_context import ORDERED_BY
from teimgr.spec import CpuThreads, Incident, InstanceSpec, InstanceView

_EVENTS_PER_REPORT = 20


class RecordedInstance(Protocol):
    """The part of an instance that the records read."""

    spec: InstanceSpec

    def view(self) -> InstanceView:
        """Return a snapshot for display."""

    @property
    def alive(self) -> Counter[str]:
        """Count the workers that exist or are being started, by host."""

    def set_threads(self, share: Callable[[str], CpuThreads]) -> None:
        """Set the CPU threads of each worker by the share of its host."""


class FleetRecords:
    """The events, counts, crash reports and metrics of all instances."""

    def __init__(self, planner: Planner, events: EventLog, metrics: DaemonMetrics, crash_reports: CrashReports) -> None:
        self.metrics = metrics
        self._planner = planner
        self._events = events
        self._crash_reports = crash_reports
        self._instances: dict[str, RecordedInstance] = {}  # those with live workers
        self._shares: dict[str, CpuThreads] = {}
        self._listeners: list[Callable[[str], None]] = []
        self._watchers: defaultdict[str, set[asyncio.Event]] = defaultdict(set)

    def follow(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of each instance that changes."""
        self._listeners.append(listener)

    def changed(self, instance: RecordedInstance) -> None:
        """Record a change of an instance's state; call it once after each change."""
        name = instance.spec.name
        self.wake(name)
        self._events.note_one(name, instance.view())
        self._instances[name] = instance
        self._share(name, instance.alive)
        for listener in self._listeners:
            listener(name)

    def ordered(self, name: str) -> None:
        """Note that the current task's caller ordered the instance's next change."""
        self._events.ordered(name, ORDERED_BY.get())

    def deleted(self, name: str) -> None:
        """Forget a deleted instance."""
        self.wake(name)
        self._events.note_one(name, None)
        self._share(name, Counter())

    def crashed(self, crash: Crash) -> tuple[Incident, Coroutine[Any, Any, None]]:
        """Like `CrashReports.report`; the report gets the last events of the instance."""
        events = [asdict(event) for event in self._events.history(crash.instance)[-_EVENTS_PER_REPORT:]]
        return self._crash_reports.report(replace(crash, events=events))

    @contextmanager
    def watching(self, name: str) -> Iterator[asyncio.Event]:
        """Provide an event that is set at each change of the instance within the block."""
        event = asyncio.Event()
        self._watchers[name].add(event)
        try:
            yield event
        finally:
            self._watchers[name].discard(event)
            if not self._watchers[name]:
                del self._watchers[name]

    def wake(self, name: str) -> None:
        """Wake those who watch an instance."""
        for event in self._watchers.get(name, ()):
            event.set()

    def _share(self, name: str, alive: Counter[str]) -> None:
        """Count the live workers of an instance, and send workers their share of the cores if it has changed.

        With more workers than cores, each has one core, so at most as many workers as cores get a message.
        """
        counts = self._planner.counts
        counts.set(name, alive)
        shares = {host: self._planner.share(count, host) for host, count in counts.alive.items() if count}
        before, self._shares = self._shares, shares
        if before != shares:
            for each in tuple(counts.instances):
                self._instances[each].set_threads(self._share_of)
        elif alive:
            self._instances[name].set_threads(self._share_of)
        if not alive:
            self._instances.pop(name, None)

    def _share_of(self, host: str) -> CpuThreads:
        return self._shares.get(host) or self._planner.share(1, host)
