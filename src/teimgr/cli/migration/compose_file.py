"""Reading of docker compose files: YAML within limits, variables, and the parts of a service as plain values.

Scalars are read as text, as YAML's later versions and docker do: `8080:30` is not a number, `yes` no boolean. The
`docker run` lines of a script are read as services too, with the variables that the script sets before.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from teimgr.cli.migration.draft import Draft, KeyOutcome
from teimgr.cli.migration.interpolation import Interpolation, read_env_file, read_text
from teimgr.errors import InvalidConfig
from teimgr.files import expanded

MAX_FILE_BYTES = 256 * 1024
MAX_SERVICES = 256
MAX_VALUES = 50_000
MAX_DEPTH = 32
MAX_MERGED_KEYS = 10_000
MAX_PORTS = 1024

_PORT = re.compile(
    r"(?:(?P<host>\[[0-9a-fA-F:]+\]|\d+(?:\.\d+){3}):)?(?:(?P<published>\d*(?:-\d+)?):)?(?P<target>\d+(?:-\d+)?)(?:/(?P<kind>\w+))?"
)


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML whose scalars are texts or null; merged keys (`<<`) are bounded, keys given twice refused."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012  as the library has it

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self._checked:  # a node that was merged once has keys of both
            self._checked.add(id(node))
            seen: set[str] = set()
            for key, _ in node.value:
                if key.value in seen and key.value != "<<" and isinstance(key.value, str):
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} twice", key.start_mark)
                seen.add(str(key.value))
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED_KEYS:
            raise yaml.constructor.ConstructorError(
                None, None, f"more than {MAX_MERGED_KEYS} merged keys", node.start_mark
            )


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"^<<$"), ["<"])


@dataclass(frozen=True, slots=True)
class PublishedPort:
    """A port of a container, and the host's: None if docker chooses it. `host` is empty for all addresses."""

    target: int
    published: int | None
    host: str = ""


@dataclass(frozen=True, slots=True)
class Volume:
    """A mount: `source` is a directory of the host, or the name of a volume, or empty."""

    source: str
    target: str
    is_directory: bool


@dataclass(frozen=True, slots=True)
class Service:
    """A service of a compose file, or a container as one; its variables are replaced.

    `words` are those of `entrypoint` and `command`. `names` are the beginnings of keys, each with what the file has in
    its place.
    """

    file: Path
    name: str
    table: Mapping[str, Any]
    image: str
    words: tuple[str, ...]
    environ: Mapping[str, str]
    ports: tuple[PublishedPort, ...]
    volumes: tuple[Volume, ...]
    section: str = "services"
    names: tuple[tuple[str, str], ...] = ()

    @property
    def tag(self) -> str:
        return self.image.split("@")[0].rpartition("/")[2].partition(":")[2]

    def on_host(self, path: str) -> str | None:
        """The host's directory for an absolute path of the container; None if no directory is mounted there."""
        best: tuple[int, str] | None = None
        for volume in self.volumes:
            target = volume.target.rstrip("/") or "/"
            below = path == target or path.startswith(target.rstrip("/") + "/")
            if volume.is_directory and below and (best is None or len(target) > best[0]):
                best = len(target), volume.source.rstrip("/") + path[len(target.rstrip("/")) :]
        return best[1] if best else None


@dataclass(frozen=True, slots=True)
class ComposeFile:
    """The services of a file; `unset` are variables with neither a value nor a default, which docker takes as empty.

    `others` are the keys of the file beside `services`.
    """

    path: Path
    services: tuple[Service, ...]
    unset: tuple[str, ...]
    others: tuple[str, ...]


def read_compose(path: Path, environ: Mapping[str, str], env_file: Path | None = None) -> ComposeFile:
    """Read a compose file; variables come from `environ`, then from `env_file`, by default `.env` beside the file.

    Raises:
        InvalidConfig: It cannot be read or understood, or is beyond a limit; the message names the place.
    """
    documents = read_documents(path)
    table: Any = documents[0] if len(documents) == 1 else None
    services = table.get("services") if isinstance(table, dict) else None
    if not isinstance(services, dict):
        raise InvalidConfig(f"{path}: no compose file: it has no table `services`")
    if len(services) > MAX_SERVICES:
        raise InvalidConfig(f"{path}: more than {MAX_SERVICES} services")
    beside = env_file or path.parent / ".env"
    variables = {**(read_env_file(beside, environ) if env_file or beside.is_file() else {}), **environ}
    interpolated = Interpolation(variables)
    plain = PlainValues(path, interpolated)
    read = [service_of(path, str(name), plain(each, f"services.{name}"), variables) for name, each in services.items()]
    others = [str(name) for name in table if name != "services" and not str(name).startswith("x-")]
    return ComposeFile(path, tuple(read), tuple(sorted(interpolated.unset)), tuple(others))


def read_documents(path: Path) -> list[Any]:
    """The documents of a YAML file. Raises InvalidConfig: it cannot be read or understood."""
    try:
        # `_Loader` is a SafeLoader.
        return list(yaml.load_all(read_text(path, MAX_FILE_BYTES), _Loader))  # nosec B506
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise InvalidConfig(f"{path}{line}: no YAML: {getattr(error, 'problem', None) or 'not readable'}") from error
    except RecursionError as error:
        raise InvalidConfig(f"{path}: nested too deep") from error


