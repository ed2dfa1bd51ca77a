"""The entry point of `teimgr`: imports only the module of the command and runs it (typer)."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from teimgr import __version__
from teimgr.cli.command import connection_options, runnable
from teimgr.cli.failures import MEANINGS, CommandFailure, ExitStatus, report
from teimgr.cli.output import say
from teimgr.files import ensure_home
from teimgr.observability.shown_text import in_own_words

PROGRAM = "teimgr"
_SUMMARY = "One daemon for a fleet of embedding and reranking models."
_COMPLETION = f"_{PROGRAM.upper()}_COMPLETE"

# Module, function and heading of each command, in the order of `teimgr --help`.
_DAEMON, _INSTANCES, _INFERENCE, _FLEET, _SETUP = "Daemon", "Instances", "Inference", "Models and fleet", "Set-up"
COMMANDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        "up": ("quickstart", "up", _DAEMON),
        "serve": ("daemon_commands", "serve", _DAEMON),
        "doctor": ("daemon_commands", "doctor", _DAEMON),
        "explain": ("daemon_commands", "explain", _DAEMON),
        "reload": ("fleet_commands", "reload", _DAEMON),
        "daemon restart": ("daemon_commands", "restart", _DAEMON),
        "run": ("edit_commands", "run", _INSTANCES),
        "ps": ("instance_commands", "ps", _INSTANCES),
        "list": ("instance_commands", "list_instances", _INSTANCES),
        "create": ("edit_commands", "create", _INSTANCES),
        "edit": ("edit_commands", "edit", _INSTANCES),
        "rm": ("instance_commands", "rm", _INSTANCES),
        "start": ("instance_commands", "start", _INSTANCES),
        "stop": ("instance_commands", "stop", _INSTANCES),
        "restart": ("instance_commands", "restart", _INSTANCES),
        "wait": ("instance_commands", "wait", _INSTANCES),
        "show": ("instance_commands", "show", _INSTANCES),
        "logs": ("watch_commands", "logs", _INSTANCES),
        "events": ("watch_commands", "events", _INSTANCES),
        "top": ("top_command", "top", _INSTANCES),
        "embed": ("inference_commands", "embed", _INFERENCE),
        "rerank": ("inference_commands", "rerank", _INFERENCE),
        "classify": ("inference_commands", "classify", _INFERENCE),
        "similarity": ("inference_commands", "similarity", _INFERENCE),
        "batch submit": ("batch_commands", "submit", _INFERENCE),
        "batch list": ("batch_commands", "list_batches", _INFERENCE),
        "batch get": ("batch_commands", "get", _INFERENCE),
        "batch cancel": ("batch_commands", "cancel", _INFERENCE),
        "bench": ("inference_commands", "bench", _INFERENCE),
        "models list": ("model_commands", "list_models", _FLEET),
        "models pull": ("model_commands", "pull", _FLEET),
        "models check": ("model_commands", "check", _FLEET),
        "models rm": ("model_commands", "remove", _FLEET),
        "gpus": ("fleet_commands", "gpus", _FLEET),
        "plan": ("fleet_commands", "plan", _FLEET),
        "rebalance": ("fleet_commands", "rebalance", _FLEET),
        "recommendations": ("fleet_commands", "recommendations", _FLEET),
        "usage": ("fleet_commands", "usage", _FLEET),
        "templates": ("fleet_commands", "templates", _FLEET),
        "cluster status": ("cluster_commands", "status", _FLEET),
        "cluster token": ("cluster_commands", "token", _FLEET),
        "cluster remove": ("cluster_commands", "remove", _FLEET),
        "node join": ("cluster_commands", "join", _FLEET),
        "node leave": ("cluster_commands", "leave", _FLEET),
        "import": ("import_command", "import_files", _SETUP),
        "config check": ("config_commands", "check", _SETUP),
        "config show": ("config_commands", "show", _SETUP),
        "key new": ("config_commands", "key_new", _SETUP),
        "context list": ("config_commands", "list_contexts", _SETUP),
        "context add": ("config_commands", "add", _SETUP),
        "context use": ("config_commands", "use", _SETUP),
        "context rm": ("config_commands", "remove", _SETUP),
    }
)
GROUPS = MappingProxyType(
    {
        "daemon": "The running daemon.",
        "batch": "Files of requests, computed with low priority.",
        "models": "Models: list, download, try out, delete.",
        "config": "A daemon's configuration file.",
        "cluster": "The hosts of a fleet on several hosts.",
        "node": "This host, as one of a fleet on several hosts.",
        "key": "API keys for a daemon's configuration.",
        "context": "Named connections to daemons.",
    }
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of `arguments` (default: `sys.argv`); returns the exit status."""
    _open_standard_streams()
    given = _compatible(list(sys.argv[1:] if arguments is None else arguments))
    if given[:1] != ["serve"]:  # the daemon uses its own folder
        ensure_home(Path("/"))  # like container runtimes
    try:
        status = app(given)(given, prog_name=PROGRAM, standalone_mode=False)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except typer.Abort:
        say("teimgr: nothing was done", file=sys.stderr)
        return ExitStatus.FAILED
    except typer.TyperException as error:
        return _wrong_line(error, as_json="--json" in given)
    return status if isinstance(status, int) else 0


