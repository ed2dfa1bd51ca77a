"""`teimgr cluster status`, `token` and `remove`, `teimgr node join` and `leave`: a fleet on several hosts."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.output import say, size
from teimgr.errors import ValidationError

JOIN_TOKEN = "TEIMGR_JOIN_TOKEN"
_State = Annotated[Path, typer.Option(metavar="DIR", help="Folder of this host's run files and logs.")]
_STATE = Path("state/node")


def status(server: DaemonOptions, output: CommandOutput) -> None:
    """List the hosts of the cluster, with devices, memory, workers and versions."""
    found = server.rest.hosts()
    if output.as_json:
        output.value(found)
        return
    columns = ("host", "address", "cores", "gpus", "memory", "workers", "mux", "labels", "versions", "problem")
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
        host["mux"] or "",
        ", ".join(f"{key}={value}" for key, value in host["labels"].items()),
        ", ".join(f"{name} {version}" for name, version in host["versions"].items()),
        host["problem"] or "",
    )


def token(
    server: DaemonOptions,
    output: CommandOutput,
    node: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Only for this host name; such a token may replace a host of that name."),
    ] = None,
    life: Annotated[float, typer.Option(metavar="MIN", help="Validity in minutes.", min=0)] = 60.0,
) -> None:
    """Make a token by which one host may join the cluster, once, by `teimgr node join`."""
    made = server.rest.create_join_token(node=node, life_secs=life * 60)
    if output.as_json:
        output.value(made)
    else:
        say(made["token"])


def remove(
    server: DaemonOptions, output: CommandOutput, name: Annotated[str, typer.Argument(help="Name of the host.")]
) -> None:
    """Take a host out of the cluster for good, such as one that is lost.

    Its certificates do not count any more. Its workers are moved where they can run elsewhere. It may join again with a
    new token.
    """
    server.rest.remove_host(name)
    if output.as_json:
        output.value({"removed": name})
    else:
        output.note(f"host {name} was removed from the fleet")


def join(
    address: Annotated[str, typer.Argument(metavar="ADDRESS", help="`[cluster] address` of the daemon, ADDRESS:PORT.")],
    state_dir: _State = _STATE,
    token: Annotated[
        str,
        typer.Option(
            help="Join token of `teimgr cluster token`; not needed once this host has joined. Process lists show it; "
            f"{JOIN_TOKEN} and --token-file keep it off them."
        ),
    ] = "",
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File with the join token; - is standard input.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of this host in the fleet; default: its host name.")] = "",
    label: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="Label that instances can require; repeatable.")
    ] = None,
    host_address: Annotated[
        str,
        typer.Option(
            metavar="ADDRESS", help="Address of this host for other hosts; default: the one used to reach the head."
        ),
    ] = "",
    enrolment_port: Annotated[
        int,
        typer.Option(metavar="PORT", help="`[cluster] enrolment_port` of the daemon; default: the port after ADDRESS."),
    ] = 0,
    ray_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder of Ray's sessions, a short path.")] = None,
    ray_port_start: Annotated[
        int, typer.Option(metavar="PORT", help="First port of Ray on this host, for firewalls; 0: any free port.")
    ] = 0,
    ray_port_end: Annotated[int, typer.Option(metavar="PORT", help="Port after the last one of Ray.")] = 0,
    grace: Annotated[
        float, typer.Option(metavar="S", help="Time to move workers elsewhere when it leaves.", min=0)
    ] = 120.0,
) -> int:
    """Be a host of the cluster, in the foreground, until it leaves.

    The first time it needs a join token; then it has a certificate, which it keeps renewed. Starts Ray's node and the
    agent that forks workers here. Ctrl-C, SIGTERM or `teimgr node leave` end it, after its
    workers are moved to other hosts.
    """
    from teimgr.cluster.node import NodeOptions, main

    labels = dict(_label(each) for each in label or ())
    options = NodeOptions(
        head=address,
        state_dir=state_dir,
        token=token or _read(token_file) or os.environ.pop(JOIN_TOKEN, ""),
        enrolment_port=enrolment_port,
        address=host_address,
        name=name,
        labels=labels,
        ray_dir=ray_dir,
        ray_ports=range(ray_port_start, ray_port_end),
        grace_s=grace,
    )
    return main(options)


def _read(file: Path | None) -> str:
    try:
        return (sys.stdin.read() if str(file) == "-" else file.read_text()).strip() if file else ""
    except OSError as error:
        raise ValidationError(f"--token-file: {file}: {error.strerror}") from error


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
