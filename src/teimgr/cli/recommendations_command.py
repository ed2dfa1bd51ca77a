"""`teimgr recommendations`: what to change about instances, with evidence; `--apply` does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions


def recommendations(
    server: DaemonOptions,
    output: CommandOutput,
    apply: Annotated[str | None, typer.Option(help="Send the PATCH of the recommendation of this id.")] = None,
    window: Annotated[
        int, typer.Option(help="Seconds to look at, and after which an applied change is judged.", min=1, max=3600)
    ] = 600,
) -> None:
    """List what to change about instances, why, and what that should bring.

    An applied change is taken back if it does not bring that within the window.
    """
    if apply is not None:
        made = server.rest.apply_recommendation(apply, window_secs=window)
        if output.as_json:
            output.value(made)
        else:
            output.note(f"{made['instance']}: {_keys(made['patch'])}; judged in {window} s")
        return
    found = server.rest.recommendations(window_secs=window)
    if output.as_json:
        output.value(found)
        return
    if not found["recommendations"]:
        output.note(f"nothing to change by the last {window} s")
    else:
        output.table(("id", "finding", "change", "effect", "risk"), [_row(each) for each in found["recommendations"]])
    if found["applied"]:
        rows = [
            (each["id"], _keys(each["patch"]), each["state"], each["result"] or "", each["applied_at"])
            for each in found["applied"]
        ]
        output.table(("applied", "change", "state", "result", "at"), rows)


def _row(found: Mapping[str, Any]) -> tuple[str, ...]:
    return found["id"], found["finding"], _keys(found["patch"] or {}), found["effect"], found["risk"]


def _keys(patch: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in patch.items())
