"""`teimgr serve`, `up` and `doctor`: commands that run on the daemon's host."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.cli.output import say

Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings in TOML.", show_default=False)
]


def serve(
    config: Config = None,
    port: Annotated[int | None, typer.Option(help="Port of REST, stronger than file and environment.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of gRPC, likewise.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the state file, logs and run files.")
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(metavar="LEVEL", help="Such as info, or warn,teimgr.mux=debug.")
    ] = None,
    log_format: Annotated[
        Literal["json", "pretty"] | None,
        typer.Option(help="json: one object per line. Default on a terminal: pretty."),
    ] = None,
) -> int:
    """Run the daemon in the foreground (also: teimgr -c FILE)."""
    from teimgr.daemon.parent import leave_pid_1

    leave_pid_1()
    from teimgr.config.sources import Source, read, unread_variables
    from teimgr.daemon.succession import following

    keys = {
        "api_port": port,
        "grpc_port": grpc_port,
        "state_dir": None if state_dir is None else str(state_dir),
        "log_level": log_level,
        "log_format": log_format,
    }
    source = Source(file=config, overrides=keys)
    with following() as predecessor:
        configuration = read(source)
        if sys.stdout.isatty():
            if "log_format" not in configuration.sources:
                keys["log_format"] = "pretty"
                configuration = read(source)
            if not (folder := configuration.settings.state_file.parent.absolute()).exists():
                say(f"teimgr: new state folder {folder}", file=sys.stderr)
        for warning in unread_variables():
            say(f"teimgr: warning: {warning}", file=sys.stderr)
        # The daemon's imports are slow; invalid settings are reported before them.
        from teimgr.observability.memory import young_collections_alone

        with young_collections_alone():
            from teimgr.daemon.process import main as run

        return run(configuration, source, predecessor)


def up(
    once: Annotated[bool, typer.Option("--once", help="Embed one text, show the answer, and stop.")] = False,
    model: Annotated[str | None, typer.Option(help="Another model, by hub id or directory.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the instance.")] = None,
    state: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the state and the logs.")] = Path(
        "state/quickstart"
    ),
    port: Annotated[int | None, typer.Option(help="Port of REST; without it TEIMGR_API_PORT, or a free one.")] = None,
) -> int:
    """Try it: a daemon with one ready instance.

    Starts a daemon with an instance of a real small model, and shows what to try next. Ctrl-C stops it.
    """
    from teimgr.cli import quickstart as demo

    return demo.main(once, state, model=model or demo.MODEL, instance=name or demo.INSTANCE, port=port)


def doctor(
    server: DaemonOptions,
    output: CommandOutput,
    config: Config = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="The same as --config.", show_default=False)
    ] = None,
    node: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Check a joined host: --state-dir of its `node join`.", show_default=False),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write settings, events, metrics and logs without secrets, .tar.gz.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Check this host and the daemon that runs, with advice.

    Ports, GPUs, torch, cache, permissions, limits, clock. Of a running daemon its alarms, instances, disks, certificate
    and version; with `[cluster]` also the other hosts.
    """
    from teimgr.cli.doctor import main as examine

    return examine(file or config, node=node, flags=server.flags, bundle=bundle, as_json=output.as_json)
