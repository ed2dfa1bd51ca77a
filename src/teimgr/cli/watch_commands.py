"""`teimgr logs` and `events`: what happened, and with `--follow` what happens."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, Name, complete_instance
from teimgr.cli.output import field, say
from teimgr.client.rest_values import InstanceEvent
from teimgr.observability.shown_text import one_line, several_lines

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on with new ones until Ctrl-C.")]
_LEVEL_COLOURS = {"WARNING": "yellow", "WARN": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}
_SHOWN_APART = ("ts", "level", "logger", "message", "exception")


def logs(
    server: DaemonOptions,
    output: CommandOutput,
    name: Name,
    follow: Follow = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many past lines; 0: all.", min=0)] = 100,
    level: Annotated[str | None, typer.Option(help="Lowest level, such as warning.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="RFC 3339, or seconds ago.")] = None,
) -> None:
    """Print an instance's log.

    Readable lines, or with --json as they are stored.
    """
    start = -lines if lines else 0
    rest = server.rest
    found = rest.follow_logs(name, start, level=level, since=since) if follow else ()
    for line in found or (() if follow else rest.logs(name, start, level=level, since=since).lines):
        if output.as_json:
            say(line, flush=follow)
        else:
            print(pretty_line(line, colours=output.is_terminal), flush=follow)


def pretty_line(line: str, *, colours: bool = False) -> str:
    """A JSON line of a log as `date time level logger message key=value`; another line as it is, but for controls."""
    try:
        event = json.loads(line)
        moment, level, message = str(event["ts"]), str(event["level"]).upper(), str(event["message"])
    except (ValueError, KeyError, TypeError):
        return one_line(line)
    others = {key: value for key, value in event.items() if key not in _SHOWN_APART and value is not None}
    pairs = " ".join(f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in others.items())
    logger = str(event.get("logger") or "")
    shown = one_line(f"{moment[:10]} {moment[11:23]} {level:<7} {logger} {message}{'  ' + pairs if pairs else ''}")
    if colours and level in _LEVEL_COLOURS:
        shown = _coloured(shown, _LEVEL_COLOURS[level])
    trace = event.get("exception")
    return f"{shown}\n{several_lines(str(trace))}" if trace else shown


def _coloured(text: str, style: str) -> str:
    bold = style.startswith("bold ")
    if style == "dim":
        return typer.style(text, dim=True)
    return typer.style(text, fg=style.removeprefix("bold "), bold=bold)


def events(
    server: DaemonOptions,
    output: CommandOutput,
    names: Annotated[
        list[str] | None, typer.Argument(help="Only of these instances.", autocompletion=complete_instance)
    ] = None,
    follow: Follow = False,
    kind: Annotated[list[str] | None, typer.Option(help="Only of this kind, such as crashed; several.")] = None,
    last: Annotated[int, typer.Option("--last", "-n", help="How many past events.", min=0)] = 50,
) -> None:
    """Print the fleet's events.

    Created, running, crashed, updated and others; with --json one object a line.
    """
    for event in server.rest.events(names or (), kind or (), last=last, follow=follow):
        if output.as_json:
            output.line(dict(event.details) | {"event": event.event})
            continue
        cells = (event.timestamp, event.event, event.instance, event.status, _why(event))
        if output.is_terminal:
            say(
                field(f"{(event.timestamp or '')[:19]:19}  {event.event:10}  {event.instance or '':20}  {cells[-1]}"),
                flush=True,
            )
        else:
            say("\t".join(field(cell or "") for cell in cells), flush=True)
    sys.stdout.flush()


def _why(event: InstanceEvent) -> str:
    """The reason, with how often it happened; without a reason the crash report."""
    report = event.crash_report
    text = event.reason or (f"report: {report}" if report else "")
    if event.count == 1:
        return text
    return f"{event.count} times since {(event.first_timestamp or '')[:19]}" + (f": {text}" if text else "")
