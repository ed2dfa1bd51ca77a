"""Configuration reload while the daemon runs: plan, then apply step by step.

The file overrides every instance that it names, also what REST changed since; other instances stay. An invalid file
changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

from teimgr.config.settings import Settings
from teimgr.config.sources import Configuration, Source, Value, effective, plain, read
from teimgr.errors import InvalidConfig, TeimgrError
from teimgr.spec import KEYS, Change, InstanceSpec, key_of
from teimgr.supervision.manager import Manager

log = logging.getLogger(__name__)

LIVE = frozenset(item.name for item in fields(Settings) if key_of(item).live)
"""The settings that a reload changes; the others change at the next start."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Changes of a reload.

    `settings` are the keys with another value, old and new (None: absent); those in or below the keys of `live` change
    at once. Of the instances, `update` has the changed keys by name, `recreate` what an update cannot do, `remove` what
    only an earlier configuration named; with pruning off those are `left`.
    """

    settings: tuple[tuple[Value | None, Value | None], ...]
    live: frozenset[str]
    create: tuple[InstanceSpec, ...]
    update: Mapping[str, Mapping[str, Any]]
    recreate: tuple[InstanceSpec, ...]
    remove: tuple[str, ...]
    left: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "settings": [_change(before, after, self.live) for before, after in self.settings],
            "create": [spec.name for spec in self.create],
            "update": {name: plain(changes) for name, changes in self.update.items()},
            "recreate": [spec.name for spec in self.recreate],
            "remove": list(self.remove),
            "left": list(self.left),
        }


@dataclass(frozen=True, slots=True)
class Step:
    """Result of one step; `error` is None on success."""

    action: str
    instance: str
    error: TeimgrError | None


class Reloader:
    """Reads `source` again on request and moves the fleet to it.

    `apply` is called with the present settings and the new live keys; it applies all, or raises InvalidConfig.
    `configuration` is in effect: keys that change at the next start have their present values.
    """

    def __init__(
        self, source: Source, configuration: Configuration, fleet: Manager, apply: Callable[[Settings], None]
    ) -> None:
        self.configuration = configuration
        self._source = source
        self._fleet = fleet
        self._apply = apply
        self._lock = asyncio.Lock()
        self._alarm: str | None = None

    def alarms(self) -> list[str]:
        """The failure of the last reload, if it failed."""
        return [self._alarm] if self._alarm else []

    def notices(self) -> list[str]:
        """A sentence for each instance that differs from its seed: the state has precedence until a reload."""
        present = {view.spec.name: view.spec for view in self._fleet.list()}
        return [
            f"instance {seed.name!r} differs from the configuration in {', '.join(changes)}; a reload moves it"
            for seed in self.configuration.settings.instances
            if (spec := present.get(seed.name)) and (changes := differences(seed, replace(spec, seeded=True)))
        ]

    async def plan(self, *, prune: bool | None = None) -> Plan:
        """The changes of a reload now.

        Raises:
            InvalidConfig: The configuration is invalid.
        """
        return self._plan(await asyncio.to_thread(read, self._source), prune)

    async def reload(self, *, prune: bool | None = None) -> tuple[Plan, list[Step]]:
        """Apply the configuration as it is now. `prune` overrides the key `prune_seeds`.

        Raises:
            InvalidConfig: The configuration is invalid; nothing has changed, and an alarm stays until one succeeds.
        """
        async with self._lock:
            try:
                found = await asyncio.to_thread(read, self._source)
                plan, configuration = self._plan(found, prune), _in_effect(self.configuration, found)
                self._apply(configuration.settings)
            except InvalidConfig as error:
                self._alarm = f"the configuration was not reloaded: {error.message}"
                log.error("reload refused", extra={"reason": error.message})
                raise
            self.configuration = configuration
            steps = [await _try(*step) for step in self._steps(plan)]
            self._report(plan, steps)
            return plan, steps

    def _plan(self, found: Configuration, prune: bool | None) -> Plan:
        seeds = found.settings.instances
        known = {view.spec.name: view.spec for view in self._fleet.list()}
        changes = {seed.name: differences(seed, known[seed.name]) for seed in seeds if seed.name in known}
        again = {name for name, keys in changes.items() if any(KEYS[key].change is Change.FIXED for key in keys)}
        named = {seed.name for seed in seeds}
        gone = tuple(name for name, spec in known.items() if spec.seeded and name not in named)
        pruning = found.settings.prune_seeds if prune is None else prune
        return Plan(
            settings=tuple(_changed(self.configuration, found)),
            live=live_keys(self.configuration.settings, found.settings),
            create=tuple(seed for seed in seeds if seed.name not in known),
            update={name: keys for name, keys in changes.items() if keys and name not in again},
            recreate=tuple(seed for seed in seeds if seed.name in again),
            remove=gone if pruning else (),
            left=() if pruning else gone,
        )

    def _steps(self, plan: Plan) -> Iterator[tuple[str, str, Callable[[], Awaitable[object]]]]:
        """The steps in order: removals make room first."""
        fleet = self._fleet
        for name in plan.remove:
            yield "remove", name, partial(fleet.delete, name)
        for name, changes in plan.update.items():
            yield "update", name, partial(fleet.update, name, changes)
        for spec in plan.recreate:
            yield "recreate", spec.name, partial(self._recreate, spec)
        for spec in plan.create:
            yield "create", spec.name, partial(fleet.create, spec)

    async def _recreate(self, spec: InstanceSpec) -> None:
        await self._fleet.delete(spec.name)
        await self._fleet.create(spec)

    def _report(self, plan: Plan, steps: Sequence[Step]) -> None:
        failed = [f"{step.action} of {step.instance!r}: {step.error.message}" for step in steps if step.error]
        self._alarm = f"the configuration was reloaded in part: {'; '.join(failed)}" if failed else None
        facts = {key: value for key, value in plan.to_dict().items() if value}
        log.log(logging.ERROR if failed else logging.INFO, "reloaded", extra={"plan": facts, "failed": failed})


def differences(seed: InstanceSpec, spec: InstanceSpec) -> dict[str, Any]:
    """The keys in which an instance differs from its seed, with the seed's values; open keys may differ."""
    return {
        name: getattr(seed, name)
        for name, key in KEYS.items()
        if name not in ("name", "created_at", "wanted_running")
        and getattr(seed, name) not in (key.left_open, getattr(spec, name))
    }


