"""Conversion of tei-manager's TOML: its configuration, and its state file, which lists the instances alone."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from teimgr.cli.migration.draft import ALL_ADDRESSES, MAX_INSTANCES, Draft, KeyOutcome, Place
from teimgr.cli.migration.interpolation import read_text
from teimgr.cli.migration.tei_service import options_of, put_flags
from teimgr.config.settings import Settings
from teimgr.errors import InvalidConfig
from teimgr.spec import KEYS, key_of

MAX_FILE_BYTES = 256 * 1024
_HOSTS = ("api_host", "grpc_host", "instance_host")
_TABLES = ("instances", "auth", "otel", "models")
_NOT_CARRIED = {
    "state_file": "teimgr keeps its own state in state_dir; name tei-manager's as a second FILE of the import",
    "tei_binary_path": "teimgr's workers run the models, no binary is started",
}
# tei-manager's defaults that are not teimgr's.
_DEFAULTS = {"auto_restore_on_restart": False}


def is_state(table: Mapping[str, Any]) -> bool:
    """True if a table is a state file's."""
    return "last_updated" in table


def read_toml(path: Path) -> dict[str, Any]:
    """The table of a file.

    Raises:
        InvalidConfig: It cannot be read, is too large, or is no TOML.
    """
    text = read_text(path, MAX_FILE_BYTES)
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{path}: no TOML: {error}") from error


def convert(path: Path, table: Mapping[str, Any], draft: Draft) -> None:
    """Add the settings and the instances of one file to the draft; of two instances of one name the state's counts.

    Raises:
        InvalidConfig: `instances` is not a list of tables, or too long.
    """
    place = draft.place(str(path))
    if is_state(table):
        place.found("last_updated", KeyOutcome.NONE, note="the state of teimgr has its own")
    else:
        _settings(draft, place, table)
    instances = table.get("instances", [])
    if not isinstance(instances, list) or not all(isinstance(each, dict) for each in instances):
        raise InvalidConfig(f"{path}: instances: must be a list of tables")
    if len(instances) > MAX_INSTANCES:
        raise InvalidConfig(f"{path}: more than {MAX_INSTANCES} instances")
    for index, keys in enumerate(instances):
        _instance(draft, draft.place(str(path), f"instances[{index}]"), keys, is_state(table))


def _settings(draft: Draft, place: Place, table: Mapping[str, Any]) -> None:
    fields = Settings.__dataclass_fields__
    for name, value in {**_DEFAULTS, **table}.items():
        key = name if name in table else f"{name} (absent)"
        if name in _NOT_CARRIED:
            place.found(key, KeyOutcome.NONE, note=_NOT_CARRIED[name])
        elif name in _TABLES:
            if name != "instances":
                _table(draft, place, name, value)
        elif name not in fields or isinstance(value, dict):
            place.found(key, KeyOutcome.NONE, note="not a key of tei-manager, which ignores it")
        else:
            problem = key_of(fields[name]).out_of_range(value)
            if problem:
                place.found(key, KeyOutcome.DECIDE, note=f"left out: {problem}")
            else:
                draft.put(place, name, value, key, fields[name].default)
    for name in _HOSTS:
        note = "tei-manager listens on all addresses; teimgr's default is this host alone"
        draft.put(place, name, ALL_ADDRESSES, f"{name} (absent)", note=note)


def _table(draft: Draft, place: Place, name: str, value: Any) -> None:
    """A table that teimgr has under the same keys; what is in it is not shown."""
    if name == "auth" and isinstance(value, dict):
        value = dict(value)
        if value.pop("require_cert_headers", False):
            note = "a certificate in a header proves nothing and is refused: clients present theirs in the handshake"
            place.found("auth.require_cert_headers", KeyOutcome.DECIDE, note=note)
        if not value.get("enabled") and "mtls" not in value:
            place.found("auth", KeyOutcome.SAME, "auth.enabled = false")
            return
    draft.put(place, name, value, name)


def _instance(draft: Draft, place: Place, keys: Mapping[str, Any], from_state: bool) -> None:
    name = str(keys.get("name") or "")
    known = next((each for each in draft.instances if each.name == name), None)
    if known is not None and from_state:
        draft.instances.remove(known)
        place.found("name", KeyOutcome.CARRIED, f'name = "{name}"', "in place of the configuration's instance")
    elif known is not None:
        place.found("name", KeyOutcome.NONE, note=f"{name} is in the state file, which counts")
        return
    instance = draft.instance(name, place, "name")
    flags = keys.get("extra_args", [])
    for key, value in keys.items():
        if key in ("name", "extra_args"):
            continue
        if key == "created_at":
            place.found(key, KeyOutcome.NONE, note="the time of the creation by teimgr")
        elif key == "port":
            draft.put_port(instance, value, key) if isinstance(value, int) and value else None
        elif key not in KEYS or not KEYS[key].in_config:
            place.found(key, KeyOutcome.NONE, note="not a key of tei-manager, which ignores it")
        else:
            instance.put(key, value, key)
    if "model_id" not in instance.keys:
        draft.instances.remove(instance)
        place.found("model_id", KeyOutcome.DECIDE, note="no model is named: the instance was left out")
        return
    if isinstance(flags, list) and all(isinstance(word, str) for word in flags):
        put_flags(instance, options_of(flags, place, "extra_args"))
    else:
        place.found("extra_args", KeyOutcome.DECIDE, note="left out: not a list of texts")
