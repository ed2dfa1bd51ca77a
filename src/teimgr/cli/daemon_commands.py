"""`teimgr serve`, `doctor`, `daemon restart` and `explain`: the daemon of this host, and its errors."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, completes
from teimgr.cli.failures import UsageError
from teimgr.cli.output import say
from teimgr.config.schema import unknown_word
from teimgr.errors import Code, Unavailable, UpdateFailed
from teimgr.observability.troubleshooting import ADVICE, meaning, to_text

Config = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="Settings in TOML.", show_default=False)
]


def serve(
    config: Config = None,
    port: Annotated[int | None, typer.Option(help="Port of REST; overrides file and environment.")] = None,
    grpc_port: Annotated[int | None, typer.Option(help="Port of gRPC; overrides file and environment.")] = None,
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


def doctor(
    server: DaemonOptions,
    output: CommandOutput,
    config: Config = None,
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Same as --config.", show_default=False)] = None,
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


_PAUSE_S = 0.1


def restart(
    server: DaemonOptions,
    output: CommandOutput,
    timeout: Annotated[float, typer.Option(help="Seconds until the next daemon serves.", metavar="S", min=1.0)] = 180.0,
) -> None:
    """Replace the daemon by a new process without a gap.

    Upgrades it where another version is installed at its path. The next daemon is started by the same command line and
    takes over once it is ready: workers and multiplexers serve on, and clients that connect meanwhile wait. One that
    does not get ready changes nothing, and the command prints the reason.
    """
    ends = time.monotonic() + timeout
    rest = server.connection.rest_client(timeout)
    before = rest.daemon()
    following = rest.restart_daemon()
    now = _serving(server, before, following, ends)
    if output.as_json:
        output.value({"before": before, "now": now})
    else:
        output.note(f"{_name(before)} was replaced by {_name(now)}")


def _serving(
    server: DaemonOptions, before: Mapping[str, Any], following: Mapping[str, Any], ends: float
) -> Mapping[str, Any]:
    """The daemon that answers, once it is the new one and has started in full.

    Raises:
        UpdateFailed: it is not within the time.
    """
    while (left := ends - time.monotonic()) > 0:
        try:
            found: Mapping[str, Any] = server.connection.rest_client(max(1.0, left)).daemon()
        except Unavailable:  # during the handover
            found = before
        if found["pid"] != before["pid"] and not found.get("is_starting"):
            return found
        time.sleep(_PAUSE_S)
    raise UpdateFailed(f"{_name(following)} did not take over in time; `teimgr logs --daemon` shows why")


def _name(daemon: Mapping[str, Any]) -> str:
    return f"daemon {daemon['pid']} ({daemon['version']})"


def explain(
    output: CommandOutput,
    code: Annotated[
        str | None,
        typer.Argument(
            metavar="CODE", help="Such as OVERLOADED; none: all codes.", autocompletion=completes(Code.__members__)
        ),
    ] = None,
) -> None:
    """Show the causes and remedies of an error code.

    Error replies of REST have it as `code`, those of gRPC in the trailing metadata `x-teimgr-code`.
    """
    if code is None:
        rows = [(each.name, meaning(each)) for each in Code]
        if output.as_json:
            output.value([{"code": name, "meaning": text} for name, text in rows])
        else:
            output.table(("code", "meaning"), rows)
        return
    if code.upper() not in Code.__members__:
        raise UsageError(f"CODE: {unknown_word(code.upper(), Code.__members__)}")
    known = Code[code.upper()]
    if output.as_json:
        output.value({"code": known.name, "meaning": meaning(known), **asdict(ADVICE[known])})
    else:
        say(to_text(known))
