"""Wanted state of the fleet, kept in the state file: written before each change, and again where the disk refused."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

from teimgr.config.settings import Settings
from teimgr.errors import StateNotSaved, UpdateFailed, UpdateInProgress
from teimgr.spec import InstanceSpec
from teimgr.supervision.store import Store, wanted_at_boot

# An update that the daemon did not survive so often is not begun again.
_UPDATE_TRIES = 5
# Between attempts to write the state file while the disk refuses.
_RETRY_S = 5.0

log = logging.getLogger(__name__)


class WantedState:
    """The specs of all instances, with the changes about to be made and the updates under way.

    `instances` yields the specs in effect. A change is written first and made afterwards, so an acknowledged change is
    on disk and a refused write leaves the fleet as it was.
    """

    def __init__(self, store: Store, instances: Callable[[], Iterable[InstanceSpec]]) -> None:
        self._store = store
        self._instances = instances
        self._planned: dict[str, InstanceSpec | None] = {}  # changes that are written before they are made
        self._unfinished: dict[str, str] = {}  # updates in whose midst an earlier daemon ended, as JSON
        self._pending: dict[str, str] = {}  # updates under way, as JSON
        self._tries: dict[str, int] = {}  # how often the update under way was begun by earlier daemons
        self._saving = asyncio.Lock()
        self._saved: list[InstanceSpec] | None = None
        self._retry: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._load_alarms: list[str] = []
        self._save_alarm: str | None = None

    async def load(self, settings: Settings) -> list[InstanceSpec]:
        """Lock and read the state file; the instances it wants, with the seeds of the configuration.

        Raises:
            InvalidConfig: the file cannot be used, as by another daemon.
        """
        self._store.open()
        loaded = await asyncio.to_thread(wanted_at_boot, settings, self._store)
        if loaded.alarm is not None:
            self.alarm(loaded.alarm)
        self._unfinished = {spec.name: spec.pending_update for spec in loaded.specs if spec.pending_update}
        return [replace(spec, pending_update=None) for spec in loaded.specs]

    async def close(self) -> None:
        """Try a last time to write what the disk refused, release the file."""
        self._closing.set()
        if self._retry is not None:
            await self._retry
        self._store.close()

    # Alarms

    @property
    def alarms(self) -> str | None:
        """What operators should know of the state file, in one line."""
        return "; ".join([*self._load_alarms, *filter(None, [self._save_alarm])]) or None

    def alarm(self, text: str) -> None:
        """Log and keep a problem of what was loaded."""
        log.error("state alarm", extra={"reason": text})
        self._load_alarms.append(text)

    @property
    def is_refused(self) -> bool:
        """Whether the last write failed."""
        return self._save_alarm is not None

    # Changes of instances

    def specs(self) -> list[InstanceSpec]:
        """The instances, and those that are being created."""
        specs = list(self._instances())
        names = {spec.name for spec in specs}
        return [*specs, *(spec for name, spec in self._planned.items() if spec is not None and name not in names)]

    @asynccontextmanager
    async def planning(self, name: str, spec: InstanceSpec | None) -> AsyncIterator[None]:
        """Write the state with `spec` for the instance `name`, or without it, before the body makes that change.

        What the body did not change after all is written again.

        Raises:
            StateNotSaved: the disk refused; the body has not run.
        """
        self._planned[name] = spec
        try:
            await self.write()
            yield
        finally:
            self._planned.pop(name, None)
            await self.settle()

    async def save_spec(self, spec: InstanceSpec) -> None:
        """Write the state with `spec`, which takes effect when this returns.

        Raises:
            StateNotSaved: the disk refused.
        """
        self._planned[spec.name] = spec
        try:
            await self.write()
        finally:
            self._planned.pop(spec.name, None)

    # Updates under way

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Instances in the midst of whose update an earlier daemon ended."""
        return tuple(self._unfinished)

    async def begin_update(self, name: str, changes: Mapping[str, Any], *, recreate: bool) -> None:
        """Write that an update was accepted: the next daemon completes it if this one dies.

        Raises:
            UpdateInProgress: another one is under way.
            StateNotSaved: the disk refused.
        """
        if name in self._pending:
            raise UpdateInProgress(name)
        tries = self._tries.get(name, 0) + 1
        self._pending[name] = json.dumps({"changes": changes, "recreate": recreate, "tries": tries}, default=dict)
        try:
            await self.write()
        except BaseException:
            await self.end_update(name)
            raise

    async def end_update(self, name: str) -> None:
        """Write that the update is over."""
        del self._pending[name]
        self._tries.pop(name, None)
        await self.settle()

    @asynccontextmanager
    async def resuming(self, name: str) -> AsyncIterator[tuple[dict[str, Any], bool]]:
        """The changes and `recreate` of an unfinished update, which the body begins again.

        Raises:
            UpdateFailed: the daemon ended too often in its midst, or the record cannot be read.
        """
        try:
            try:
                update = json.loads(self._unfinished[name])
                changes, recreate, self._tries[name] = update["changes"], update["recreate"], update["tries"]
                if changes.get("extra_args") is not None:
                    changes["extra_args"] = tuple(changes["extra_args"])
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UpdateFailed(f"its record cannot be read: {error}") from error
            if self._tries[name] >= _UPDATE_TRIES:
                raise UpdateFailed(f"the daemon ended {self._tries[name]} times in its midst")
            yield changes, recreate
        finally:
            del self._unfinished[name]
            if name not in self._pending:
                self._tries.pop(name, None)
            await self.settle()

    # Writing

    async def write(self) -> None:
        """Write the state if it is not on disk; where the disk refuses, try again in the background too.

        Raises:
            StateNotSaved: the disk refused.
        """
        async with self._saving:
            specs = [self._planned.get(spec.name, spec) for spec in self.specs()]
            pending = self._unfinished | self._pending
            wanted = [replace(spec, pending_update=pending.get(spec.name)) for spec in specs if spec is not None]
            if wanted == self._saved and self._save_alarm is None:
                return
            try:
                await asyncio.to_thread(self._store.save, wanted)
            except OSError as error:
                problem = self._save_alarm = f"the state cannot be saved: {error}"
                log.error("state alarm", extra={"reason": problem})
                if self._retry is None or self._retry.done():
                    self._retry = asyncio.create_task(self._write_until_saved(), name="retry of the state file")
                raise StateNotSaved(problem) from error
            self._saved = wanted
            self._save_alarm = None

    async def settle(self) -> None:
        """As `write`; a refusal is an alarm alone, for what was changed cannot be refused any more."""
        with suppress(StateNotSaved):
            await self.write()

    async def _write_until_saved(self) -> None:
        while self._save_alarm is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _RETRY_S)
            await self.settle()
            if self._closing.is_set():
                return
