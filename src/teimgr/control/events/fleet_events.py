"""Fleet events: changes of instances, found by comparing views, in a ring buffer that readers follow.

The ring keeps the last `KEPT` events. A reader follows it at its own pace from any id. A reader slower than the ring
misses events and gets their number, so it delays no other reader and costs no memory.

`EventFile` keeps events beside the state file, one JSON object per line. At `MAX_BYTES` it is renamed to `….1`, which
replaces the previous one. Reading the file leaves out events that a later line `replaces`.

Repeated failures are one event with a count: an event of `FOLDED` replaces an equal one among the last `FOLDED_OVER`
of its instance and gets a new id, so that readers see it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import BinaryIO

import orjson

from teimgr.control.residence.events import named_to
from teimgr.spec import Incident, InstanceSpec, InstanceView, now_rfc3339

log = logging.getLogger(__name__)

KEPT = 1000
KEPT_PER_INSTANCE = 100
FOLDED = frozenset({"crashed", "failed", "unhealthy", "over_memory", "no_host", "update_failed", "reload_refused"})
FOLDED_OVER = 4
MAX_BYTES = 2**20
_MODE = 0o600
_BETWEEN = ("starting", "running")
# Events whose reasons name other instances; `unloaded` did so in earlier versions, whose events are still in files.
_NAMES_OTHERS = frozenset({"evicted", "unloaded", "war"})
# Events attributed to the last order of an instance, and events after which that order is forgotten.
_ORDERED = frozenset({"created", "starting", "stopping", "stopped", "updated", "update_failed", "deleted"})
_ENDS_ORDERS = frozenset({"running", "stopped", "failed", "unloaded", "deleted", "crashed", "updated", "update_failed"})
_NUMBER = re.compile(r"(?<!replica )(?<!\d)\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetEvent:
    """One event. `id` counts from 1 and goes on after a restart of the daemon.

    `status` and `reason` are those of the instance at that time. An event of the configuration has "" for `instance`,
    `model_id` and `status`.

    `crashed` has the worker's reason and the name of its crash report in the folder `crashes` beside the logs. `nodes`
    are the hosts of the instance's workers in a cluster. The event stands for `count` equal ones since
    `first_timestamp` and `replaces` the one with that id. `by` is who ordered it (`request_context.ORDERED_BY`), or
    None.
    """

    id: int
    timestamp: str
    event: str
    instance: str
    model_id: str
    status: str
    reason: str | None
    tags: dict[str, str] = field(default_factory=dict)
    crash_report: str | None = None
    nodes: tuple[str, ...] = ()
    count: int = 1
    first_timestamp: str | None = None
    replaces: int | None = None
    by: str | None = None


def known_to(event: FleetEvent, covers: Callable[[str], bool]) -> FleetEvent:
    """The event without the names of other instances, but for those that `covers` accepts."""
    if event.reason is None or event.event not in _NAMES_OTHERS:
        return event
    return replace(event, reason=named_to(covers, event.reason))


class EventLog:
    """The ring buffer of events, found by comparing consecutive views. The first `note` is the baseline."""

    def __init__(self, kept: int = KEPT) -> None:
        self._ring: dict[int, FleetEvent] = {}
        self._kept = kept
        self._last_dropped = 0
        self._histories: dict[str, deque[FleetEvent]] = {}
        self._views: dict[str, InstanceView] | None = None
        self._latest = 0
        self._appended = asyncio.Event()
        self._closed = False
        self._orders: dict[str, str] = {}

    @property
    def latest(self) -> int:
        """The id of the last event; 0 before the first."""
        return self._latest

    @property
    def is_closed(self) -> bool:
        return self._closed

    def restore(self, events: Iterable[FleetEvent]) -> None:
        """Before anything else: begin with the events of the daemon before, oldest first."""
        for event in events:
            self._latest = event.id
            self._keep(event)
        self._last_dropped = min(self._ring, default=1) - 1

    def ordered(self, instance: str, by: str | None) -> None:
        """The changes of the instance are by this caller, until it runs, has stopped or has crashed."""
        if by is None:
            self._orders.pop(instance, None)
        else:
            self._orders[instance] = by

    def note(self, views: Sequence[InstanceView]) -> None:
        """Append the events that lead from the views before to these, which are all instances."""
        now = {view.spec.name: view for view in views}
        if self._views is None:
            self._views = now
            return
        for name, view in now.items():
            self.note_one(name, view)
        for name in self._views.keys() - now.keys():
            self.note_one(name, None)

    def note_one(self, name: str, view: InstanceView | None) -> None:
        """Append the events that lead to the present view of an instance, None for a deleted one."""
        if self._views is None:
            return
        before = self._views.pop(name, None)
        if view is not None:
            self._views[name] = view
            if view.incident is not None and (before is None or before.incident != view.incident):
                # A crash and the change of state that follows arrive in one view: the crash has the state before.
                self._append(view.incident.event, replace(view, state=(before or view).state), view.incident)
            for kind in _changes(before, view):
                self._append(kind, view)
        elif before is not None:
            self._append("deleted", before)

    def note_configuration(self, kind: str, reason: str, by: str | None) -> None:
        """Append an event of the configuration, which is of no instance."""
        now = now_rfc3339()
        self._add(
            FleetEvent(id=0, timestamp=now, event=kind, instance="", model_id="", status="", reason=reason, by=by)
        )

    def since(self, id: int) -> Iterator[FleetEvent]:
        """The events after `id` that are still kept, oldest first."""
        return iter([event for event in self._ring.values() if event.id > id])

    def history(self, instance: str) -> list[FleetEvent]:
        """The last events of an instance that exists, oldest first."""
        return [*self._histories.get(instance, ())]

    async def follow(self, id: int) -> AsyncGenerator[tuple[FleetEvent, int]]:
        """The events after `id`, and each new one, with how many were missed before it; ends when the log is closed."""
        while True:
            appended, missed = self._appended, max(0, self._last_dropped - id)
            for event in self.since(id):
                yield event, missed
                id, missed = event.id, 0
            if self._closed:
                return
            await appended.wait()

    def close(self) -> None:
        self._closed = True
        self._wake()

    def _append(self, kind: str, view: InstanceView, incident: Incident | None = None) -> None:
        by = self._orders.get(view.spec.name) if kind in _ORDERED else None
        if kind in _ENDS_ORDERS:
            self._orders.pop(view.spec.name, None)
        event = FleetEvent(
            id=0,
            timestamp=now_rfc3339(),
            event=kind,
            instance=view.spec.name,
            model_id=view.spec.model_id,
            status=view.state.value,
            reason=incident.reason if incident else view.reason,
            tags=dict(view.spec.tags),
            crash_report=incident.crash_report if incident else None,
            nodes=tuple(sorted({worker.node for worker in view.workers if worker.node})),
            by=by,
        )
        self._add(event)

    def _add(self, event: FleetEvent) -> None:
        """Append an event under the next id, in place of an equal one."""
        self._latest += 1
        event = replace(event, id=self._latest)
        history = self._histories.get(event.instance)
        equal = _equal_event(event, history) if history else None
        if history and equal is not None:
            self._ring.pop(equal.id, None)
            history.remove(equal)
            first = equal.first_timestamp or equal.timestamp
            event = replace(event, count=equal.count + 1, first_timestamp=first, replaces=equal.id)
        self._keep(event)
        self._wake()

    def _keep(self, event: FleetEvent) -> None:
        self._ring[event.id] = event
        if len(self._ring) > self._kept:
            self._last_dropped = next(iter(self._ring))
            del self._ring[self._last_dropped]
        if event.event == "deleted":
            self._histories.pop(event.instance, None)
        else:
            self._histories.setdefault(event.instance, deque(maxlen=KEPT_PER_INSTANCE)).append(event)

    def _wake(self) -> None:
        self._appended.set()
        self._appended = asyncio.Event()


def _equal_event(event: FleetEvent, history: Sequence[FleetEvent]) -> FleetEvent | None:
    """The earlier event that this one repeats; numbers in reasons, such as process ids, make no difference, but
    that of a replica does.

    What lies between two equal failures, such as `starting`, is folded as they are.
    """
    if event.event not in FOLDED and not (event.event in _BETWEEN and history and history[-1].count > 1):
        return None
    key = _fold_key(event)
    return next((each for each in [*history][: -FOLDED_OVER - 1 : -1] if _fold_key(each) == key), None)


def _fold_key(event: FleetEvent) -> tuple[str, str, str]:
    return event.event, event.status, _NUMBER.sub("0", event.reason or "")


def _changes(before: InstanceView | None, now: InstanceView) -> Iterator[str]:
    if before is None:
        yield "created"
    elif before.spec is not now.spec and _settings(before.spec) != _settings(now.spec):
        yield "updated"
    if before is None or before.state is not now.state:
        yield now.state.value
    if now.health_check_failures and not (before and before.health_check_failures):
        yield "unhealthy"


def _settings(spec: InstanceSpec) -> InstanceSpec:
    """The spec without the fields that start, stop and reload write."""
    return replace(spec, wanted_running=True, seeded=False, by_call=False, by_key="")


_FIELDS = frozenset(each.name for each in fields(FleetEvent))


class EventFile:
    """The event file of a daemon."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._old = path.with_name(f"{path.name}.1")
        self._max_bytes = max_bytes
        self._alarm: str | None = None

    def alarms(self) -> Sequence[str]:
        return [self._alarm] if self._alarm else []

    def read(self) -> list[FleetEvent]:
        """The last events, oldest first. Blocking; lines that cannot be read are left out."""
        found: dict[int, FleetEvent] = {}
        for path in (self._old, self.path):
            with contextlib.suppress(OSError), path.open("rb") as file:
                for line in file.read(2 * self._max_bytes).splitlines():
                    if (event := _event(line)) is not None:
                        found.pop(event.replaces or 0, None)
                        found[event.id] = event
        return [found[id] for id in sorted(found)][-KEPT:]

    @contextlib.asynccontextmanager
    async def following(self, events: EventLog) -> AsyncIterator[None]:
        """Write each new event while the block runs; at its end those that the closed log has."""
        task = asyncio.create_task(self._follow(events, events.latest), name="events to disk")
        try:
            yield
        finally:
            if not events.is_closed:
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _follow(self, events: EventLog, after: int) -> None:
        async for event, _ in events.follow(after):
            await asyncio.to_thread(self.write, event)

    def write(self, event: FleetEvent) -> None:
        """Append an event. Blocking; a disk that refuses is an alarm, and the event is in memory alone."""
        try:
            with open(self.path, "ab+", opener=_private) as file:
                # A full disk or a power failure may have cut the last line; begin a new one.
                file.write(b"" if _ends_a_line(file) else b"\n")
                file.write(orjson.dumps(event) + b"\n")
                size = file.tell()
            if size > self._max_bytes:
                self.path.replace(self._old)
            self._alarm = None
        except OSError as error:
            if self._alarm is None:
                log.error("events cannot be saved", extra={"path": str(self.path), "reason": error.strerror})
            self._alarm = f"events cannot be saved: {self.path}: {error.strerror}"


def events_path(state_file: Path) -> Path:
    return state_file.with_name(f"{state_file.stem}.events.jsonl")


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, _MODE)


def _ends_a_line(file: BinaryIO) -> bool:
    if not file.seek(0, os.SEEK_END):
        return True
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"


def _event(line: bytes) -> FleetEvent | None:
    try:
        values = orjson.loads(line)
        kept = {name: values[name] for name in _FIELDS & values.keys()}
        return FleetEvent(**kept | {"nodes": tuple(kept.get("nodes", ()))})
    except (ValueError, TypeError, AttributeError):
        return None
