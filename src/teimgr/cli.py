"""The command line: arguments to settings, settings to the daemon. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from teimgr import __version__, config_arguments, model_arguments

COMMANDS = ("serve", "config", "models", "key", "quickstart")


def main(arguments: list[str] | None = None) -> int:
    """Carry out what the arguments (by default those of the process) say; the result is the exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(_with_command(given))
    from teimgr.errors import InvalidConfig

    try:
        status: int = options.run(options)
    except InvalidConfig as error:
        print(f"teimgr: {error.message}", file=sys.stderr)
        return 1
    return status


def serve(options: argparse.Namespace) -> int:
    """Run the daemon until it is asked to stop."""
    from teimgr.configuration import Source, read, unheard
    from teimgr.control.admission import seed_faults

    keys = {"api_port": options.port, "log_level": options.log_level, "log_format": options.log_format}
    source = Source(file=options.config, overrides=keys)
    configuration = read(source, seed_faults)
    for warning in unheard():
        print(f"teimgr: warning: {warning}", file=sys.stderr)
    # The daemon imports much; a mistake in a setting is answered before that.
    from teimgr.daemon import main as run

    return run(configuration, source)


def quickstart(options: argparse.Namespace) -> int:
    """Start a daemon with one ready instance of a real small model."""
    from teimgr.quickstart import main as start

    return start(once=options.once)


def key_new(options: argparse.Namespace) -> int:
    """Make an API key: the key for who calls, its table for the configuration."""
    from teimgr.auth import table_of_new_key

    key, table = table_of_new_key(options.name, options.rights, options.instances)
    print(f"# The key, for {options.name} alone; it is stored nowhere:\n# {key}\n\n{table}", end="")
    return 0


def _with_command(arguments: list[str]) -> list[str]:
    """Put `serve` before bare flags, as tei-manager was called."""
    flags = ("-h", "--help", "-V", "--version")
    if arguments and arguments[0].startswith("-") and arguments[0] not in flags:
        return ["serve", *arguments]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teimgr", description="One daemon for a fleet of embedding models.")
    parser.add_argument("-V", "--version", action="version", version=f"teimgr {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    config_arguments.add_to(commands)
    models = commands.add_parser("models", help="the models of a running daemon")
    model_arguments.add_to(models.add_subparsers(metavar="VERB", required=True))
    _add_key(commands)
    quick = commands.add_parser("quickstart", help="a daemon with one ready instance of a real small model")
    quick.add_argument("--once", action="store_true", help="embed one text, show the answer, and stop")
    quick.set_defaults(run=quickstart)
    return parser


def _add_key(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verbs = commands.add_parser("key", help="API keys").add_subparsers(metavar="VERB", required=True)
    new = verbs.add_parser("new", help="make a key, and its table for the configuration")
    new.add_argument("name", help="who will have it")
    new.add_argument("--rights", nargs="+", choices=("admin", "inference", "read"), default=["inference"])
    new.add_argument("--instances", nargs="+", metavar="NAME", help="names or globs; default: all instances")
    new.set_defaults(run=key_new)


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="run the daemon (also: teimgr -c FILE)")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="settings in TOML; default: none")
    parser.add_argument("--port", type=int, help="port of the REST listener, stronger than file and environment")
    parser.add_argument("--log-level", metavar="LEVEL", help="such as info, or warn,teimgr.mux=debug")
    parser.add_argument("--log-format", choices=("json", "pretty"), help="json: one object per line")
    parser.set_defaults(run=serve)
