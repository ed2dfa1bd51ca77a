"""The configuration in the making: settings and instances, and a finding for every key of the files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, get_type_hints

from teimgr.config import schema
from teimgr.config.instance_keys import key_faults, shown_args
from teimgr.config.schema import ConfigFaults
from teimgr.errors import InvalidConfig, InvalidInstanceName
from teimgr.spec import KEYS, U16, UNPRIVILEGED_PORT, InstanceSpec, check_name

MAX_INSTANCES = 256
_HINTS = get_type_hints(InstanceSpec)
ALL_ADDRESSES = "0.0.0.0"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class KeyOutcome(str, Enum):
    """What became of a key of a file."""

    CARRIED = "carried over"
    SAME = "same by default"
    NONE = "no counterpart"
    DECIDE = "needs a decision"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyFinding:
    """What became of one key: `key` of the table `place` in `file`; `target` is what it is in teimgr.

    No text has a value that may be a secret.
    """

    file: str
    place: str
    key: str
    outcome: KeyOutcome
    target: str = ""
    note: str = ""

    @property
    def path(self) -> str:
        return ".".join(filter(None, (self.place, self.key)))

    def to_dict(self) -> dict[str, str]:
        """For JSON, in which the file is `source`."""
        named = asdict(self) | {"outcome": self.outcome.value}
        return {"source": named.pop("file"), **named}


@dataclass(frozen=True, slots=True)
class Place:
    """A table of a file, such as one service: where findings are, and the notes that the output has about it."""

    draft: Draft
    file: str
    path: str
    names: tuple[tuple[str, str], ...] = ()
    """Beginnings of keys, each with what the file has in its place."""

    def found(self, key: str, outcome: KeyOutcome, target: str = "", note: str = "") -> None:
        key = next((named + key.removeprefix(ours) for ours, named in self.names if key.startswith(ours)), key)
        note = " ".join(note.split())
        finding = KeyFinding(file=self.file, place=self.path, key=key, outcome=outcome, target=target, note=note)
        self.draft.findings.append(finding)


@dataclass(slots=True)
class InstanceDraft:
    """One `[[instances]]` table. `keys` are those that differ from the defaults."""

    name: str
    place: Place
    keys: dict[str, Any] = field(default_factory=dict)
    extra_args: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, key: str, note: str = "") -> None:
        """Give the key `name` the plain value that `key` of the file has, unless it is the default or not possible."""
        try:
            typed = schema.convert(value, _HINTS[name], name, KEYS[name])
            alone: dict[str, Any] = {"name": self.name, "model_id": "m", name: typed}
            if faults := [fault for fault in key_faults(InstanceSpec(**alone)) if fault.path == name]:
                raise ConfigFaults(*faults)
        except ConfigFaults as error:
            self.place.found(key, KeyOutcome.DECIDE, note=f"left out: {error.message}")
            return
        if typed == _default(name):
            self.keys.pop(name, None)
            self.place.found(key, KeyOutcome.SAME, f"{name} = {toml(typed)}", note)
            return
        self.keys[name] = list(typed) if isinstance(typed, tuple) else typed
        self.place.found(key, KeyOutcome.CARRIED, f"{name} = {toml(self.keys[name])}", note)

    def add_flag(self, flag: str, value: str, key: str, note: str = "") -> None:
        """Put a flag of TEI into `extra_args`."""
        words = [flag, value]
        self.extra_args += words
        self.place.found(key, KeyOutcome.CARRIED, f"extra_args = {toml(shown_args(words))}", note)

    def table(self) -> dict[str, Any]:
        extra = {"extra_args": self.extra_args} if self.extra_args else {}
        return {"name": self.name, **self.keys, **extra}


class Draft:
    """Settings, instances and findings of one import."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}
        self.instances: list[InstanceDraft] = []
        self.findings: list[KeyFinding] = []
        self.environment: dict[str, str] = {}
        """Variables that the daemon's environment should have; the value is empty where it is a secret."""
        self.hosts: dict[str, set[str]] = {"instance_host": set(), "api_host": set()}
        """Addresses on which the listeners of a setting were published."""
        self.api_port: int | None = None
        """The published port of a server whose clients will use the daemon's REST port."""

    def publish_api_port(self, port: int) -> None:
        self.api_port = port

    def place(self, file: str, path: str = "") -> Place:
        return Place(self, file, path)

    def instance(self, wanted: str, place: Place, key: str) -> InstanceDraft:
        """A new instance, whose name is `wanted` made valid and unique.

        Raises:
            InvalidConfig: There are `MAX_INSTANCES` already.
        """
        if len(self.instances) >= MAX_INSTANCES:
            raise InvalidConfig(f"{place.file}: more than {MAX_INSTANCES} models")
        name = free_name(wanted, {instance.name for instance in self.instances})
        note = "" if name == wanted else "names begin with a letter or digit, are up to 64 characters long, and unique"
        place.found(key, KeyOutcome.CARRIED, f'name = "{name}"', note)
        self.instances.append(InstanceDraft(name, place))
        return self.instances[-1]

    def put(self, place: Place, name: str, value: Any, key: str, default: Any = None, note: str = "") -> None:
        """Give the setting `name` a value."""
        if value == default:
            place.found(key, KeyOutcome.SAME, f"{name} = {toml(value)}", note)
            return
        self.settings[name] = value
        place.found(key, KeyOutcome.CARRIED, name if isinstance(value, Mapping) else f"{name} = {toml(value)}", note)

    def put_port(self, instance: InstanceDraft, port: int, key: str) -> None:
        """Give an instance the port that its clients use, where teimgr can."""
        taken = {each.keys.get("port"): each.name for each in self.instances}
        if port < UNPRIVILEGED_PORT:
            note = f"teimgr's ports begin at {UNPRIVILEGED_PORT}: `teimgr ps` shows the free one that it takes instead"
            instance.place.found(key, KeyOutcome.DECIDE, note=f"{port}: {note}; move the clients, or forward the port")
        elif port in taken:
            note = f"{port} is the port of {taken[port]}; `teimgr ps` shows the free one that it takes instead"
            instance.place.found(key, KeyOutcome.DECIDE, note=note)
        else:
            instance.put("port", port, key)

    def finish(self, defaults: Mapping[str, int]) -> None:
        """Settle what concerns all: addresses of the listeners, and the daemon's ports beside those of instances."""
        place = self.place("", "")
        for setting, hosts in self.hosts.items():
            self._listen(place, setting, hosts)
        ports = {each.keys["port"]: each.name for each in self.instances if each.keys.get("port")}
        if self.api_port is not None and "api_port" not in self.settings:
            self.settings["api_port"] = self.api_port
        taken = set(ports)
        for setting, default in defaults.items():
            port = self.settings.get(setting, default)
            if port in taken:
                free = next(
                    each for each in range(defaults["api_port"], U16) if each not in taken | {*defaults.values()}
                )
                self.settings[setting] = free
                note = f"{port} is {'the port of ' + ports[port] if port in ports else 'taken'}"
                place.found("", KeyOutcome.CARRIED, f"{setting} = {free}", f"{note}; commands find it by TEIMGR_URL")
                port = free
            taken.add(port)

    def _listen(self, place: Place, setting: str, hosts: Iterable[str]) -> None:
        """Listen where the ports were published; on all addresses where they were published on several."""
        wanted = {"127.0.0.1" if host in _LOOPBACK else host for host in hosts}
        if not wanted or wanted == {"127.0.0.1"} or setting in self.settings:
            return
        host = next(iter(wanted)) if len(wanted) == 1 else ALL_ADDRESSES
        target = f'{setting} = "{host}"'
        if setting == "api_host" and "auth" not in self.settings:
            note = "left at 127.0.0.1: from other hosts, too, every caller could create instances; [auth] first"
            place.found("ports", KeyOutcome.DECIDE, target, note)
            return
        self.settings[setting] = host
        if len(wanted) > 1:
            note = f"the ports were published on several addresses; {setting} is one for all of them"
            place.found("ports", KeyOutcome.DECIDE, target, note)
        else:
            note = "" if host != ALL_ADDRESSES else "as docker publishes a port without an address: to every caller"
            place.found("ports", KeyOutcome.CARRIED, target, note)


def free_name(wanted: str, taken: Iterable[str]) -> str:
    """`wanted` as a valid name of an instance that is not in `taken`."""
    base = re.sub(r"[^A-Za-z0-9._-]+", "-", wanted).strip("._-")[:60] or "model"
    try:
        check_name(base)
    except InvalidInstanceName:
        base = f"{base}-model"
    used, name, count = set(taken), base, 1
    while name in used:
        count += 1
        name = f"{base}-{count}"
    return name


def _default(name: str) -> Any:
    fields = InstanceSpec.__dataclass_fields__
    return fields[name].default if name in fields else None


def toml(value: Any) -> str:
    """A value as TOML on one line; tables are inline."""
    import tomli_w

    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    return tomli_w.dumps({"x": value}).removeprefix("x = ").strip()
