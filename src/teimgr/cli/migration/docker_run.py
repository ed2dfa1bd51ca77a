"""The `docker run` lines of a script as services of a compose file, with the variables that the script sets before."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from teimgr.cli.migration.compose_file import MAX_FILE_BYTES, Service, service_of
from teimgr.cli.migration.draft import Draft, KeyOutcome
from teimgr.cli.migration.interpolation import Interpolation, read_text
from teimgr.errors import InvalidConfig

_RUN = re.compile(r"^[ \t]*(?:sudo\s+)?(?:docker|podman|nerdctl)\s+(?:container\s+)?run\s", re.MULTILINE)
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_SEPARATORS = ";&|\n"
# Flags of `docker run` without a value; all others have one.
_BARE = (
    *("detach", "interactive", "tty", "rm", "init", "privileged", "publish-all", "read-only", "no-healthcheck"),
    *("oom-kill-disable", "quiet"),
)
_BARE_LETTERS = "ditPq"
_LETTERS = {"p": "publish", "v": "volume", "e": "env", "h": "hostname", "m": "memory", "l": "label", "u": "user"}
_LISTS = {"publish": "ports", "volume": "volumes", "env": "environment", "env-file": "env_file"}
_SAME = ("name", "entrypoint", "runtime", "cpus")
_NAMES = (
    *(("environment.", "--env "), ("volumes ", "--volume "), ("ports", "--publish"), ("network_mode", "--network")),
    *((key, f"--{key}") for key in ("gpus", "cpus", "runtime", "entrypoint")),
)


def script_of(path: Path) -> str | None:
    """The text of a file, or of standard input for `-`, that has a `docker run`; None for another file.

    Raises:
        InvalidConfig: Standard input has none, or is too large.
    """
    if str(path) != "-":
        with suppress(InvalidConfig):  # the reader of the other kind of file reports it
            text = read_text(path, MAX_FILE_BYTES)
            return text if _RUN.search(text) else None
        return None
    text = sys.stdin.read(MAX_FILE_BYTES + 1)
    if len(text) > MAX_FILE_BYTES or not _RUN.search(text):
        raise InvalidConfig(f"standard input: no `docker run` in it, or more than {MAX_FILE_BYTES:,} characters")
    return text


def services(path: Path, script: str, environ: Mapping[str, str], draft: Draft) -> list[Service]:
    """A service for each `docker run`; other commands are findings. Raises InvalidConfig: it is not understood."""
    place, values, found = draft.place(str(path)), dict(environ), list[Service]()
    interpolated = Interpolation(values)
    for words in _commands(path, script):
        while words and (words[0] == "export" or _ASSIGNMENT.fullmatch(words[0])):
            name, equals, value = words.pop(0).partition("=")
            with suppress(InvalidConfig):  # the output of a command: the variable stays unset
                values |= {name: interpolated(value, str(path))} if equals else {}
        if words and not _RUN.match(" ".join(words) + " "):
            shown = " ".join(words[: 2 if words[0] == "docker" else 1])  # other words may be secret
            place.found(shown, KeyOutcome.NONE, note="no `docker run`: not followed")
        elif words:
            given = [interpolated(word, str(path)) for word in words[words.index("run") + 1 :]]
            table = _table(given)
            model = re.search(r"--model-id[= ](?:\S*/)?([^\s/]+)", " ".join(table["command"]))
            name = table.pop("name", "") or (model[1].lower() if model else "tei")
            found.append(service_of(path, name, table, values, section="docker run", names=_NAMES))
    for name in sorted(interpolated.unset):
        place.found(f"${name}", KeyOutcome.DECIDE, note="the variable is not set here and taken as empty")
    return found


def _commands(path: Path, script: str) -> Iterator[list[str]]:
    """The words of each command, without comments; lines that end with a backslash go on."""
    joined = re.sub(r"\\\r?\n", " ", script).replace("$(pwd)", "$PWD")
    lexer = shlex.shlex(re.sub(r"(?m)^[ \t]*#.*$", "", joined), posix=True, punctuation_chars=_SEPARATORS)
    lexer.whitespace, lexer.commenters, lexer.whitespace_split = " \t\r", "", True
    words: list[str] = []
    try:
        for word in (*lexer, "\n"):
            if not word or word.strip(_SEPARATORS):
                words.append(word)
                continue
            end = next((at for at, each in enumerate(words) if each.startswith("#")), len(words))
            if words[:end]:
                yield words[:end]
            words = []
    except ValueError as error:
        raise InvalidConfig(f"{path}: {error}") from error


def _table(words: list[str]) -> dict[str, Any]:
    """What follows `docker run`, with the keys of a compose file; flags that have none there keep their names."""
    table: dict[str, Any] = {}
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).partition("=")
        if not flag.startswith("--"):  # -it, -dp 8080:80, -p8080:80
            letters = flag[1:].lstrip(_BARE_LETTERS)
            if not letters:
                continue
            flag, value = _LETTERS.get(letters[0], letters[0]), letters[1:] + equals * bool(letters[1:]) + value
        flag = flag.removeprefix("--")
        if not equals and not value and flag not in _BARE:
            value = words.pop(0) if words else ""
        if flag in _LISTS:
            table.setdefault(_LISTS[flag], []).append(value)
        elif flag in _SAME:
            table[flag] = value
        elif flag == "gpus":
            ids = re.search(r"device=([^\"=]+)", value)
            table["gpus"] = [{"device_ids": ids[1].split(",")}] if ids else "all"
        elif flag == "mount":
            names = {"src": "source", "dst": "target", "destination": "target"}
            parts = [each.partition("=") for each in value.split(",")]
            table.setdefault("volumes", []).append({names.get(name, name): text for name, _, text in parts})
        elif flag in ("network", "net") and value == "host":
            table["network_mode"] = value
        else:
            table[f"--{flag}"] = value
    return {**table, "image": words[0] if words else "", "command": words[1:]}
