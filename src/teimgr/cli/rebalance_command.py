"""`teimgr rebalance`: move workers to better places, without a gap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.failures import ExitStatus
from teimgr.cli.output import where


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
        _show(found, output)
    failed = any(each["outcome"] == "failed" for each in found["moves"])
    return ExitStatus.INCOMPLETE if failed else ExitStatus.OK


def _show(found: Mapping[str, Any], output: CommandOutput) -> None:
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