def _changed(old: Configuration, new: Configuration) -> Iterator[tuple[Value | None, Value | None]]:
    """The keys that differ, except those of seeds, which `differences` has."""
    before = {each.path: each for each in effective(old) if not each.path.startswith("instances")}
    after = {each.path: each for each in effective(new) if not each.path.startswith("instances")}
    for path in {**before, **after}:
        was, will_be = before.get(path), after.get(path)
        if was is None or will_be is None or was.value != will_be.value:
            yield was, will_be


def live_keys(old: Settings, new: Settings) -> frozenset[str]:
    """The keys that change at once; turning TLS on or off needs another listener."""
    return LIVE if old.tls_files == new.tls_files else LIVE - {"auth"}


def _in_effect(old: Configuration, new: Configuration) -> Configuration:
    """The configuration in effect after a reload: live keys of the new one, the others of the old one."""
    live = live_keys(old.settings, new.settings)
    settings = replace(old.settings, **{name: getattr(new.settings, name) for name in live})
    kept = {path: by for path, by in old.sources.items() if _top(path) not in live}
    return Configuration(settings, kept | {path: by for path, by in new.sources.items() if _top(path) in live})


def _top(path: str) -> str:
    """The top-level key that the one at `path` is in or below."""
    return re.split(r"[.\[]", path, maxsplit=1)[0]


def _change(before: Value | None, after: Value | None, live: frozenset[str]) -> dict[str, Any]:
    each = after or before
    assert each is not None
    return {
        "key": each.path,
        "before": before.value if before else None,
        "after": after.value if after else None,
        "source": after.source if after else "default",
        "applies": "at once" if _top(each.path) in live else "at the next start",
    }


async def _try(action: str, name: str, move: Callable[[], Awaitable[object]]) -> Step:
    try:
        await move()
    except TeimgrError as error:
        return Step(action, name, error)
    return Step(action, name, None)