class PlainValues:
    """Copies values without aliases, with variables replaced; their number and depth are bounded."""

    def __init__(self, path: Path, interpolated: Callable[[str, str], str]) -> None:
        self._path = path
        self._interpolated = interpolated
        self._count = 0

    def __call__(self, value: Any, place: str, depth: int = 0) -> Any:
        self._count += 1
        if self._count > MAX_VALUES or depth > MAX_DEPTH:
            limit = f"more than {MAX_VALUES} values" if depth <= MAX_DEPTH else f"deeper than {MAX_DEPTH} levels"
            raise InvalidConfig(f"{self._path}: {place}: {limit}")
        if isinstance(value, dict):
            return {str(name): self(each, f"{place}.{name}", depth + 1) for name, each in value.items()}
        if isinstance(value, list | tuple | set):
            return [self(each, f"{place}[{index}]", depth + 1) for index, each in enumerate(value)]
        if value is None:
            return None
        text = str(value).lower() if isinstance(value, bool) else str(value)
        return self._interpolated(text, f"{self._path}: {place}")


def service_of(path: Path, name: str, table: Any, variables: Mapping[str, str], **others: Any) -> Service:
    """The service of a table with the keys of a compose file; `others` are fields that those of such files lack."""
    place = f"{path}: {others.get('section', 'services')}.{name}"
    if not isinstance(table, dict):
        raise InvalidConfig(f"{place}: must be a table")
    folder = path.absolute().parent
    return Service(
        path,
        name,
        table,
        str(table.get("image") or ""),
        (*_words(table, "entrypoint", place), *_words(table, "command", place)),
        _environ(table, folder, variables, place),
        tuple(_ports(table.get("ports"), f"{place}.ports")),
        tuple(_volumes(table.get("volumes"), folder, f"{place}.volumes")),
        **others,
    )


def _words(table: Mapping[str, Any], key: str, place: str) -> list[str]:
    value = table.get(key)
    if isinstance(value, str):
        try:
            return shlex.split(value)
        except ValueError as error:
            raise InvalidConfig(f"{place}.{key}: {error}") from error
    return [str(word) for word in _list(value, f"{place}.{key}")]


def _environ(table: Mapping[str, Any], folder: Path, variables: Mapping[str, str], place: str) -> dict[str, str]:
    """The variables of `env_file` and, stronger, `environment`; a name without a value has that of the shell."""
    values: dict[str, str] = {}
    files = table.get("env_file")
    for each in [files] if isinstance(files, str) else _list(files, f"{place}.env_file"):
        given = each if isinstance(each, dict) else {"path": each}
        file = folder / str(given.get("path") or "")
        try:
            values |= read_env_file(file, variables)
        except InvalidConfig:
            if given.get("required") != "false":
                raise
    environment = table.get("environment")
    pairs: Iterator[tuple[str, str | None]]
    if isinstance(environment, dict):
        pairs = iter(environment.items())
    else:
        split = (str(each).partition("=") for each in _list(environment, f"{place}.environment"))
        pairs = ((name, value if equals else None) for name, equals, value in split)
    for name, value in pairs:
        if value is not None or name in variables:
            values[name] = str(variables[name] if value is None else value)
    return values


def _ports(value: Any, place: str) -> Iterator[PublishedPort]:
    """The TCP ports of short (`8080:80`) and long entries, ranges port by port."""
    count = 0
    for index, each in enumerate(_list(value, place)):
        if isinstance(each, dict):
            names = {"target": "target", "published": "published", "kind": "protocol", "host": "host_ip"}
            parts = {ours: str(each.get(docker) or "") for ours, docker in names.items()}
        else:
            match = _PORT.fullmatch(str(each))
            parts = {name: text or "" for name, text in match.groupdict().items()} if match else {"target": ""}
        targets, published = _range(parts["target"]), _range(parts.get("published"))
        if not targets or (published and len(published) != len(targets)):
            raise InvalidConfig(f"{place}[{index}]: no port such as 8080:80")
        count += len(targets)
        if count > MAX_PORTS:
            raise InvalidConfig(f"{place}: more than {MAX_PORTS} ports")
        if (parts.get("kind") or "tcp") == "tcp":
            host = (parts.get("host") or "").strip("[]")
            for target, chosen in zip(targets, published or [None] * len(targets), strict=True):
                yield PublishedPort(target, chosen, host)


def _range(text: str | None) -> range | None:
    first, dash, last = (text or "").partition("-")
    begin, end = whole_number(first), whole_number(last if dash else first)
    if begin is None or end is None:
        return None
    found = range(begin, end + 1)
    return found if found and found[-1] < 2**16 else None


def whole_number(text: str) -> int | None:
    """The number that a text of up to nine digits is."""
    stripped = text.strip()
    return int(stripped) if stripped.isascii() and stripped.isdecimal() and len(stripped) < 10 else None


def _volumes(value: Any, folder: Path, place: str) -> Iterator[Volume]:
    for each in _list(value, place):
        if isinstance(each, dict):
            source, target = str(each.get("source") or ""), str(each.get("target") or "")
            is_directory = each.get("type") == "bind"
        else:
            source, colon, rest = str(each).partition(":")
            target = rest.partition(":")[0] if colon else source
            source = source if colon else ""
            is_directory = source.startswith((".", "/", "~"))
        if is_directory:
            source = os.path.normpath(folder / expanded(source))  # links stay as they are named
        yield Volume(source, target, is_directory)


def _list(value: Any, place: str) -> Sequence[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidConfig(f"{place}: must be a list")
    return value


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


def docker_run_services(path: Path, script: str, environ: Mapping[str, str], draft: Draft) -> list[Service]:
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
