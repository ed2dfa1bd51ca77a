"""Events on disk: the last ones outlive the daemon, in a file beside the state file, with one JSON object a line.

The file is bounded: at `MAX_BYTES` it is renamed to `….1`, in place of the one before. An event that `replaces` an
earlier one is a line of its own, and the earlier one is left out when the file is read.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import BinaryIO

import orjson

from teimgr.control.events.fleet_events import KEPT, EventLog, FleetEvent

log = logging.getLogger(__name__)

MAX_BYTES = 2**20
_MODE = 0o600
_FIELDS = frozenset(each.name for each in fields(FleetEvent))


class EventFile:
    """The file of a daemon's events."""

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
                # A line that a full disk or a power failure has cut would take this one with it.
                file.write(b"" if _ends_a_line(file) else b"\n")
                file.write(orjson.dumps(event) + b"\n")
                size = file.tell()
            if size > self._max_bytes:
                self.path.replace(self._old)
            self._alarm = None
        except OSError as error:
            if self._alarm is None:
                log.error("events are not saved", extra={"path": str(self.path), "reason": error.strerror})
            self._alarm = f"events are not saved: {self.path}: {error.strerror}"


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
