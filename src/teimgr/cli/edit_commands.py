"""`teimgr create` and `edit`, with an option for every key of an instance, made from its declaration."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, Name, completes, options_of
from teimgr.cli.failures import ExitStatus, UsageError
from teimgr.cli.instance_commands import Timeout, Wait, addresses, await_running
from teimgr.cli.output import say
from teimgr.client.rest_client import RestClient
from teimgr.client.rest_values import Instance
from teimgr.errors import NoHost, TeimgrError
from teimgr.files import expanded
from teimgr.spec import KEYS, InstanceKey, State, updatable

_HOSTS = {"node", "labels"}
_PLACEMENT_KEY, _PLACEMENT_S = "cluster.placement_timeout_secs", 30.0
_HOST_PAUSE_S = 1.0
_PANEL = "Keys of the instance"
_HEAD = '# Keys of {name}. Save and close to apply what you change; `x = "default"` resets a key to its default.'
_DEFAULT = "default"
_TABLES = {"tags": "--tag", "labels": "--label"}
"""Keys that are tables, and the option for one entry."""


def _types() -> dict[str, Literal["int", "bool", "text"]]:
    """What each key's text is converted to; a key that also has words stays a text where it is not a number."""
    from dataclasses import fields

    from teimgr.spec import InstanceSpec

    def word(annotation: str) -> Literal["int", "bool", "text"]:
        return "bool" if annotation == "bool" else "int" if "int" in annotation else "text"

    return {item.name: word(str(item.type)) for item in fields(InstanceSpec)}


InstanceTypes = _types()
_METAVARS = {"int": "INT", "bool": "true|false", "text": "VALUE"}


def _option(name: str, key: InstanceKey) -> tuple[str, Any, Any]:
    """The option of a key. All are texts: `_value` converts them, so that `default` can be one of their values."""
    flag = "--" + name.replace("_", "-")
    choice = f" One of {', '.join(key.words)}." if key.words else ""
    meaning = f"{key.meaning[:1].upper()}{key.meaning[1:]}.{choice}"
    if name in _TABLES:
        option = typer.Option(_TABLES[name], metavar="KEY=VALUE", help=meaning + " Several.", rich_help_panel=_PANEL)
        return name, Annotated[list[str] | None, option], None
    if name == "extra_args":
        option = typer.Option("--extra-arg", metavar="ARG", help=meaning + " Several.", rich_help_panel=_PANEL)
        return name, Annotated[list[str] | None, option], None
    kind = InstanceTypes[name]
    words = key.words or (("true", "false") if kind == "bool" else ())
    option = typer.Option(
        flag,
        metavar=_METAVARS[kind],
        help=meaning,
        rich_help_panel=_PANEL,
        show_default=False,
        autocompletion=completes(words),
    )
    return name, Annotated[str | None, option], None


_CREATED = [_option(name, key) for name, key in KEYS.items() if key.in_rest and name not in ("name", "model_id")]
_CHANGED = [_option(name, key) for name, key in KEYS.items() if updatable(name) and name != "model_id"]


@options_of(*_CREATED)
def create(
    server: DaemonOptions,
    output: CommandOutput,
    name: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
    model: Annotated[
        str | None, typer.Argument(help="Id on the model hub, or a directory on the daemon's host.", show_default=False)
    ] = None,
    template: Annotated[str | None, typer.Option(help="Template of the configuration; it may name the model.")] = None,
    wait: Wait = False,
    timeout: Timeout = 300.0,
    **given: Any,
) -> int:
    """Create an instance and start it."""
    if model is None and template is None:
        raise UsageError("name a model, such as sentence-transformers/all-MiniLM-L6-v2, or a --template")
    keys = _values(given)
    if template is not None:
        keys["template"] = template
    wait_s = min(timeout, _placement_s(server.rest)) if wait and keys.keys() & _HOSTS else 0.0
    instance = _created(server.rest, output, wait_s, name, absolute_model(model), keys)
    return _finish(server, output, instance, "created", wait, timeout)


def _created(
    rest: RestClient, output: CommandOutput, wait_s: float, name: str, model: str | None, keys: Mapping[str, Any]
) -> Instance:
    """Create it; while no host fits, wait up to `wait_s` for one that joins.

    Raises:
        NoHost: none has joined.
    """
    end, is_noted = time.monotonic() + wait_s, False
    while True:
        try:
            return rest.create(name, model, **keys)
        except NoHost as error:
            left_s = end - time.monotonic()
            if left_s <= 0:
                raise
            if not is_noted:
                output.note(f"{error.message}; waiting up to {wait_s:g} s for a host to join")
                is_noted = True
        time.sleep(min(_HOST_PAUSE_S, left_s))


def _placement_s(rest: RestClient) -> float:
    """How long the daemon waits for a host; its default where this caller may not read it."""
    try:
        return next((float(each["value"]) for each in rest.config() if each["key"] == _PLACEMENT_KEY), _PLACEMENT_S)
    except TeimgrError:
        return _PLACEMENT_S


