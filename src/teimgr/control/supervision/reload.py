"""Configuration reload while the daemon runs: plan, then apply step by step.

The file overrides each instance that it names, including changes made by REST; other instances stay. An invalid file
changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field

from teimgr.config.settings import Settings
from teimgr.config.sources import Configuration, Source, content_of, digest_of, effective, plain, read
from teimgr.control.events.fleet_events import EventLog
from teimgr.control.supervision.manager import Manager
from teimgr.errors import InvalidConfig, TeimgrError
from teimgr.observability.request_context import ORDERED_BY
from teimgr.spec import KEYS, Change, InstanceSpec, key_of

log = logging.getLogger(__name__)

LIVE = frozenset(item.name for item in fields(Settings) if key_of(item).live)
"""Settings that a reload changes; the others take effect at the next start."""

_REASON_CHARS = 4096  # in an event; the log and the reply have the full text


@dataclass(frozen=True, slots=True)
class SettingChange:
    """A key with its old and new value; null for a missing key."""

    key: str
    before: Any
    after: Any
    source: str
    applies: Literal["at once", "at the next start"]


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """The changes. `left` lists instances of an earlier configuration that stay because pruning is off."""

    settings: list[SettingChange]
    create: list[str]
    update: Annotated[
        dict[str, dict[str, Any]], Field(description="by instance, the keys that change and their new values")
    ]
    recreate: Annotated[list[str], Field(description="deleted and created: a port changes")]
    remove: list[str]
    left: list[str]


@dataclass(frozen=True, slots=True)
class ReloadStep:
    """Result of one step."""

    action: Literal["remove", "update", "recreate", "create"]
    instance: str
    ok: bool
    error: str | None
    code: str | None


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The plan and the results of its steps; a dry run has no steps."""

    dry_run: bool
    plan: ReloadPlan
    steps: list[ReloadStep]
    failed: int


Move = tuple[Literal["remove", "update", "recreate", "create"], str, Callable[[], Awaitable[object]]]
"""Action, instance, and the call that carries it out."""


class Reloader:
    """Reads `source` on request, changes the fleet accordingly, and records the result in `events`.

    `apply` gets the current settings and the new live keys; it applies all of them or raises InvalidConfig.
    `configuration` is the one in effect: keys that change at the next start have their current values.
    """

    def __init__(
        self,
        source: Source,
        configuration: Configuration,
        fleet: Manager,
        apply: Callable[[Settings], None],
        events: EventLog,
    ) -> None:
        self.configuration = configuration
        self.source = source
        self._fleet = fleet
        self._apply = apply
        self._events = events
        self._tried = configuration.digest
        self._lock = asyncio.Lock()
        self._alarm: str | None = None

    @property
    def tried(self) -> str:
        """The digest of the file that was read last, whether it was applied or refused."""
        return self._tried

    def alarms(self) -> list[str]:
        return [self._alarm] if self._alarm else []

    def notices(self) -> list[str]:
        """Return a sentence for each seed whose instance is missing or differs: the state has precedence until a
        reload."""
        present = {view.spec.name: view.spec for view in self._fleet.list()}
        missing = (
            self.notice_of_missing(seed.name)
            for seed in self.configuration.settings.instances
            if seed.name not in present
        )
        return [*filter(None, missing)] + [
            f"instance {seed.name!r} differs from the configuration in {', '.join(changes)}; a reload moves it"
            for seed in self.configuration.settings.instances
            if (spec := present.get(seed.name)) and (changes := differences(seed, replace(spec, seeded=True)))
        ]

    def notice_of_missing(self, name: str) -> str | None:
        """Return the sentence about a seed without an instance; None if the configuration does not list it."""
        if all(seed.name != name for seed in self.configuration.settings.instances):
            return None
        return (
            f"instance {name!r} was deleted, but the configuration lists it: the next start or a reload creates it "
            f"again, unless it is removed there"
        )

    async def plan(self, *, prune: bool | None = None) -> Reloaded:
        """Return the changes that a reload would make now.

        Raises:
            InvalidConfig: The configuration is invalid.
        """
        plan, _ = self._plan(await asyncio.to_thread(read, self.source), prune)
        return Reloaded(dry_run=True, plan=plan, steps=[], failed=0)

    async def reload(self, *, prune: bool | None = None) -> Reloaded:
        """Apply the configuration as it is now. `prune` overrides the key `prune_seeds`.

        Raises:
            InvalidConfig: The configuration is invalid; nothing has changed, and an alarm stays until one succeeds.
        """
        async with self._lock:
            try:
                self._tried = ""  # the file cannot be read
                content = await asyncio.to_thread(content_of, self.source)
                self._tried = digest_of(content)
                found = await asyncio.to_thread(read, self.source, content)
                (plan, moves), configuration = self._plan(found, prune), _in_effect(self.configuration, found)
                self._apply(configuration.settings)
            except InvalidConfig as error:
                self._alarm = f"the configuration was not reloaded: {error.message}"
                log.error("reload refused", extra={"reason": error.message})
                self._record("reload_refused", error.message)
                raise
            self.configuration = configuration
            steps = [await _try(*move) for move in moves]
            failed = [f"{step.action} of {step.instance!r}: {step.error}" for step in steps if step.error is not None]
            self._alarm = f"the configuration was reloaded in part: {'; '.join(failed)}" if failed else None
            facts = {key: value for key, value in asdict(plan).items() if value}
            log.log(logging.ERROR if failed else logging.INFO, "reloaded", extra={"plan": facts, "failed": failed})
            if changes := [*_in_words(plan), *(f"failed: {each}" for each in failed)]:
                self._record("reloaded", "; ".join(changes))
            return Reloaded(dry_run=False, plan=plan, steps=steps, failed=len(failed))

    def _plan(self, found: Configuration, prune: bool | None) -> tuple[ReloadPlan, list[Move]]:
        """Return the plan, and its moves in order: removals make room first."""
        fleet = self._fleet
        seeds = {seed.name: seed for seed in found.settings.instances}
        present = {view.spec.name: view.spec for view in fleet.list()}
        changes = {name: differences(seed, present[name]) for name, seed in seeds.items() if name in present}
        recreate = [name for name, keys in changes.items() if any(KEYS[key].change is Change.FIXED for key in keys)]
        update = {name: keys for name, keys in changes.items() if keys and name not in recreate}
        create = [name for name in seeds if name not in present]
        unnamed = [name for name, spec in present.items() if spec.seeded and name not in seeds]
        remove, left = (unnamed, []) if (found.settings.prune_seeds if prune is None else prune) else ([], unnamed)
        plan = ReloadPlan(
            settings=list(_setting_changes(self.configuration, found)),
            create=create,
            update={name: plain(keys) for name, keys in update.items()},
            recreate=recreate,
            remove=remove,
            left=left,
        )
        moves: list[Move] = [
            *(("remove", name, partial(fleet.delete, name)) for name in remove),
            *(("update", name, partial(fleet.update, name, keys)) for name, keys in update.items()),
            *(("recreate", name, partial(fleet.recreate, seeds[name])) for name in recreate),
            *(("create", name, partial(fleet.create, seeds[name])) for name in create),
        ]
        return plan, moves

    def _record(self, kind: str, reason: str) -> None:
        self._events.note_configuration(kind, reason[:_REASON_CHARS], ORDERED_BY.get())


