"""Shared parts of all commands: options of the connection, `--json`, and exit codes of failures.

A command is a function in a module of this package. A parameter `DaemonOptions` becomes the options of the connection,
`CommandOutput` becomes `--json`; `options_of` makes options from a declaration.
"""

from __future__ import annotations

import errno
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, get_args, get_type_hints

import typer

from teimgr.cli import output as shapes
from teimgr.cli.failures import CommandFailure, ExitStatus, exit_status, explain, report
from teimgr.cli.output import say
from teimgr.client.connection import VARIABLES, ConnectionValues, DaemonConnection
from teimgr.client.connection_causes import Cause, diagnose
from teimgr.client.rest_client import RestClient
from teimgr.client.server_address import ServerAddress
from teimgr.errors import TeimgrError, Unauthenticated, Unreachable
from teimgr.files import failure_of

CONNECTION_PANEL = "Connection"
_TIMEOUT_S = 60.0
_OF_WRITES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # of files, not of sockets
_API_KEY = VARIABLES["api_key"]


def _connection_option(name: str, meaning: str, metavar: str) -> tuple[str, Any, Any]:
    flag = "--" + name.replace("_", "-")
    option = typer.Option(
        flag, help=meaning, metavar=metavar, rich_help_panel=CONNECTION_PANEL, show_default=False, hidden=True
    )
    return name, Annotated[str | None, option], None


_CONNECTION_OPTIONS = (
    _connection_option(
        "url", "REST address of the daemon, or unix:/path (TEIMGR_URL); default: http://127.0.0.1:9000.", "URL"
    ),
    _connection_option(
        "grpc_url", "gRPC address, or unix:/path (TEIMGR_GRPC_URL); default: reported by the daemon.", "URL"
    ),
    _connection_option("api_key", "API key; TEIMGR_API_KEY and --api-key-file keep it out of the process list.", "KEY"),
    _connection_option("api_key_file", "File of the API key (TEIMGR_API_KEY_FILE).", "FILE"),
    _connection_option("ca", "CA of the daemon's certificate, PEM (TEIMGR_CA).", "FILE"),
    _connection_option("cert", "Client certificate, PEM (TEIMGR_CERT).", "FILE"),
    _connection_option("key", "Its private key, PEM (TEIMGR_KEY).", "FILE"),
    _connection_option("server_name", "Name expected in the daemon's certificate (TEIMGR_SERVER_NAME).", "NAME"),
    _connection_option("context", "Named connection of `teimgr context` (TEIMGR_CONTEXT).", "NAME"),
)
_REQUEST_LIMIT = (
    "request_timeout",
    Annotated[
        float,
        typer.Option(
            "--request-timeout",
            help="Seconds for one request.",
            metavar="S",
            rich_help_panel=CONNECTION_PANEL,
            hidden=True,
            min=0.1,
        ),
    ],
    _TIMEOUT_S,
)
_JSON = ("as_json", Annotated[bool, typer.Option("--json", help="JSON on stdout, failures as JSON on stderr.")], False)


def connection_options() -> list[tuple[str, str]]:
    """Flags and meanings of the connection, which the help has once: `teimgr -h`."""
    options = [(name, get_args(kind)[1].help) for name, kind, _ in (*_CONNECTION_OPTIONS, _REQUEST_LIMIT)]
    return [("--" + name.replace("_", "-"), meaning) for name, meaning in options]


