"""`teimgr config …` and `teimgr key …`: configuration of a daemon, without calling one.

`teimgr context …`: named connections, kept in a file that only its owner can read.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from teimgr.cli.command import CommandOutput
from teimgr.cli.output import say
from teimgr.client.connection import ConnectionValues, Contexts
from teimgr.client.server_address import ServerAddress
from teimgr.errors import InvalidConfig


class RightChoice(str, Enum):
    """A right of a key."""

    ADMIN = "admin"
    INFERENCE = "inference"
    READ = "read"


def check(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The configuration.", show_default=False)],
    output: CommandOutput,
) -> int:
    """Report every fault of a configuration.

    Each with its line, the environment included; warnings do not fail it.
    """
    from teimgr.config.sources import Source, read

    try:
        settings = read(Source(file=file)).settings
        if settings.tls_files is not None:
            settings.tls_files.context()
    except InvalidConfig as error:
        if not output.as_json:
            raise
        output.value({"file": str(file), "ok": False, "faults": error.message.splitlines(), "warnings": []})
        return 1
    warnings = [*settings.warnings(), *map(str, settings.missing_models())]
    if output.as_json:
        output.value({"file": str(file), "ok": True, "faults": [], "warnings": warnings})
        return 0
    for warning in warnings:
        say(f"{file}: warning: {warning}")
    say(f"{file}: good; {len(settings.instances)} seeds, REST on {settings.api_host}:{settings.api_port}")
    return 0


def show(
    output: CommandOutput,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Settings in TOML; default: only defaults and environment.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only values that differ from the defaults.")] = False,
) -> int:
    """Print every setting with its source.

    As TOML; secrets are not shown.
    """
    import tomli_w

    from teimgr.config.sources import Source, effective, read

    values = [value for value in effective(read(Source(file=file))) if not (changed and value.source == "default")]
    if output.as_json:
        output.value([{"key": value.path, "value": value.value, "source": value.source} for value in values])
        return 0
    if not values:
        say(f"# {file or 'the environment'}: nothing differs from the defaults")
        return 0
    lines, table = [], ""
    for value in values:
        if value.table != table:
            table = value.table
            lines += ["", f"[[{table.partition('[')[0]}]]" if table.endswith("]") else f"[{table}]"]
        if value.value is None:
            lines.append(f"# {value.key} is absent  # {value.source}")
        else:
            lines.append(f"{tomli_w.dumps({value.key: value.value}).rstrip()}  # {value.source}")
    say("\n".join(lines))
    return 0


def key_new(
    output: CommandOutput,
    name: Annotated[str, typer.Argument(help="Who will have it.", show_default=False)],
    rights: Annotated[list[RightChoice] | None, typer.Option(help="Right; repeatable.  [default: inference]")] = None,
    instances: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Name or glob of instances; repeatable; default: all.")
    ] = None,
) -> int:
    """Make an API key.

    Prints the key, which is stored nowhere, and its table for the configuration.
    """
    from teimgr.config.auth import table_of_new_key

    key, table = table_of_new_key(name, [each.value for each in rights or [RightChoice.INFERENCE]], instances or None)
    if output.as_json:
        output.value({"name": name, "key": key, "table": table})
    else:
        say(f"# The key of {name}; it is not stored:\n# {key}\n\n{table}", end="")
        output.note('keys are used if [auth] has `enabled = true` and `providers = ["api_keys"]`: docs/api-keys.md')
        output.note(f"to use it: `teimgr context add {name} URL --api-key-file -` reads the key and stores it")
    return 0


def _complete(incomplete: str) -> list[str]:
    return [name for name in Contexts.load().tables if name.startswith(incomplete)]


ContextName = Annotated[str, typer.Argument(help="Name of the context.", autocompletion=_complete, show_default=False)]


def list_contexts(output: CommandOutput) -> None:
    """List the contexts.

    The current one is marked; keys are not shown.
    """
    contexts = Contexts.load()
    if output.as_json:
        shown = [
            {"name": name, "current": name == contexts.current, "url": each.url, "grpc_url": each.grpc_url}
            | {"has_api_key": bool(each.api_key or each.api_key_file), "ca": each.ca}
            for name, each in contexts.tables.items()
        ]
        output.value(shown)
        return
    rows = [
        ("*" if name == contexts.current else "", name, each.url, _credentials(each))
        for name, each in contexts.tables.items()
    ]
    output.table(("current", "name", "url", "credentials"), rows)
    if not rows:
        output.note(f"no contexts in {contexts.path}; `teimgr context add NAME URL` makes one")


def _credentials(values: ConnectionValues) -> str:
    given = (("API key", values.api_key or values.api_key_file), ("client certificate", values.cert), ("CA", values.ca))
    return ", ".join(word for word, value in given if value)


def add(
    output: CommandOutput,
    name: ContextName,
    url: Annotated[str, typer.Argument(help="REST address of the daemon.", show_default=False)],
    grpc_url: Annotated[str | None, typer.Option(help="gRPC address; default: reported by the daemon.")] = None,
    api_key_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File of the API key; `-` reads the key and stores it here.")
    ] = None,
    ca: Annotated[str | None, typer.Option(metavar="FILE", help="CA of the daemon's certificate.")] = None,
    cert: Annotated[str | None, typer.Option(metavar="FILE", help="Client certificate.")] = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key.")] = None,
    server_name: Annotated[str | None, typer.Option(help="Name expected in the certificate.")] = None,
) -> None:
    """Add a context, or replace it; the first one becomes the current."""
    ServerAddress.parse(url)
    api_key = None
    if api_key_file == "-":
        api_key_file, api_key = None, typer.prompt("API key", hide_input=True, err=True).strip()
    contexts = Contexts.load()
    api_key_file, ca, cert, key = map(_whole_path, (api_key_file, ca, cert, key))
    values = ConnectionValues(url, grpc_url, api_key, api_key_file, ca, cert, key, server_name)
    replace(contexts, current=contexts.current or name, tables={**contexts.tables, name: values}).save()
    output.note(f"{contexts.path}: {name} is {url}")
    for path in (api_key_file, ca, cert, key):
        if path is not None and not Path(path).expanduser().exists():
            output.note(f"{path} does not exist; commands with this context fail until it does")


def _whole_path(path: str | None) -> str | None:
    """The path as commands in other folders find it; links are kept, and `~` is expanded when it is read."""
    return path if path is None or path.startswith("~") else str(Path(path).absolute())


def use(output: CommandOutput, name: ContextName) -> None:
    """Make a context the current one.

    Commands without --url and TEIMGR_URL speak to its daemon.
    """
    contexts = Contexts.load()
    values = contexts.get(name)
    replace(contexts, current=name).save()
    output.note(f"{name}: {values.url}")


def remove(output: CommandOutput, name: ContextName) -> None:
    """Forget a context."""
    contexts = Contexts.load()
    contexts.get(name)
    kept = {each: values for each, values in contexts.tables.items() if each != name}
    is_current = contexts.current == name
    replace(contexts, current=None if is_current else contexts.current, tables=kept).save()
    output.note(f"forgot {name}")
    if is_current and kept:
        output.note(f"no current context; `teimgr context use NAME` selects one of {', '.join(kept)}")
