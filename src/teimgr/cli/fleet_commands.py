"""`teimgr gpus`, `usage`, `templates`, `reload`, `recommendations`, `plan` and `rebalance`: the fleet as a whole."""

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


def gpus(server: DaemonOptions, output: CommandOutput) -> None:
    """List the GPUs, with load and instances."""
    found = server.rest.gpus()
    if output.as_json:
        output.value(found)
        return
    if not found["gpus"]:
        output.note(f"no GPUs: {found['reason']}; models run on the CPU")
        return
    output.table(
        ("gpu", "name", "memory", "load", "temperature", "instances"), [_gpu_row(each) for each in found["gpus"]]
    )


def _gpu_row(gpu: dict[str, Any]) -> tuple[Any, ...]:
    used, total, load = gpu.get("memory_used_bytes"), gpu.get("memory_total_bytes"), gpu.get("utilization")
    degrees = gpu.get("temperature_c")
    return (
        gpu["index"],
        gpu["name"],
        f"{size(used)} of {size(total)}" if used is not None else size(total),
        "" if load is None else f"{load:.0%}",
        "" if degrees is None else f"{degrees:.0f} °C",
        ", ".join(each["name"] for each in gpu["instances"]),
    )


def usage(
    server: DaemonOptions,
    output: CommandOutput,
    by: Annotated[str, typer.Option(help="Group by any of key, instance and model.")] = "key,model",
) -> None:
    """List what API keys have used: tokens, texts, calls, refusals."""
    groups = [name.strip() for name in by.split(",")]
    found = server.rest.usage(groups)
    if output.as_json:
        output.value(found)
        return
    if not found["enabled"]:
        output.note("usage is not counted: the daemon requires no API keys")
        return
    counts = ("tokens", "texts", "calls", "refused", "shadowed")
    rows = [[each[name] or "(no key)" for name in groups] + [each[name] for name in counts] for each in found["usage"]]
    output.table((*groups, *counts), rows)


def templates(server: DaemonOptions, output: CommandOutput) -> None:
    """List the templates of `create --template`."""
    found = server.rest.templates()
    if output.as_json:
        output.value(found)
        return
    rows = [(each["name"], ", ".join(f"{key}={value}" for key, value in each["keys"].items())) for each in found]
    output.table(("name", "keys"), rows)


def reload(
    server: DaemonOptions,
    output: CommandOutput,
    plan: Annotated[bool, typer.Option("--plan", help="Show the changes without applying them.")] = False,
    prune: Annotated[
        bool | None,
        typer.Option(
            "--prune/--no-prune", help="Delete instances that are no longer in the file; default: `prune_seeds`."
        ),
    ] = None,
) -> int:
    """Apply the daemon's changed configuration.

    It reads its file again, and moves the fleet to it; `--plan` shows what would change.
    """
    result = server.rest.reload(dry_run=plan, prune=prune)
    if output.as_json:
        output.value(result)
    else:
        _print(output, result)
    return ExitStatus.INCOMPLETE if result["failed"] else ExitStatus.OK


def _print(output: CommandOutput, result: Any) -> None:
    wanted = result["plan"]
    rows = [
        ("setting", each["key"], f"{each['before']} → {each['after']}, {each['applies']}")
        for each in wanted["settings"]
    ]
    rows += [(action, name, "") for action in ("create", "recreate", "remove") for name in wanted[action]]
    rows += [
        ("update", name, ", ".join(f"{key}={value}" for key, value in keys.items()))
        for name, keys in wanted["update"].items()
    ]
    rows += [("left", name, "from an earlier configuration; --prune deletes it") for name in wanted["left"]]
    if not rows:
        output.note("no changes")
        return
    if result["steps"]:
        rows = [row for row in rows if row[0] in ("setting", "left")]
        rows += [(each["action"], each["instance"], each["error"] or "done") for each in result["steps"]]
    output.table(("action", "of", "change"), rows)


def recommendations(
    server: DaemonOptions,
    output: CommandOutput,
    apply: Annotated[str | None, typer.Option(help="Apply the recommendation with this id.")] = None,
    window: Annotated[
        int,
        typer.Option(
            help="Length of the observed window, and time until an applied change is judged.", min=1, max=3600
        ),
    ] = 600,
) -> None:
    """List what to change about instances, why, and what that should bring.

    An applied change without the expected effect is reverted after the window.
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
        output.note(f"no recommendations from the last {window} s")
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
    plan: Annotated[bool, typer.Option("--plan", help="Show the moves without making them.")] = False,
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
