"""`teimgr cluster status`, `node join` and `node leave`: a fleet on several hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.output import size
from teimgr.errors import ValidationError

_State = Annotated[Path, typer.Option(metavar="DIR", help="Folder of this host's run files and logs.")]
_STATE = Path("state/node")


def status(server: DaemonOptions, output: CommandOutput) -> None:
    """List the hosts of the cluster, with devices, memory, workers and versions."""
    found = server.rest.hosts()
    if output.as_json:
        output.value(found)
        return
    columns = ("host", "address", "cores", "gpus", "memory", "workers", "labels", "versions", "problem")
    output.table(columns, [_row(each) for each in found["hosts"]])
    if not found["hosts"]:
        output.note("a fleet of one host: the daemon has no [cluster] address")


def _row(host: dict[str, Any]) -> tuple[Any, ...]:
    total, free = host["memory_total_bytes"], host["memory_free_bytes"]
    return (
        host["name"],
        host["address"],
        host["cores"],
        host["gpus"],
        f"{size(total - free)} of {size(total)}",
        host["workers"],
        ", ".join(f"{key}={value}" for key, value in host["labels"].items()),
        ", ".join(f"{name} {version}" for name, version in host["versions"].items()),
        host["problem"] or "",
    )


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="`[cluster] address` of the daemon, ADDRESS:PORT.")],
    state_dir: _State = _STATE,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Copy of the daemon's ray-token; default: in --state-dir.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this host in the fleet; default: its host name.")] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label that instances may ask for; repeatable.")
    ] = None,
    host_address: Annotated[
        str, typer.Option(metavar="ADDRESS", help="By which other hosts reach this one; default: the way to the head.")
    ] = "",
    ray_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of Ray's sessions, a short path.")] = None,
    grace: Annotated[
        float, typer.Option(metavar="S", help="Time to move workers elsewhere when it leaves.", min=0)
    ] = 120.0,
) -> int:
    """Be a host of the cluster, in the foreground, until it leaves.

    Starts Ray's node and the agent that forks workers here. Ctrl-C, SIGTERM or `teimgr node leave` end it, after its
    workers are moved to other hosts.
    """
    from teimgr.cluster.node import NodeOptions, main

    labels = dict(_label(each) for each in label or ())
    options = NodeOptions(
        head=address,
        state_dir=state_dir,
        token_file=token_file or state_dir / "ray-token",
        address=host_address,
        name=name,
        labels=labels,
        ray_dir=ray_dir,
        grace_s=grace,
    )
    return main(options)


def _label(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ValidationError(f"--label must be KEY=VALUE (got {text!r})")
    return key, value


def leave(output: CommandOutput, state_dir: _State = _STATE) -> None:
    """Have this host leave the cluster: its workers are moved to other hosts first."""
    import asyncio

    from teimgr.cluster import node

    async def wait() -> None:
        async for workers in node.leave(state_dir):
            if not output.as_json:
                output.note(f"{workers} workers on this host")

    asyncio.run(wait())
    if output.as_json:
        output.value({"left": True})
