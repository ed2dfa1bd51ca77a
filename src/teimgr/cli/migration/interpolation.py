"""Variables in compose files, `$NAME` and `${NAME:-default}`, and files of variables (`.env`, `env_file`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from teimgr.errors import InvalidConfig

MAX_DEPTH = 8
MAX_TEXT_CHARS = 64 * 1024
MAX_ENV_FILE_BYTES = 256 * 1024

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OPERATOR = re.compile(r":?[-?+]")
_ASSIGNMENT = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_.-]*)\s*[=:]\s*(.*)", re.DOTALL)


class Interpolation:
    """Replaces variables by their values; `unset` collects those that have neither a value nor a default."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = values
        self.unset: set[str] = set()

    def __call__(self, text: str, place: str, depth: int = 0) -> str:
        """`text` with its variables replaced; `place` is named in failures.

        Raises:
            InvalidConfig: Wrong syntax, a required variable without a value, more than `MAX_DEPTH` defaults in one
                another, or a result of more than `MAX_TEXT_CHARS` characters.
        """
        if depth > MAX_DEPTH:
            raise InvalidConfig(f"{place}: more than {MAX_DEPTH} variables in one another")
        parts: list[str] = []
        at, size = 0, 0
        while (found := text.find("$", at)) >= 0:
            parts.append(text[at:found])
            value, at = self._variable(text, found, place, depth)
            parts.append(value)
            size += len(parts[-2]) + len(value)
            if size > MAX_TEXT_CHARS:
                raise InvalidConfig(f"{place}: longer than {MAX_TEXT_CHARS} characters once its variables are replaced")
        return "".join(parts) + text[at:]

    def _variable(self, text: str, start: int, place: str, depth: int) -> tuple[str, int]:
        """The value of what begins with the `$` at `start`, and the index behind it."""
        following = text[start + 1 : start + 2]
        if following == "$":
            return "$", start + 2
        if following != "{":
            name = _NAME.match(text, start + 1)
            if name is None:
                raise InvalidConfig(f"{place}: a single $ that begins no variable; $$ is a dollar sign")
            return self._value(name[0]), name.end()
        end = _closing_brace(text, start + 2)
        if end < 0:
            raise InvalidConfig(f"{place}: ${{ without its closing }}")
        return self._expression(text[start + 2 : end], place, depth), end + 1

    def _expression(self, inner: str, place: str, depth: int) -> str:
        name = _NAME.match(inner)
        operator = _OPERATOR.match(inner, name.end()) if name else None
        if name is None or (operator is None and name.end() != len(inner)):
            raise InvalidConfig(f"{place}: ${{…}} that is not a variable with an optional :-, -, :?, ?, :+ or +")
        if operator is None:
            return self._value(name[0])
        value, word = self._values.get(name[0]), inner[operator.end() :]
        is_given = bool(value) if operator[0].startswith(":") else value is not None
        if operator[0].endswith("+"):
            return self(word, place, depth + 1) if is_given else ""
        if is_given:
            return value or ""
        if operator[0].endswith("?"):
            raise InvalidConfig(f"{place}: the variable {name[0]} has to be set, here or in .env")
        return self(word, place, depth + 1)

    def _value(self, name: str) -> str:
        if name not in self._values:
            self.unset.add(name)
        return self._values.get(name, "")


def _closing_brace(text: str, start: int) -> int:
    """The index of the brace that closes the one before `start`; -1 if it is not closed."""
    depth = 1
    for at in range(start, len(text)):
        if text[at] == "}":
            depth -= 1
            if depth == 0:
                return at
        elif text[at] == "{" and text[at - 1] == "$":
            depth += 1
    return -1


def read_env_file(path: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables of a file of `NAME=value` lines; values without single quotes may use earlier ones and `environ`.

    Raises:
        InvalidConfig: It cannot be read, has more than `MAX_ENV_FILE_BYTES` bytes, or a line that is not an assignment.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(read_text(path, MAX_ENV_FILE_BYTES).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        assignment = _ASSIGNMENT.fullmatch(line)
        if assignment is None:
            if _NAME.fullmatch(line.strip()):  # `NAME` alone: that of the environment
                values |= {line.strip(): environ[line.strip()]} if line.strip() in environ else {}
                continue
            raise InvalidConfig(f"{path}:{number}: no NAME=value")
        name, text = assignment[1], assignment[2].strip()
        values[name] = _unquoted(text, Interpolation({**values, **environ}), f"{path}:{number}")
    return values


def _unquoted(text: str, interpolated: Interpolation, place: str) -> str:
    quote = text[:1]
    if quote in ("'", '"') and (end := text.find(quote, 1)) > 0:
        return text[1:end] if quote == "'" else interpolated(text[1:end].replace("\\n", "\n"), place)
    return interpolated(re.split(r"\s+#", text, maxsplit=1)[0].strip(), place)


def read_text(path: Path, most_bytes: int) -> str:
    """The text of a file.

    Raises:
        InvalidConfig: It cannot be read, is larger than `most_bytes`, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise InvalidConfig(f"{path}: larger than {most_bytes:,} bytes")
        return content.decode("utf-8-sig")
    except OSError as error:
        raise InvalidConfig(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidConfig(f"{path}: is not UTF-8 text") from error
    except ValueError as error:  # a null byte
        raise InvalidConfig(f"{str(path)!r}: cannot be read: no name of a file") from error
