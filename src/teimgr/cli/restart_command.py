"""`teimgr daemon restart`: replace the daemon by a new process, which adopts workers and muxes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions
from teimgr.errors import Unavailable, UpdateFailed

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
    """The daemon that answers, once it is the new one.

    Raises:
        UpdateFailed: it is not within the time.
    """
    while (left := ends - time.monotonic()) > 0:
        try:
            found: Mapping[str, Any] = server.connection.rest_client(max(1.0, left)).daemon()
        except Unavailable:  # between the two
            found = before
        if found["pid"] != before["pid"]:
            return found
        time.sleep(_PAUSE_S)
    raise UpdateFailed(
        f"{_name(following)} was to take over and does not answer in time; `teimgr logs --daemon` has why"
    )


def _name(daemon: Mapping[str, Any]) -> str:
    return f"daemon {daemon['pid']} ({daemon['version']})"
