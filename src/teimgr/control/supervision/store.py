"""Desired state of the fleet and its file, written before each change and retried if the write failed.

The state file lists the instances as TOML. It is replaced atomically, and the previous generation is kept.

state.toml                        tei-manager's format; further keys of teimgr only if they differ from the default
state.toml.prev                   the previous generation
state.toml.lock                   locked by the daemon that uses the state file
state.toml.corrupt-<time>         an unreadable file, set aside
state.toml.backup-<time>          a state that was not restored

The head of the file contains the SHA-256 of the lines below it, since a truncated file may be valid TOML. A file
without it is accepted: it is from tei-manager, or an operator who edited the file has deleted the line.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
import tomllib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import MISSING, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tomli_w

from teimgr.config import schema
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig, StateNotSaved, UpdateFailed, UpdateInProgress
from teimgr.files import duplicate, failure_of, lock_file, write_atomically
from teimgr.spec import A_CALL, MADE_BY, MADE_FOR, InstanceSpec, now_rfc3339

SET_ASIDE_KEPT = 5
# An update is given up after this many daemons ended during it.
_UPDATE_TRIES = 5
_RETRY_S = 5.0
_WRITE_LIMIT_S = 10.0  # a network disk may not answer
# The digest covers all bytes after the match.
_HEAD = re.compile(rb'\Alast_updated = "[^"\n]*"\nsha256 = "([0-9a-f]{64})"\n\n')
# Always written, in tei-manager's order; `extra_args` may be empty.
_ALWAYS = ("name", "model_id", "port", "max_batch_tokens", "max_concurrent_requests", "extra_args")
_DEFAULTS = {
    field.name: field.default if field.default_factory is MISSING else field.default_factory()
    for field in fields(InstanceSpec)
}

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """Instances read from disk. `alarm` describes what was left out or set aside."""

    specs: tuple[InstanceSpec, ...] = ()
    alarm: str | None = None


class Unreadable(Exception):
    """The bytes are not a valid state file; the text is the reason."""


class Store:
    """The state file at `path`, which may be a symbolic link. Only the holder of the lock writes it."""

    def __init__(self, path: Path) -> None:
        self._named = path
        self._path = path.resolve()
        self._previous = self._path.with_name(f"{self._path.name}.prev")
        self._is_damaged = False  # must not become the previous generation
        self._lock: int | None = None

    def open(self) -> None:
        """Lock the state file until this process ends or calls `close`; a second call changes nothing.

        Raises:
            InvalidConfig: another daemon uses the file, its folder cannot be written, or it is a symbolic link into a
                folder that does not exist (a volume that is not mounted).
        """
        if self._lock is not None:
            return
        folder = self._path.parent
        if self._named.is_symlink() and not folder.is_dir():
            raise InvalidConfig(f"state_file: {self._named} is a link to {self._path}, whose folder does not exist")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = lock_file(self._path.with_name(f"{self._path.name}.lock"))
        except OSError as error:
            raise InvalidConfig(f"state_file: cannot write in {folder}: {error.strerror}") from error
        if self._lock is None:
            raise InvalidConfig(f"state_file: another daemon uses {self._path}")

    def close(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def load(self) -> Loaded:
        """Return the last saved instances, or the previous generation if the file cannot be read. Never raises.

        A missing file is an empty state; users delete it to reset. If the previous generation exists, it is set aside
        with an alarm, since the file may also be missing by mistake.
        """
        try:
            loaded = parse(self._path.read_bytes())
        except FileNotFoundError:
            return self._start_empty()
        except (Unreadable, OSError) as error:
            return self._load_previous(f"state file {self._path} cannot be read ({error})")
        if loaded.alarm is None:
            return loaded
        return Loaded(loaded.specs, f"{loaded.alarm}; {self._try_set_aside()}")

    def save(self, specs: Iterable[InstanceSpec]) -> None:
        """Write `specs` durably: a power failure after the return does not lose them.

        Raises:
            OSError: The disk refused; the file is unchanged.
        """
        self._path.parent.mkdir(parents=True, exist_ok=True)
        previous = None if self._is_damaged else self._previous
        write_atomically(self._path, render(specs), mode=0o600, durable=True, previous=previous)
        self._is_damaged = False

    def set_aside(self, kind: str) -> Path | None:
        """Keep the present content as `<file>.{kind}-<time>`, with a few older ones; None if the file is missing."""
        aside = self._path.with_name(f"{self._path.name}.{kind}-{_now()}")
        try:
            duplicate(self._path, aside)
        except FileNotFoundError:
            return None
        for old in sorted(self._path.parent.glob(f"{self._path.name}.{kind}-*"))[:-SET_ASIDE_KEPT]:
            old.unlink(missing_ok=True)
        return aside

    def _start_empty(self) -> Loaded:
        missing = f"state file {self._path} is missing"
        if not self._previous.exists():
            return Loaded((), f"{missing}, to which {self._named} is a link" if self._named.is_symlink() else None)
        kept = self._path.with_name(f"{self._path.name}.backup-{_now()}")
        try:
            self._previous.rename(kept)
        except OSError as error:
            return Loaded((), f"{missing}; the previous generation could not be kept: {error}")
        return Loaded((), f"{missing}, no instance was restored; the previous generation is kept as {kept}")

    def _try_set_aside(self) -> str:
        try:
            return f"the file was kept as {self.set_aside('corrupt')}"
        except OSError as error:
            return f"the file could not be kept: {error}"

    def _load_previous(self, problem: str) -> Loaded:
        kept = self._try_set_aside()
        self._is_damaged = True
        try:
            found = parse(self._previous.read_bytes())
        except (Unreadable, OSError):
            return Loaded((), f"{problem}; {kept}; no valid previous generation, no instance was restored")
        done = "restored the previous generation"
        try:
            duplicate(self._previous, self._path)
            self._is_damaged = False
        except OSError as error:
            done = f"{done}, but could not copy it to {self._path.name}: {error}"
        return Loaded(found.specs, "; ".join(filter(None, (problem, kept, done, found.alarm))))


def parse(content: bytes) -> Loaded:
    """Parse the instances in a state file of teimgr or tei-manager; a bad entry is left out, with an alarm.

    Raises:
        Unreadable: It is not such a file.
    """
    if (head := _HEAD.match(content)) and hashlib.sha256(content[head.end() :]).hexdigest() != head[1].decode():
        raise Unreadable("sha256 does not match: the file is damaged, or was edited without deleting the line sha256")
    try:
        table = tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not TOML: {error}") from error
    entries = table.get("instances")
    if "last_updated" not in table or not isinstance(entries, list):
        raise Unreadable("last_updated or instances is missing")
    specs, problems = [], []
    for index, entry in enumerate(entries):
        try:
            specs.append(_read_entry(entry, f"instances[{index}]"))
        except InvalidConfig as error:
            problems.append(error.message)
        except RecursionError:  # raised for deeply nested dotted keys
            problems.append(f"instances[{index}]: nested too deep")
    return Loaded(tuple(specs), f"left out of the state file: {'; '.join(problems)}" if problems else None)


def render(specs: Iterable[InstanceSpec]) -> bytes:
    body = tomli_w.dumps({"instances": [_entry(spec) for spec in specs]}).encode()
    head = {"last_updated": now_rfc3339(), "sha256": hashlib.sha256(body).hexdigest()}
    return tomli_w.dumps(head).encode() + b"\n" + body


def _now() -> str:
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"


def _entry(spec: InstanceSpec) -> dict[str, Any]:
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    always = (*_ALWAYS, "by_call") if MADE_BY in spec.tags else _ALWAYS  # the tag may be a user's
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in values.items()
        if name in always or value != _DEFAULTS[name]
    }


def _read_entry(entry: object, path: str) -> InstanceSpec:
    if not isinstance(entry, Mapping):
        raise InvalidConfig(f"{path}: must be a table")
    known = {name: value for name, value in entry.items() if name in _DEFAULTS}
    if len(known) < len(entry):
        log.warning("unknown keys in the state file", extra={"entry": path, "keys": sorted(entry.keys() - known)})
    spec = schema.build(InstanceSpec, known, path)
    if "by_call" not in known and spec.tags.get(MADE_BY) == A_CALL:  # written by 0.1.0
        return replace(spec, by_call=True, by_key=spec.tags.get(MADE_FOR, ""))
    return spec


def wanted_at_boot(settings: Settings, store: Store) -> Loaded:
    """Return the instances of the state file, then the seeds with other names.

    With `auto_restore_on_restart` off, return only the seeds, and keep the old state as a backup. Ports that a seed
    leaves open come from the old state, so that live workers of the last daemon can be adopted.
    """
    state = store.load()
    known = {spec.name: spec for spec in state.specs}
    if settings.auto_restore_on_restart:
        new = [seed for seed in settings.instances if seed.name not in known]
        return Loaded((*state.specs, *new), state.alarm)
    return Loaded(tuple(_with_old_ports(seed, known) for seed in settings.instances), _back_up(store, state))


def _with_old_ports(seed: InstanceSpec, known: dict[str, InstanceSpec]) -> InstanceSpec:
    old = known.get(seed.name)
    if old is None:
        return seed
    prometheus = old.prometheus_port if seed.prometheus_port is None else seed.prometheus_port
    return replace(seed, port=seed.port or old.port, prometheus_port=prometheus)


def _back_up(store: Store, state: Loaded) -> str | None:
    if not state.specs:
        return state.alarm
    try:
        store.set_aside("backup")
    except OSError as error:
        return f"{state.alarm or 'the old state'} could not be backed up: {error}"
    return state.alarm


class WantedState:
    """The specs of all instances, with the changes about to be made and the updates in progress.

    `instances` yields the specs in effect. A change is written before it is applied, so an acknowledged change is on
    disk and a failed write leaves the fleet unchanged.
    """

    def __init__(self, store: Store, instances: Callable[[], Iterable[InstanceSpec]]) -> None:
        self._store = store
        self._instances = instances
        # Intended changes, persisted before they are applied (write-ahead). The command that adds one removes it;
        # `Manager` runs one command on a name at a time.
        self._creating: dict[str, InstanceSpec] = {}
        self._planned: dict[str, Callable[[InstanceSpec], InstanceSpec | None]] = {}
        self._committing: dict[str, InstanceSpec] = {}
        self._unfinished: dict[str, str] = {}  # updates interrupted by an earlier daemon's end, as JSON
        self._pending: dict[str, str] = {}  # updates in progress, as JSON
        self._tries: dict[str, int] = {}  # starts of the update by earlier daemons
        self._saving = asyncio.Lock()
        self._writing: set[asyncio.Task[None]] = set()
        self._is_late = False  # the current write has exceeded its time limit
        self._next_write: asyncio.Task[None] | None = None  # not begun yet
        self._saved: list[InstanceSpec] | None = None
        self._retry: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._load_alarms: list[str] = []
        self._save_alarm: str | None = None

    async def load(self, settings: Settings) -> list[InstanceSpec]:
        """Lock and read the state file; return its instances, with the seeds of the configuration.

        Raises:
            InvalidConfig: the file cannot be used, for instance because another daemon uses it.
        """
        self._store.open()
        loaded = await asyncio.to_thread(wanted_at_boot, settings, self._store)
        if loaded.alarm is not None:
            self.add_alarm(loaded.alarm)
        self._unfinished = {spec.name: spec.pending_update for spec in loaded.specs if spec.pending_update}
        return [replace(spec, pending_update=None) for spec in loaded.specs]

    async def close(self, limit_s: float | None = None) -> None:
        """Try a last time to write what the disk refused, and release the file.

        An unresponsive disk has `limit_s`. After that the file stays locked as long as the process lives, since the
        write may still take place.
        """
        self._closing.set()
        last = [*self._writing, *([self._retry] if self._retry is not None else [])]
        if last:
            _, late = await asyncio.wait(last, timeout=limit_s)
            if late:
                log.error("last write of the state file given up: the disk does not answer")
                return
        self._store.close()

    # Alarms

    @property
    def alarm_text(self) -> str | None:
        """The problems of the state file, in one line."""
        return "; ".join([*self._load_alarms, *filter(None, [self._save_alarm])]) or None

    def add_alarm(self, text: str) -> None:
        """Log and keep a problem of what was loaded."""
        log.error("state alarm", extra={"reason": text})
        self._load_alarms.append(text)

    @property
    def is_refused(self) -> bool:
        """True if the last write failed."""
        return self._save_alarm is not None

    # Changes of instances

    def specs(self) -> list[InstanceSpec]:
        """Return the instances, including those that are being created."""
        specs = list(self._instances())
        names = {spec.name for spec in specs}
        return [*specs, *(spec for name, spec in self._creating.items() if name not in names)]

    @asynccontextmanager
    async def creating(self, spec: InstanceSpec) -> AsyncIterator[None]:
        """Write the state with a new instance before the body adds it; `specs` has its name and ports at once.

        Raises:
            StateNotSaved: the disk refused; the body has not run.
        """
        self._creating[spec.name] = spec
        try:
            await self.write()
            yield
        finally:
            del self._creating[spec.name]
            await self.write_quietly()

    @asynccontextmanager
    async def planning(self, name: str, change: Callable[[InstanceSpec], InstanceSpec | None]) -> AsyncIterator[None]:
        """Write the state with `change` applied to the instance's spec (None removes it) before the body makes that
        change. One at a time for each name.

        If the body did not make the change, the state is written again.

        Raises:
            StateNotSaved: the disk refused; the body has not run.
        """
        self._planned[name] = change
        try:
            await self.write()
            yield
        finally:
            del self._planned[name]
            await self.write_quietly()

    async def save_spec(self, spec: InstanceSpec) -> None:
        """Write the state with `spec`, which takes effect when this returns.

        Raises:
            StateNotSaved: the disk refused.
        """
        self._committing[spec.name] = spec
        try:
            await self.write()
        finally:
            del self._committing[spec.name]

    def _as_planned(self, spec: InstanceSpec) -> InstanceSpec | None:
        spec = self._committing.get(spec.name, spec)
        change = self._planned.get(spec.name)
        return change(spec) if change is not None else spec

    # Updates under way

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The instances whose update was interrupted by an earlier daemon's end."""
        return tuple(self._unfinished)

    async def begin_update(self, name: str, changes: Mapping[str, Any], *, recreate: bool) -> str:
        """Write that an update was accepted: the next daemon completes it if this one dies.

        Returns:
            Its record, for `end_update`.

        Raises:
            UpdateInProgress: another one is under way.
            StateNotSaved: the disk refused.
        """
        if name in self._pending:
            raise UpdateInProgress(name)
        tries = self._tries.get(name, 0) + 1
        record = json.dumps({"changes": changes, "recreate": recreate, "tries": tries}, default=dict)
        self._pending[name] = record
        try:
            await self.write()
        except BaseException:
            await self.end_update(name, record)
            raise
        return record

    async def end_update(self, name: str, record: str) -> None:
        """Write that the update is over; no effect on a later update of the same name."""
        if self._pending.get(name) is record:
            self.drop_update(name)
            await self.write_quietly()

    def drop_update(self, name: str) -> None:
        """Drop the update of a deleted instance; the next write leaves it out."""
        self._pending.pop(name, None)
        self._tries.pop(name, None)

    @asynccontextmanager
    async def resuming(self, name: str) -> AsyncIterator[tuple[dict[str, Any], bool]]:
        """Yield the changes and `recreate` of an unfinished update, which the body resumes.

        Raises:
            UpdateFailed: the daemon ended too often during it, or the record cannot be read.
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
                raise UpdateFailed(f"the daemon ended {self._tries[name]} times during this update")
            yield changes, recreate
        finally:
            self._unfinished.pop(name, None)
            if name not in self._pending:
                self._tries.pop(name, None)
            await self.write_quietly()

    # Writing

    async def write(self) -> None:
        """Write the state if it is not on disk; if the disk refuses, also retry in the background.

        Raises:
            StateNotSaved: the disk refused, or did not answer in time, to this write or an earlier one.
        """
        writing = self._queue_write()
        if self._is_late:
            raise StateNotSaved(str(self._save_alarm))
        # The thread of a write cannot be cancelled: after a cancelled caller, the next write waits for this one.
        await asyncio.wait((writing,), timeout=_WRITE_LIMIT_S)
        if not writing.done():
            self._is_late = True
            self._queue_write()  # writes the state without the change refused here
            raise StateNotSaved(self._alarm(f"the disk has not answered for {_WRITE_LIMIT_S:g} s"))
        writing.result()

    def _queue_write(self) -> asyncio.Task[None]:
        """Return the next write, of which there is at most one."""
        if self._next_write is None:
            self._next_write = asyncio.create_task(self._write(), name="write of the state file")
            self._writing.add(self._next_write)
            self._next_write.add_done_callback(self._on_written)
        return self._next_write

    def _alarm(self, reason: str) -> str:
        text = f"the state cannot be saved: {reason}"
        if text != self._save_alarm:
            log.error("state alarm", extra={"reason": text})
        self._save_alarm = text
        return text

    def _on_written(self, writing: asyncio.Task[None]) -> None:
        self._writing.discard(writing)
        self._is_late = False
        if not writing.cancelled():
            writing.exception()  # marks it as retrieved; the alarm has the error

    async def _write(self) -> None:
        async with self._saving:
            self._next_write = None
            specs = [self._as_planned(spec) for spec in self.specs()]
            pending = self._unfinished | self._pending
            wanted = [replace(spec, pending_update=pending.get(spec.name)) for spec in specs if spec is not None]
            if wanted == self._saved and self._save_alarm is None:
                return
            try:
                await asyncio.to_thread(self._store.save, wanted)
            except OSError as error:
                problem = self._alarm(failure_of(error))
                if self._retry is None or self._retry.done():
                    self._retry = asyncio.create_task(self._write_until_saved(), name="retry of the state file")
                raise StateNotSaved(problem) from error
            self._saved = wanted
            self._save_alarm = None

    async def write_quietly(self) -> None:
        """Like `write`; a refusal only raises an alarm, since the change has been made already."""
        with suppress(StateNotSaved):
            await self.write()

    async def _write_until_saved(self) -> None:
        while self._save_alarm is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._closing.wait()
            await self.write_quietly()
            if self._closing.is_set():
                return
