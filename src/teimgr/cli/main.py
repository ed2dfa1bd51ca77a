"""The `teimgr` command line (argparse). Heavy modules are imported by the command that needs them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from teimgr import __version__


def main(arguments: list[str] | None = None) -> int:
    """Run the command of `arguments` (default: `sys.argv`); returns the exit status."""
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
    from teimgr.container_init import leave_pid_1

    leave_pid_1()
    from teimgr.config.sources import Source, read, unread_variables

    keys = {"api_port": options.port, "log_level": options.log_level, "log_format": options.log_format}
    source = Source(file=options.config, overrides=keys)
    configuration = read(source)
    for warning in unread_variables():
        print(f"teimgr: warning: {warning}", file=sys.stderr)
    # The daemon's imports are slow; invalid settings are reported before them.
    from teimgr.daemon import main as run

    return run(configuration, source)


def quickstart(options: argparse.Namespace) -> int:
    from teimgr.cli.quickstart import main as start

    return start(once=options.once)


def doctor(options: argparse.Namespace) -> int:
    from teimgr.cli.doctor import main as examine

    return examine(options.config, as_json=options.json)


def config_check(options: argparse.Namespace) -> int:
    """Validate a configuration file together with the environment; print warnings, or raise its faults."""
    from teimgr.config.sources import Source, read

    file = options.file
    settings = read(Source(file=file)).settings
    if settings.tls_files is not None:
        settings.tls_files.context()
    for warning in (*settings.warnings(), *map(str, settings.missing_models())):
        print(f"{file}: warning: {warning}")
    print(f"{file}: good; {len(settings.instances)} seeds, REST on {settings.api_host}:{settings.api_port}")
    return 0


def config_show(options: argparse.Namespace) -> int:
    import tomli_w

    from teimgr.config.sources import Source, effective, read

    lines, table = [], ""
    for value in effective(read(Source(file=options.file))):
        if options.changed and value.source == "default":
            continue
        if value.table != table:
            table = value.table
            lines += ["", f"[[{table.partition('[')[0]}]]" if table.endswith("]") else f"[{table}]"]
        if value.value is None:
            lines.append(f"# {value.key} is absent  # {value.source}")
        else:
            lines.append(f"{tomli_w.dumps({value.key: value.value}).rstrip()}  # {value.source}")
    print("\n".join(lines))
    return 0


def models(options: argparse.Namespace) -> int:
    from teimgr.cli.model_commands import run

    return run(options)


def key_new(options: argparse.Namespace) -> int:
    from teimgr.config.auth import table_of_new_key

    key, table = table_of_new_key(options.name, options.rights, options.instances)
    print(f"# The key, for {options.name} alone; it is stored nowhere:\n# {key}\n\n{table}", end="")
    return 0


def _with_command(arguments: list[str]) -> list[str]:
    """Put `serve` before bare flags, for compatibility with tei-manager's command line."""
    flags = ("-h", "--help", "-V", "--version")
    if arguments and arguments[0].startswith("-") and arguments[0] not in flags:
        return ["serve", *arguments]
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="teimgr", description="One daemon for a fleet of embedding models.")
    parser.add_argument("-V", "--version", action="version", version=f"teimgr {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_config(commands)
    _add_models(commands)
    _add_key(commands)
    checks = commands.add_parser(
        "doctor", help="check this host: ports, GPUs, torch, cache, permissions, limits, clock"
    )
    checks.add_argument("-c", "--config", type=Path, metavar="FILE", help="settings in TOML; default: none")
    checks.add_argument("--json", action="store_true", help="the findings as a list")
    checks.set_defaults(run=doctor)
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


def _add_config(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    verbs = commands.add_parser("config", help="look at a configuration").add_subparsers(metavar="WHAT", required=True)
    checking = verbs.add_parser("check", help="report the faults of a file, each with its line")
    checking.add_argument("file", type=Path, metavar="FILE")
    checking.set_defaults(run=config_check)
    showing = verbs.add_parser("show", help="every setting in effect, with its source")
    showing.add_argument("file", type=Path, metavar="FILE", nargs="?", help="settings in TOML; default: none")
    showing.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    showing.set_defaults(run=config_show)


def _add_models(parent: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = parent.add_parser("models", help="the models of a running daemon")
    commands = parser.add_subparsers(metavar="VERB", required=True)
    _add_models_verb(commands, "list", "all models of the daemon").add_argument("--json", action="store_true")
    pulling = _add_models_verb(commands, "pull", "download a model")
    pulling.add_argument("model", help="id on the model hub")
    pulling.add_argument("--revision", help="branch, tag or commit")
    pulling.add_argument("--update", action="store_true", help="look for a newer commit on the hub")
    checking = _add_models_verb(commands, "check", "load a model in a throw-away worker, and measure it")
    checking.add_argument("model", help="id on the model hub, or a directory on the daemon's host")
    place = checking.add_mutually_exclusive_group()
    place.add_argument("--gpu", dest="gpu_id", type=int, help="index of the GPU; default: the freest, or the CPU")
    place.add_argument("--cpu", action="store_true", help="on the CPU, even if there is a GPU")
    checking.add_argument("--dtype", choices=("auto", "float32", "float16", "bfloat16"))
    checking.add_argument("--json", action="store_true")
    _add_models_verb(commands, "rm", "delete a model from the cache").add_argument("model")


def _add_models_verb(
    commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, meaning: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=meaning)
    parser.add_argument("--url", default="http://127.0.0.1:9000", help="the daemon's REST address")
    parser.add_argument("--ca", metavar="FILE", help="authority of the daemon's certificate")
    parser.add_argument("--cert", metavar="FILE", help="client certificate, where the daemon requires one")
    parser.add_argument("--key", metavar="FILE", help="its key")
    parser.set_defaults(run=models, command=name)
    return parser