def _open_standard_streams() -> None:
    """Open standard streams that the caller has closed on /dev/null: a socket opened later would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this stream's
            os.set_inheritable(stream, True)
            setattr(sys, name, os.fdopen(stream, mode))


def _wrong_line(error: Any, *, as_json: bool) -> int:
    """Print what is wrong with a command line, and how it is used; typer's own words quote pydantic."""
    what = in_own_words(error.message).rstrip(".")
    hint = getattr(error, "param", None) and error.param.get_error_hint()
    what = (
        f"{hint.replace(chr(39), '')}: {what}"
        if hint and type(error).__name__ == "BadParameter"
        else error.format_message()
    )
    context = getattr(error, "ctx", None)
    if as_json or context is None:
        report(CommandFailure(what, "", "", "USAGE"), as_json=as_json)
        return ExitStatus.USAGE
    if "\n" in what:  # a group without a command shows its help
        say(what, file=sys.stderr)
        return ExitStatus.USAGE
    say(context.get_usage(), file=sys.stderr)
    report(CommandFailure(what, "", f"`{context.command_path} -h` lists what it takes", "USAGE"))
    return ExitStatus.USAGE


def app(arguments: Sequence[str] = ()) -> typer.Typer:
    """The application with the command that `arguments` begin with; with every command where they name none."""
    wanted = arguments[0] if arguments and _COMPLETION not in os.environ else ""
    chosen = [name for name in COMMANDS if name.split()[0] == wanted] or list(COMMANDS)
    markup: Any = "rich" if sys.stdout.isatty() and sys.stderr.isatty() else None
    settings = {"context_settings": {"help_option_names": ["-h", "--help"]}, "rich_markup_mode": markup}
    root = typer.Typer(
        name=PROGRAM,
        help=_SUMMARY,
        epilog=_epilog(markup is not None),
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        **settings,
    )
    root.callback(invoke_without_command=False)(_root)
    groups: dict[str, typer.Typer] = {}
    for name in chosen:
        module, function, panel = COMMANDS[name]
        group, _, verb = name.rpartition(" ")
        if group and group not in groups:
            groups[group] = typer.Typer(no_args_is_help=True, **settings)
            root.add_typer(groups[group], name=group, help=GROUPS[group], rich_help_panel=panel)
        command = getattr(importlib.import_module(f"teimgr.cli.{module}"), function)
        run = runnable(command)
        epilog = _REMOTE_NOTE if "url" in run.__annotations__ else None
        (groups[group] if group else root).command(verb, rich_help_panel=None if group else panel, epilog=epilog)(run)
    return root


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=lambda on: _version(on)),
    ] = False,
) -> None:
    pass


def _version(wanted: bool) -> None:
    if wanted:
        say(f"{PROGRAM} {__version__}")
        raise typer.Exit


_EXAMPLES = (
    ("teimgr up", "try it: a daemon with one model"),
    ("teimgr run BAAI/bge-m3", "create an instance of a model and wait until it serves"),
    ("teimgr ps", "list the instances"),
    ("teimgr embed 'some text'", "a vector; -o FILE embeds a whole file"),
    ("teimgr serve -c teimgr.toml", "the daemon with your configuration"),
    ("teimgr doctor", "check this host and its daemon"),
)
_REMOTE_NOTE = "For another daemon: --url, --api-key-file, --ca, --context and others; `teimgr -h` lists them."


def _epilog(with_rich: bool) -> str:
    sections = (
        ("Examples:", 28, _EXAMPLES),
        ("Options of every command that calls a daemon:", 17, connection_options()),
        ("Exit status:", 4, ((f"{int(code):>3}", meaning) for code, meaning in MEANINGS.items())),
    )
    if with_rich:
        return "\n\n".join(line for title, _, rows in sections for line in (title, *(f"{a}  {b}" for a, b in rows)))
    texts = ("\n".join(["\b", title, *(f"  {a:<{width}} {b}" for a, b in rows)]) for title, width, rows in sections)
    return "\n\n".join(texts)


def _compatible(arguments: list[str]) -> list[str]:
    """Earlier command lines in today's form: flags of `serve` without its name, lists after one flag of `key new`."""
    if arguments and arguments[0].split("=")[0] in ("-c", "--config", "--port", "--log-level", "--log-format"):
        return ["serve", *arguments]
    if arguments[:2] == ["key", "new"]:
        return _repeated(arguments, ("--rights", "--instances"))
    return arguments


def _repeated(arguments: list[str], flags: Sequence[str]) -> list[str]:
    """`--flag a b` as `--flag a --flag b`."""
    repeated: list[str] = []
    flag, values = "", 0
    for each in arguments:
        if each.startswith("-"):
            flag, values = (each if each in flags else ""), 0
        elif flag:
            values += 1
            if values > 1:
                repeated.append(flag)
        repeated.append(each)
    return repeated
