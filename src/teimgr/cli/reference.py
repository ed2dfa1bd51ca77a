"""The reference of the command line, made from the commands: `python -m teimgr.cli.reference > docs/cli.md`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from teimgr.cli.command import CONNECTION_PANEL
from teimgr.cli.failures import MEANINGS
from teimgr.cli.main import COMMANDS, PROGRAM, app
from teimgr.client.connection import VARIABLES

_HEAD = """# Command line

<!-- Made by `python -m teimgr.cli.reference > docs/cli.md`; a test checks that it is up to date. -->

Results go to stdout, everything else to stderr. On a terminal results are tables; in a pipe they are tab-separated
columns without headings, for `cut` and `awk`; with `--json` they are JSON. Progress goes to stderr.
`teimgr --install-completion` installs completion for bash, zsh or fish, names of instances included.

A failure has up to three lines: what failed, `why:`, and `next:`, the remedy; with `--json` an object `error` with
`what`, `why`, `do` and `code`.
"""
_CONNECTION = """## Which daemon

Every command that calls a daemon has the options below; `bench-client` and `python -m teimgr.client` use the same
sources. Flags override single values. With `--context NAME` the environment is not read. Without it the environment is
used, then the context in `TEIMGR_CONTEXT`, then the current one (`teimgr context use NAME`); if `TEIMGR_URL` is set, no
context is read. Key and certificates belong to the address of the same source: if another source replaces the address,
they are not sent. Contexts are stored in `~/.config/teimgr/contexts.toml`, which only its owner can read, or in the
file `TEIMGR_CONTEXTS`.
"""


def reference() -> str:
    """The whole document."""
    root: Any = get_command(app())
    parts = [_HEAD, _exit_statuses(), _CONNECTION, _connection(root), *_commands(root)]
    return "\n".join(part.rstrip() + "\n" for part in parts)


def _exit_statuses() -> str:
    rows = [f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items()]
    return "\n".join(["## Exit status", "", "| status | meaning |", "|---|---|", *rows])


def _connection(root: Any) -> str:
    options = [each for each in root.commands["ps"].params if getattr(each, "rich_help_panel", "") == CONNECTION_PANEL]
    rows = [
        f"| {_declaration(option)} | {_cell(option.help)} | {_code(VARIABLES.get(option.name or '', ''))} |"
        for option in options
    ]
    return "\n".join(["| option | meaning | variable |", "|---|---|---|", *rows])


def _commands(root: Any) -> Iterator[str]:
    panel = ""
    for name, (_, _, heading) in COMMANDS.items():
        command = root
        for word in name.split():
            command = command.commands[word]
        if heading != panel:
            panel = heading
            yield f"## {heading}"
        yield _command(name, command)


def _command(name: str, command: Any) -> str:
    shown = [
        each
        for each in command.params
        if getattr(each, "rich_help_panel", "") != CONNECTION_PANEL and each.name not in ("as_json", "help")
    ]
    arguments = [each for each in shown if each.param_type_name == "argument"]
    usage = " ".join([PROGRAM, name, *(_usage(each) for each in arguments)])
    has_json = any(each.name == "as_json" for each in command.params)
    is_remote = any(each.name == "url" for each in command.params)
    also = [word for word, given in (("`--json`", has_json), ("the options of the connection", is_remote)) if given]
    lines = [f"### `{usage}`", "", " ".join((command.help or "").split()), ""]
    if shown:
        lines += ["| | |", "|---|---|"]
        lines += [f"| {_declaration(each)} | {_cell(each.help)}{_default(each)} |" for each in shown]
        lines.append("")
    if also:
        lines.append(f"Also {' and '.join(also)}.")
    return "\n".join(lines)


def _usage(argument: Any) -> str:
    word = (argument.metavar or argument.name.upper()).strip("[]{}")
    many = " …" if argument.nargs == -1 else ""
    return f"{word}{many}" if argument.required else f"[{word}{many}]"


def _declaration(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return _code(_usage(parameter))
    names = ", ".join([*parameter.opts, *parameter.secondary_opts])
    metavar = "" if parameter.is_flag else f" {parameter.metavar or 'VALUE'}"
    return _code(names + metavar)


def _default(parameter: Any) -> str:
    value = parameter.default
    if parameter.param_type_name == "argument" or value in (None, False, True, [], ()) or callable(value):
        return ""
    return f" Default: {_code(str(getattr(value, 'value', value)))}."


def _code(text: str) -> str:
    return f"`{text}`".replace("|", "\\|") if text else ""


def _cell(text: str | None) -> str:
    return " ".join((text or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(reference(), end="")