@options_of(*_CHANGED)
def edit(
    server: DaemonOptions,
    output: CommandOutput,
    name: Name,
    model: Annotated[str | None, typer.Option(help="Another model.")] = None,
    recreate: Annotated[
        bool, typer.Option("--recreate", help="End the old workers before the new ones start.")
    ] = False,
    port: Annotated[
        int | None, typer.Option(hidden=True, help="Cannot be changed; the daemon's reply explains why.")
    ] = None,
    wait: Wait = False,
    timeout: Timeout = 300.0,
    **given: Any,
) -> int:
    """Change an instance without a gap.

    `default` as a value takes a key back to its default. Without keys, an editor opens.
    """
    changes = _values(given)
    if port is not None:
        changes["port"] = port
    if model is not None:
        changes["model_id"] = absolute_model(model)
    if not changes:
        changes = _edited(name, server.rest.get(name))
        if not changes:
            output.note(f"{name}: nothing changed")
            return ExitStatus.OK
    instance = server.rest.update(name, recreate=recreate, **changes)
    return _finish(server, output, instance, "updated", wait, timeout)


def _finish(
    server: DaemonOptions, output: CommandOutput, instance: Instance, done: str, wait: bool, timeout_s: float
) -> int:
    if wait:
        [instance] = await_running(server.rest, [instance.name], timeout_s, output)
    if output.as_json:
        output.value(instance.details)
    elif output.is_terminal:
        update = (instance.details.get("update") or {}).get("state") == "rolling"
        state = "updating" if update else instance.status.value
        states = [state] if update else [done, state]
        say(f"{instance.name}: {', '.join(states)}, port {instance.port}")
        if not wait and state != "running":
            output.note(f"`teimgr wait {instance.name}` waits until it serves")
    else:
        output.table(("name", "status", "port"), [(instance.name, instance.status.value, instance.port)])
    return ExitStatus.OK


def absolute_model(model: str | None) -> str | None:
    """A directory here as an absolute path: the daemon's working directory is another. The rest is left as it is."""
    if model is not None and model.startswith((".", "~", "/")):
        return str(expanded(model).absolute())
    return str(Path(model).absolute()) if model is not None and Path(model).is_dir() else model


def _values(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that were given, as REST takes them."""
    return {name: _value(name, text) for name, text in given.items() if text not in (None, [])}


def _value(name: str, text: Any) -> Any:
    if isinstance(text, list):
        return None if text == [_DEFAULT] else (dict(map(partial(_pair, name), text)) if name in _TABLES else text)
    if text == _DEFAULT:
        return None
    kind = InstanceTypes[name]
    if kind == "bool":
        if text not in ("true", "false"):
            raise UsageError(f"--{name.replace('_', '-')} is true or false, not {text!r}")
        return text == "true"
    return int(text) if kind == "int" and text.lstrip("-").isdecimal() else text


def _pair(table: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"{_TABLES[table]} is KEY=VALUE, not {text!r}")
    return name, value


def _edited(name: str, instance: Instance) -> dict[str, Any]:
    """What a person changed in an editor.

    Raises:
        UsageError: there is no terminal or editor, or the text is not TOML any more.
    """
    import tomli_w

    if not sys.stdin.isatty():
        raise UsageError(f"name what to change, such as `teimgr edit {name} --replicas 2`; see `teimgr edit --help`")
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    before = {key: value for key in KEYS if updatable(key) and (value := instance.details.get(key)) is not None}
    absent = [f"# {key} = …  # {KEYS[key].meaning}" for key in KEYS if updatable(key) and key not in before]
    text = "\n".join([_HEAD.format(name=name), "", *absent, "", tomli_w.dumps(before)])
    with tempfile.TemporaryDirectory(prefix="teimgr-edit") as folder:
        file = Path(folder) / f"{name}.toml"
        file.write_text(text, encoding="utf-8")
        try:
            status = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode
        except OSError as error:
            raise UsageError(f"the editor {editor!r}: {error.strerror}; set EDITOR") from error
        if status:
            raise UsageError(f"the editor {editor!r} failed; set EDITOR, or name what to change by options")
        try:
            after = tomllib.loads(file.read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise UsageError(f"the saved text is not valid TOML: {error}") from error
    return {key: None if value == _DEFAULT else value for key, value in after.items() if before.get(key, ...) != value}


_NAME_CHARS = 32


def run(
    server: DaemonOptions,
    output: CommandOutput,
    model: Annotated[
        str, typer.Argument(help="Id on the model hub, or a directory on the daemon's host.", show_default=False)
    ],
    name: Annotated[str | None, typer.Option(help="Name of the instance; default: the end of the model's id.")] = None,
    timeout: Timeout = 300.0,
) -> int:
    """Serve a model: create an instance, or start the one there is, and wait. The name of an instance stands for it.

    Shows where to call it. It goes on in the daemon when this command has ended.
    """
    wanted = absolute_model(model) or model
    instances = server.rest.list()
    found = next((each for each in instances if each.model_id == wanted and name in (None, each.name)), None)
    if found is None and name is None and wanted == model:  # not a folder
        found = next((each for each in instances if each.name == model), None)
    if found is None:
        found = server.rest.create(name or proposed_name(model, {each.name for each in instances}), wanted)
    elif found.status in (State.STOPPED, State.FAILED):
        found = server.rest.start(found.name)
    [instance] = await_running(server.rest, [found.name], timeout, output)
    if output.as_json:
        output.value(instance.details)
    else:
        for line in addresses(instance, server.connection.url):
            say(line)
    return ExitStatus.OK


def proposed_name(model: str, taken: set[str]) -> str:
    """A name for an instance by its model: the end of the id in lower case, with a number where that is taken."""
    end = model.rstrip("/").rpartition("/")[2].lower()
    base = re.sub(r"[^a-z0-9._-]+", "-", end).strip("._-")[:_NAME_CHARS].rstrip("._-") or "model"
    numbered = (f"{base}-{number}" for number in range(2, len(taken) + 3))
    return base if base not in taken else next(each for each in numbered if each not in taken)
