"""`teimgr plan`: what would run where, and what it takes of each device. `teimgr rebalance`: move workers."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.failures import ExitStatus, UsageError
from teimgr.cli.output import size, where
from teimgr.errors import InvalidConfig


def plan(
    server: DaemonOptions,
    output: CommandOutput,
    file: Annotated[
        Path | None,
        typer.Argument(help="A TOML file with `[[instances]]`, such as a configuration; without it, the daemon's own."),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Create or start the instances of FILE as planned.")] = False,
) -> int:
    """Show where instances would run, the memory that each takes, and what would not fit.

    Exit status 6 where something does not fit.
    """
    if apply and file is None:
        raise UsageError("--apply needs FILE, which has the instances to create or start")
    found = server.rest.plan(None if file is None else instances_of(file), apply=apply)
    if output.as_json:
        output.value(found)
    else:
        _show(found, output)
    return ExitStatus.OK if found["fits"] else ExitStatus.REFUSED


def instances_of(file: Path) -> list[dict[str, Any]]:
    """The tables `[[instances]]` of a TOML file.

    Raises:
        InvalidConfig: it cannot be read, or has none.
    """
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8")).get("instances")
    except OSError as error:
        raise InvalidConfig(f"{file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig(f"{file}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise InvalidConfig(f"{file}: has no tables [[instances]]")
    return found


def _show(found: Mapping[str, Any], output: CommandOutput) -> None:
    rows = [
        (
            each["instance"],
            each["replica"],
            each["outcome"],
            _place(each),
            size(each["host_bytes"]) if each["host_bytes"] else "",
            size(each["device_bytes"]) if each["device_bytes"] else "",
            each["source"],
            each["reason"] or "",
        )
        for each in found["workers"]
    ]
    output.table(("instance", "replica", "outcome", "place", "host memory", "gpu memory", "figures", "reason"), rows)
    for each in found["evictions"]:
        output.note(f"{each['instance']}: {each['reason']}")
    devices = [
        (
            each["label"],
            size(each["reserved_bytes"]),
            size(each["planned_bytes"]),
            "" if each["free_bytes"] is None else size(max(0, each["free_bytes"])),
            "" if each["budget_bytes"] is None else size(each["budget_bytes"]),
        )
        for each in found["devices"]
    ]
    output.table(("device", "reserved", "planned", "then free", "budget"), devices)


def _place(worker: Mapping[str, Any]) -> str:
    if worker["outcome"] == "on_demand":
        return ""
    return where(worker)


def rebalance(
    server: DaemonOptions,
    output: CommandOutput,
    plan: Annotated[bool, typer.Option("--plan", help="Show what would move, and change nothing.")] = False,
) -> int:
    """Move workers to where they would be placed now, if the fleet is more even then.

    Each new worker serves before the old one ends; `--plan` shows what would move, and why the rest stays.
    """
    found = server.rest.rebalance(dry_run=plan)
    if output.as_json:
        output.value(found)
    else:
        _show_moves(found, output)
    failed = any(each["outcome"] == "failed" for each in found["moves"])
    return ExitStatus.INCOMPLETE if failed else ExitStatus.OK


def _show_moves(found: Mapping[str, Any], output: CommandOutput) -> None:
    rows = [
        (each["instance"], each["replica"], each["outcome"], where(each["from"]), where(each["to"]), each["reason"])
        for each in found["moves"]
    ]
    rows += [
        (each["instance"], each["replica"], "stays", where(each["at"]), "", each["reason"]) for each in found["stays"]
    ]
    if not found["moves"]:
        output.note("nothing to move")
    if rows:
        output.table(("instance", "replica", "outcome", "from", "to", "reason"), rows)