def _in_words(plan: ReloadPlan) -> Iterator[str]:
    """Yield the changes of a plan in words, without values, which may be long; nothing without changes."""
    updated = [f"{name} ({', '.join(keys)})" for name, keys in plan.update.items()]
    moved = {"created": plan.create, "updated": updated, "recreated": plan.recreate, "deleted": plan.remove}
    yield from (f"{verb} {', '.join(names)}" for verb, names in moved.items() if names)
    for applies in ("at once", "at the next start"):
        if keys := [each.key for each in plan.settings if each.applies == applies]:
            yield f"{applies}: {', '.join(keys)}"


def differences(seed: InstanceSpec, spec: InstanceSpec) -> dict[str, Any]:
    """Return the keys in which an instance differs from its seed, with the seed's values; open keys may differ.

    `replicas` may differ if the load decides about it.
    """
    own = {"name", "created_at", "wanted_running", *(("replicas",) if seed.max_replicas else ())}
    return {
        name: getattr(seed, name)
        for name, key in KEYS.items()
        if name not in own and getattr(seed, name) not in (key.left_open, getattr(spec, name))
    }


def _setting_changes(old: Configuration, new: Configuration) -> Iterator[SettingChange]:
    """Yield the keys that differ, except those of seeds, which `differences` compares."""
    live = live_keys(old.settings, new.settings)
    before = {each.path: each for each in effective(old) if not each.path.startswith("instances")}
    after = {each.path: each for each in effective(new) if not each.path.startswith("instances")}
    for path in {**before, **after}:
        was, will_be = before.get(path), after.get(path)
        if was is None or will_be is None or was.value != will_be.value:
            yield SettingChange(
                key=path,
                before=was.value if was else None,
                after=will_be.value if will_be else None,
                source=will_be.source if will_be else "default",
                applies="at once" if _top(path) in live else "at the next start",
            )


def live_keys(old: Settings, new: Settings) -> frozenset[str]:
    """Return the keys that change at once; turning TLS on or off needs another listener."""
    return LIVE if old.tls_files == new.tls_files else LIVE - {"auth"}


def _in_effect(old: Configuration, new: Configuration) -> Configuration:
    """Return the configuration in effect after a reload: live keys of the new one, the others of the old one."""
    live = live_keys(old.settings, new.settings)
    settings = replace(old.settings, **{name: getattr(new.settings, name) for name in live})
    kept = {path: by for path, by in old.sources.items() if _top(path) not in live}
    return Configuration(settings, kept | {path: by for path, by in new.sources.items() if _top(path) in live})


def _top(path: str) -> str:
    return re.split(r"[.\[]", path, maxsplit=1)[0]


async def _try(action: Any, name: str, move: Callable[[], Awaitable[object]]) -> ReloadStep:
    try:
        await move()
    except TeimgrError as error:
        return ReloadStep(action, name, ok=False, error=error.message, code=error.code.name)
    return ReloadStep(action, name, ok=True, error=None, code=None)
