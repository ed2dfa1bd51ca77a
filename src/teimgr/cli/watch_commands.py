"""`teimgr logs` and `events`: past lines and events, and with `--follow` new ones."""

from __future__ import annotations

import heapq
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Annotated

import typer

from teimgr.cli.command import CommandOutput, DaemonOptions, complete_instance, completes
from teimgr.cli.failures import UsageError
from teimgr.cli.output import field, say
from teimgr.client.rest_client import RestClient
from teimgr.client.rest_values import InstanceEvent
from teimgr.observability.shown_text import one_line, several_lines
from teimgr.spec import EVENTS

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue with new ones until Ctrl-C.")]
DAEMON = "(daemon)"
_WAITING_LINES = 1000  # not yet printed lines of all followed logs; readers wait at the limit
Only = tuple[str | None, str | None]
"""The minimum level and the earliest time."""
_LEVEL_COLOURS = {"WARNING": "yellow", "WARN": "yellow", "ERROR": "red", "CRITICAL": "bold red", "DEBUG": "dim"}
_SHOWN_APART = ("ts", "level", "logger", "message", "exception")


def logs(
    server: DaemonOptions,
    output: CommandOutput,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Names of instances.", autocompletion=complete_instance, show_default=False),
    ] = None,
    follow: Follow = False,
    lines: Annotated[int, typer.Option("--lines", "-n", help="Number of past lines; 0: all.", min=0)] = 100,
    level: Annotated[str | None, typer.Option(help="Minimum level, such as warning.")] = None,
    since: Annotated[str | None, typer.Option(metavar="TIME", help="RFC 3339, or seconds ago.")] = None,
    daemon: Annotated[
        bool, typer.Option("--daemon", help="The daemon's own log, including an audit of changes.")
    ] = False,
    every: Annotated[bool, typer.Option("--all", help="The logs of all instances.")] = False,
) -> None:
    """Print the log of an instance, of several in the order of time, or of the daemon.

    Readable lines, or with --json as they are stored.
    """
    chosen: list[str | None] = [*(names or ())]
    if every:
        chosen += [each.name for each in server.rest.list() if each.name not in chosen]
    if daemon:
        chosen.append(None)
    if not chosen and not every:
        raise UsageError("name an instance, or give --daemon or --all")
    width = max((len(each or DAEMON) for each in chosen), default=0)
    for name, line in _log_lines(server.rest, chosen, -lines if lines else 0, follow, (level, since)):
        if output.as_json:
            say(line, flush=follow)
            continue
        shown = pretty_line(line, colours=output.is_terminal)
        print(f"{name or DAEMON:{width}} | {shown}" if len(chosen) > 1 else shown, flush=follow)


def _log_lines(
    rest: RestClient, names: Sequence[str | None], start: int, follow: bool, only: Only
) -> Iterator[tuple[str | None, str]]:
    """The lines of logs, each with the log's name: past ones in the order of their times, new ones as they come."""
    if follow and len(names) == 1:
        yield from ((names[0], line) for line in rest.follow_logs(names[0], start, level=only[0], since=only[1]))
        return
    read = {name: rest.logs(name, start, level=only[0], since=only[1]) for name in names}
    past = (_timed(name, each.lines) for name, each in read.items())
    yield from ((name, line) for _, name, line in heapq.merge(*past, key=itemgetter(0)))
    if follow and names:
        found: queue.Queue[tuple[str | None, str] | BaseException] = queue.Queue(_WAITING_LINES)
        for name in names:
            threading.Thread(target=_follow, args=(rest, name, read[name].end, only, found.put), daemon=True).start()
        while True:
            item = found.get()
            if isinstance(item, BaseException):
                raise item
            yield item


def _follow(
    rest: RestClient,
    name: str | None,
    start: int,
    only: Only,
    put: Callable[[tuple[str | None, str] | BaseException], None],
) -> None:
    try:
        for line in rest.follow_logs(name, start, level=only[0], since=only[1]):
            put((name, line))
    except Exception as error:  # raised in the main thread
        put(error)


def _timed(name: str | None, lines: Sequence[str]) -> list[tuple[str, str | None, str]]:
    """The lines with their times; one without a time, as of a traceback, has that of the line before it."""
    found, moment = [], ""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            moment = max(moment, str(json.loads(line)["ts"]))
        found.append((moment, name, line))
    return found


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
    kind: Annotated[
        list[str] | None,
        typer.Option(help=f"Only of this kind, several: {', '.join(EVENTS)}.", autocompletion=completes(EVENTS)),
    ] = None,
    last: Annotated[int, typer.Option("--last", "-n", help="Number of past events.", min=0)] = 50,
) -> None:
    """Print the fleet's events.

    Created, running, crashed, updated and others; with --json one object a line.
    """
    some = False
    for event in server.rest.events(names or (), kind or (), last=last, follow=follow):
        some = True
        if output.as_json:
            output.line(dict(event.details) | {"event": event.event})
            continue
        if output.is_terminal:
            say(event_line(event), flush=True)
        else:
            cells = (event.timestamp, event.event, event.instance, event.status, _why(event))
            say("\t".join(field(cell or "") for cell in cells), flush=True)
    sys.stdout.flush()
    if not some:
        known = server.names()
        absent = [each for each in names or () if each not in known]
        output.note("no such events" + (f"; no instance is named {', '.join(absent)} now" if absent else ""))


def event_line(event: InstanceEvent) -> str:
    """An event as a line for a person."""
    return field(f"{(event.timestamp or '')[:19]:19}  {event.event:10}  {event.instance or '':20}  {_why(event)}")


def _why(event: InstanceEvent) -> str:
    """The reason, with how often it happened; without a reason the crash report."""
    report = event.crash_report
    text = event.reason or (f"report: {report}" if report else "") or (f"by {event.by}" if event.by else "")
    if event.count == 1:
        return text
    return f"{event.count} times since {(event.first_timestamp or '')[:19]}" + (f": {text}" if text else "")