# Raised by reading an unexpected reply.
_MISREAD = (AttributeError, IndexError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(slots=True)
class DaemonOptions:
    """The daemon that a command calls."""

    flags: ConnectionValues
    context: str | None = None
    timeout_s: float = _TIMEOUT_S
    _connection: DaemonConnection | None = None

    @property
    def connection(self) -> DaemonConnection:
        if self._connection is None:
            self._connection = DaemonConnection.resolve(self.flags, context=self.context)
        return self._connection

    @property
    def source(self) -> str:
        """Where the address is from; empty where none was looked for."""
        return "" if self._connection is None else self._connection.source

    def source_of(self, error: TeimgrError) -> str:
        """Where the address is from that an error is about."""
        is_grpc = self._connection is not None and isinstance(error, Unreachable) and self._is_grpc(error.address)
        return "--grpc-url, or was asked of the daemon" if is_grpc else self.source

    def _is_grpc(self, address: str) -> bool:
        return ServerAddress.parse(address) != ServerAddress.parse(self.connection.url)

    @property
    def rest(self) -> RestClient:
        return self.connection.rest_client(self.timeout_s)

    def cause(self, error: Unreachable) -> Cause | None:
        """Why the daemon cannot be reached, by another attempt; None if that attempt finds no fault."""
        if self._connection is None or error.reason.startswith("through the proxy"):
            return None
        address = ServerAddress.parse(error.address)
        return diagnose(address, self._connection.tls, grpc=self._is_grpc(error.address))

    def refined(self, failure: CommandFailure, error: TeimgrError) -> CommandFailure:
        """The failure, with the key that was sent named in it, or that none was sent."""
        if not isinstance(error, Unauthenticated) or self._connection is None:
            return failure
        if self._connection.api_key is None:
            unsent = f"{_API_KEY} was not sent: it belongs to the address of TEIMGR_URL; give --api-key-file FILE"
            return replace(failure, do=unsent) if os.environ.get(_API_KEY) else failure
        if "API key" not in error.message:  # the certificate was not accepted
            return failure
        do = f"give another (--api-key-file FILE, {_API_KEY}); new keys count from the daemon's next `teimgr reload` on"
        return replace(failure, why="[[auth.api_keys]] of the daemon lacks the key that was sent", do=do)

    def names(self) -> Sequence[str]:
        """Names of the instances, for messages; none where they cannot be read."""
        try:
            return [each.name for each in self.rest.list()]
        except (TeimgrError, *_MISREAD):
            return ()


@dataclass(frozen=True, slots=True)
class CommandOutput:
    """Where and how results are printed: JSON, a table on a terminal, or tab-separated columns in a pipe."""

    as_json: bool = False
    is_terminal: bool = field(default_factory=lambda: sys.stdout.isatty())

    def value(self, value: Any) -> None:
        """A whole result as JSON."""
        say(json.dumps(value, indent=2, default=str))

    def line(self, value: Any) -> None:
        """One of many results as a line of JSON."""
        say(json.dumps(value, default=str), flush=True)

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        shapes.print_table(columns, rows, on_terminal=self.is_terminal)

    def note(self, text: str) -> None:
        """A sentence for a person, on stderr, unless JSON is asked for."""
        if not self.as_json:
            say(text, file=sys.stderr, flush=True)


def runnable(command: Callable[..., Any]) -> Callable[..., None]:
    """The function that typer calls for `command`: its parameters expanded, its failures made exit codes.

    `command` returns an exit status, or None for 0.
    """
    hints = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    connection: list[inspect.Parameter] = []  # last in the help
    for parameter in inspect.signature(command).parameters.values():
        kind = hints.get(parameter.name)
        if kind is DaemonOptions:
            connection += [_keyword(*each) for each in (*_CONNECTION_OPTIONS, _REQUEST_LIMIT)]
        elif kind is CommandOutput:
            connection.insert(0, _keyword(*_JSON))
        elif parameter.kind is inspect.Parameter.VAR_KEYWORD:
            parameters += [_keyword(*each) for each in command.options_of]  # type: ignore[attr-defined]
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))
    own = {name: kind for name, kind in hints.items() if kind in (DaemonOptions, CommandOutput)}

    @functools.wraps(command)
    def run(**given: Any) -> None:
        server = DaemonOptions(ConnectionValues())
        as_json = bool(given.get("as_json"))
        for name, kind in own.items():
            if kind is DaemonOptions:
                values = {each[0]: given.pop(each[0]) for each in _CONNECTION_OPTIONS}
                context = values.pop("context")
                server = DaemonOptions(ConnectionValues(**values), context, given.pop("request_timeout"))
                given[name] = server
            else:
                given[name] = CommandOutput(given.pop("as_json"))
        try:
            status = command(**given)
            sys.stdout.flush()
        except TeimgrError as error:
            failure = explain(error, server.source_of(error), server.names, server.cause)
            report(server.refined(failure, error), as_json=as_json)
            status = exit_status(error)
        except ModuleNotFoundError as error:
            report(_incomplete(error), as_json=as_json)
            status = ExitStatus.FAILED
        except _MISREAD as error:
            if not server.source:  # no daemon was called: a bug of this program
                raise
            report(_misread(server, error), as_json=as_json)
            status = ExitStatus.FAILED
        except KeyboardInterrupt:
            status = ExitStatus.INTERRUPTED
        except BrokenPipeError:  # the reader, such as `head`, has closed
            _drop_output()
            status = ExitStatus.OK
        except OSError as error:
            _drop_output()
            report(_of_disk(error), as_json=as_json)
            status = ExitStatus.FAILED
        raise typer.Exit(int(status or 0))

    run.__signature__ = inspect.Signature([*parameters, *connection])  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in (*parameters, *connection)}
    del run.__wrapped__
    return run


def _drop_output() -> None:
    """What stdout still holds goes nowhere: its second refusal, at the end of the program, would be a traceback."""
    with suppress(OSError):  # stdout may have no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _of_disk(error: OSError) -> CommandFailure:
    """The failure of a command that could not read or write."""
    what = failure_of(error) if error.filename else error.strerror or str(error) or type(error).__name__
    of_output = not error.filename and error.errno in _OF_WRITES
    return CommandFailure(f"cannot write the output: {what}" if of_output else what, "", "", "IO")


def _misread(server: DaemonOptions, error: Exception) -> CommandFailure:
    """The failure of a command that could not read what a server answered: it may be another program."""
    return CommandFailure(
        f"unexpected reply from {server.connection.url}",
        f"{type(error).__name__}: {str(error)[:200]}; the address is from {server.source}",
        "check the address, and that the daemon has this version: `teimgr doctor`",
        "INTERNAL",
    )


def _incomplete(error: ModuleNotFoundError) -> CommandFailure:
    """The failure of a command of the daemon where the client alone is installed."""
    what = "this installation is incomplete"
    return CommandFailure(
        what, f"no module {error.name!r}", "install all: `pip install teimgr`", "INCOMPLETE_INSTALLATION"
    )


def options_of(*options: tuple[str, Any, Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command whose last parameter is `**given` these options: name, annotation, default."""

    def mark(command: Callable[..., Any]) -> Callable[..., Any]:
        command.options_of = options  # type: ignore[attr-defined]
        return command

    return mark


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def complete_instance(incomplete: str) -> list[str]:
    """Names of instances for the completion of a shell; nothing where no daemon answers at once."""
    try:
        found = DaemonConnection.resolve().rest_client(timeout_s=1.0).list()
    except TeimgrError:
        return []
    return [each.name for each in found if each.name.startswith(incomplete)]


def completes(words: Collection[str]) -> Callable[[str], list[str]]:
    """The completion of a shell for a value that is one of these words."""

    def complete(incomplete: str) -> list[str]:
        return [each for each in words if each.startswith(incomplete)]

    return complete


Name = Annotated[
    str, typer.Argument(help="Name of the instance.", autocompletion=complete_instance, show_default=False)
]
Names = Annotated[
    list[str], typer.Argument(help="Names of instances.", autocompletion=complete_instance, show_default=False)
]
