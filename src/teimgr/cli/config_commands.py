"""`teimgr config …` and `teimgr key …`: a daemon's configuration, without a daemon."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from teimgr.cli.command import CommandOutput
from teimgr.cli.output import say
from teimgr.errors import InvalidConfig


class RightChoice(str, Enum):
    """What a key may do."""

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
        Path | None, typer.Argument(metavar="FILE", help="Settings in TOML; none: defaults and environment.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
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
    rights: Annotated[
        list[RightChoice] | None, typer.Option(help="What it may do; several.  [default: inference]")
    ] = None,
    instances: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Names or globs, several; all instances unless given.")
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
        say(f"# The key, for {name} alone; it is stored nowhere:\n# {key}\n\n{table}", end="")
        output.note('keys count where [auth] has `enabled = true` and `providers = ["api_keys"]`: docs/api-keys.md')
        output.note(f"to use it: `teimgr context add {name} URL --api-key-file -` reads the key and stores it")
    return 0
