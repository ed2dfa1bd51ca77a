"""The arguments of `teimgr config`. What they do is in `config_commands.py`, which a start does not import."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `config` and its verbs to the parser of the command line."""
    verbs = commands.add_parser("config", help="look at a configuration").add_subparsers(metavar="WHAT", required=True)
    checking = verbs.add_parser("check", help="say what is wrong in a file, and where")
    checking.add_argument("file", type=Path, metavar="FILE")
    checking.set_defaults(run=check)
    showing = verbs.add_parser("show", help="every setting in effect, and who said it")
    showing.add_argument("file", type=Path, metavar="FILE", nargs="?", help="settings in TOML; default: none")
    showing.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    showing.set_defaults(run=show)


def check(options: argparse.Namespace) -> int:
    """Say what is wrong in a configuration, and where; or that it is good."""
    from teimgr.config_commands import check as run

    return run(options.file)


def show(options: argparse.Namespace) -> int:
    """Say every setting that is in effect, and where it comes from."""
    from teimgr.config_commands import show as run

    return run(options.file, only_changed=options.changed)
