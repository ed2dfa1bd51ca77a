"""Logging set-up of every process: one event per line, as JSON or in readable columns. Rotation of log files by size.

An event is a message and fields: `log.info("worker ready", extra={"instance": name, "load_s": 1.2})` becomes
`{"ts": …, "level": "info", "logger": …, "message": "worker ready", "instance": …, "load_s": 1.2}`. Within a
request its `request_id` is added, and `trace_id` and `span_id` where it belongs to a trace.

Files of processes that the daemon starts are `name.log`, and `name.log.1` (newest) to `name.log.<keep>`.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import json
import logging
import os
import re
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO

from teimgr.errors import InvalidConfig
from teimgr.files import file_size
from teimgr.observability.request_context import CURRENT
from teimgr.observability.shown_text import one_line, several_lines
from teimgr.spec import rfc3339

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
    "off": logging.CRITICAL + 10,
}

Paint = Callable[[str, str], str]
"""Text and the name of a rich style → the text with terminal escapes."""

STACKS_SIGNAL = signal.SIGURG
"""Writes the Python stacks of a worker to its log. A process that does not handle it ignores it."""

_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}

DAEMON = "_daemon"
"""The name of the daemon's own log; no instance can have it."""
GONE = "gone"
"""Subfolder for logs of deleted instances that calls had created."""
GONE_LOGS = 32
CHECK_INTERVAL_S = 30.0
_READER_WAIT_S = 0.02
_MODE = 0o640
_CHUNK_BYTES = 2**20
_TAIL_BYTES = 4096
_TAIL_CHARS = 300
_SHOWN_LEVELS = ("warning", "error", "critical")
# What Python's faulthandler writes: the error, the stacks of all threads, and a line with the compiled modules.
_DUMP_BYTES = 2**16
_DUMP_ENDS = "Extension modules: "
_FATAL = re.compile(r"^Fatal Python error: .*$", re.MULTILINE)
_PLACE = re.compile(r'^Current thread .*\n  File "(.+)", line (\d+) in ', re.MULTILINE)
# One rotation at a time: a worker may start while its siblings' log is rotated on a thread.
_rotation = threading.Lock()

log = logging.getLogger(__name__)


def setup(
    level: str = "info", format: str = "json", stream: TextIO | None = None, fields: Mapping[str, Any] | None = None
) -> None:
    """Send every logger's events to `stream` (standard output by default), in place of an earlier set-up.

    `level` is a level, or directives such as "warn,teimgr.mux=debug"; `format` is "json" or "pretty". Each event in
    JSON has `fields`.

    Raises:
        InvalidConfig: a level has no such name.
    """
    levels = parse_levels(level)
    stream = stream or sys.stdout
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter(fields or {}) if format == "json" else PrettyFormatter(_paint(stream)))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
        old.close()
        for name in old.directed:
            logging.getLogger(name).setLevel(logging.NOTSET)
    root.addHandler(handler)
    root.setLevel(levels.pop("", logging.INFO))
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)
    handler.directed = tuple(levels)


def keep_in_file(path: Path, limit_bytes: int, keep: int) -> None:
    """Write every logger's events as JSON to `path` too, from now on; `rotate_regularly` bounds the file.

    Raises:
        OSError: it cannot be opened.
    """
    handler = _FileHandler(os.fdopen(open_log(path, limit_bytes, keep), "w", encoding="utf-8", errors="replace"))
    handler.setFormatter(JsonFormatter())
    logging.getLogger().addHandler(handler)


def write_stacks(stream: TextIO) -> None:
    """Write the stacks of all threads to `stream` on a fatal error, and on `STACKS_SIGNAL`, even while the interpreter
    is busy."""
    faulthandler.enable(stream)
    faulthandler.register(STACKS_SIGNAL, stream)


def parse_levels(text: str) -> dict[str, int]:
    """Logger name → level; the root's name is "".

    Raises:
        InvalidConfig: a level has no such name.
    """
    levels = {}
    for directive in filter(None, (part.strip() for part in text.split(","))):
        target, _, word = (part.strip() for part in directive.rpartition("="))
        if word.lower() not in LEVELS:
            raise InvalidConfig(f"log_level: no level {word!r} in {text!r}; known: {', '.join(LEVELS)}")
        name = target.replace("::", ".")  # tei-manager's users write Rust paths, `tei_manager::health`
        head, dot, rest = name.partition(".")
        levels[f"teimgr{dot}{rest}" if head == "tei_manager" else name] = LEVELS[word.lower()]
    return levels


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the `extra` fields of the event in order, then those of the request context."""
    context = CURRENT.get()
    fields = {name: value for name, value in vars(record).items() if name not in _OWN}
    return fields if context is None else fields | context.log_fields()


class JsonFormatter(logging.Formatter):
    """One JSON object per event, with `fields`; a traceback is its field `exception`."""

    def __init__(self, fields: Mapping[str, Any] = MappingProxyType({})) -> None:
        super().__init__()
        self._fields = fields

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "ts": rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **self._fields,
            **fields_of(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


def _plain(text: str, style: str) -> str:
    return text


class PrettyFormatter(logging.Formatter):
    """Aligned columns: date and local time, level, message, fields, logger; a traceback follows on its own lines."""

    def __init__(self, paint: Paint = _plain) -> None:
        super().__init__()
        self._paint = paint

    def format(self, record: logging.LogRecord) -> str:
        moment, level = datetime.fromtimestamp(record.created), record.levelname.lower()
        line = _columns(moment, level, record.getMessage(), fields_of(record), record.name, self._paint)
        return f"{line}\n{several_lines(self.formatException(record.exc_info))}" if record.exc_info else line


def pretty(line: str) -> str:
    """A line of a log file as `PrettyFormatter` has it, in UTC; another line as it is, but for controls."""
    try:
        event = json.loads(line)
        moment = datetime.fromisoformat(event.pop("ts")).astimezone(UTC)
        level, message, logger = event.pop("level"), event.pop("message"), event.pop("logger", "")
        exception = event.pop("exception", None)
        shown = _columns(moment, str(level), str(message), event, str(logger))
    except (ValueError, TypeError, KeyError, AttributeError):
        return one_line(line)
    return shown if exception is None else f"{shown}\n{several_lines(str(exception))}"


def _columns(
    moment: datetime, level: str, message: str, fields: Mapping[str, Any], logger: str, paint: Paint = _plain
) -> str:
    clock = moment.strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    columns = (
        paint(clock, "dim"),
        paint(f"{one_line(level):<8}", _STYLES.get(level.upper(), "bold")),
        f"{one_line(message):<36}",
        *(paint(one_line(f"{name}={value}"), "cyan") for name, value in fields.items()),
        paint(one_line(logger), "dim"),
    )
    return " ".join(columns)


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `setup` installs; `directed` are the loggers that it gave their own levels.

    Where the stream is a pipe, a socket or a terminal whose reader has stopped, an event waits `_READER_WAIT_S` once,
    and is dropped, as those that follow until there is room again. A line before the next event has their number.
    """

    directed: tuple[str, ...] = ()

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self._unwritten = 0
        self._is_cut = False  # the last event that was written
        self._descriptor = -1
        self._is_own = False
        self._room: select.poll | None = None  # of a stream that has a reader
        with suppress(OSError):  # it has no descriptor, or is the terminal of another user
            descriptor = stream.fileno()
            if os.isatty(descriptor):  # it blocks where it has room for less than a line
                flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
                descriptor, self._is_own = os.open(os.ttyname(descriptor), flags), True
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                self._descriptor, self._room = descriptor, select.poll()
                self._room.register(descriptor, select.POLLOUT)

    def close(self) -> None:
        if self._is_own:
            os.close(self._descriptor)
            self._is_own, self._room = False, None
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        if self._room is None:
            super().emit(record)
            return
        try:
            lines = f"{self.format(record)}{self.terminator}"
            if self._unwritten and self._room.poll(0):
                lines = self._missing() + lines
            self._write(lines.encode("utf-8", "replace"))
        except Exception:
            self.handleError(record)

    def _missing(self) -> str:
        """Return the line about the events that were dropped."""
        text = f"{self._unwritten} events are missing here: the reader of this log had stopped"
        self._unwritten = 0
        event = logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)
        is_cut, self._is_cut = self._is_cut, False
        return f"{self.terminator if is_cut else ''}{self.format(event)}{self.terminator}"

    def _write(self, data: bytes) -> None:
        assert self._room is not None
        at, ends = 0, time.monotonic() + (0 if self._unwritten else _READER_WAIT_S)
        while at < len(data):
            try:
                if not self._room.poll(max(0, ends - time.monotonic()) * 1000):
                    raise BlockingIOError
                # As much as a pipe has room for, if it has any; a terminal takes a part of it.
                at += os.write(self._descriptor, data[at : at + select.PIPE_BUF])
            except BlockingIOError:
                self._unwritten += 1
                self._is_cut |= at > 0
                return


class _FileHandler(logging.StreamHandler[TextIO]):
    """The handler of `keep_in_file`. Events that a full disk refuses are only on standard output."""

    def close(self) -> None:
        self.stream.close()
        super().close()

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  the name of logging
        """Do nothing: the other handler has the event."""


def _paint(stream: TextIO) -> Paint:
    if not stream.isatty():
        return _plain
    from rich.color import ColorSystem
    from rich.style import Style

    return lambda text, style: Style.parse(style).render(text, color_system=ColorSystem.STANDARD)


@dataclass(frozen=True, slots=True)
class LogSpan:
    """The bytes of a log between the start and the end of one process; its siblings' lines are among them."""

    path: Path
    start: int
    end: int

    def read(self, limit_bytes: int) -> list[str]:
        """Return the last lines, at most `limit_bytes` bytes; a log that was truncated meanwhile counts from its
        beginning."""
        start = self.start if self.start <= self.end else 0
        try:
            with self.path.open("rb") as file:
                file.seek(max(start, self.end - limit_bytes))
                text = file.read(min(limit_bytes, self.end - start))
        except OSError:
            return []
        return text.decode("utf-8", "replace").splitlines()


@dataclass(frozen=True, slots=True)
class LogLines:
    """The last lines of a log on another host; read like a `LogSpan`."""

    lines: tuple[str, ...]

    def read(self, limit_bytes: int) -> list[str]:
        """Return the last lines, at most about `limit_bytes` bytes."""
        kept, size = 0, 0
        for line in reversed(self.lines):
            size += len(line.encode()) + 1
            if size > limit_bytes:
                break
            kept += 1
        return list(self.lines[len(self.lines) - kept :])


def remove_logs(folder: Path, name: str) -> None:
    """Remove the log of an instance, its rotated files and its crash reports. Files of other instances stay."""
    for path in (folder / f"{name}.log", folder / GONE / f"{name}.log", *_beside_log(folder, name)):
        path.unlink(missing_ok=True)


def set_log_aside(folder: Path, name: str) -> None:
    """Move the log of an instance that calls have made, and that is gone, into the folder `GONE`; remove its others.

    Callers choose the names, so that folder keeps the newest `GONE_LOGS`. Blocking; raises OSError.
    """
    gone = folder / GONE
    gone.mkdir(exist_ok=True)
    with suppress(FileNotFoundError):
        (folder / f"{name}.log").replace(gone / f"{name}.log")
    newest_first = sorted(gone.glob("*.log"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in (*newest_first[GONE_LOGS:], *_beside_log(folder, name)):
        path.unlink(missing_ok=True)


def log_path(folder: Path, name: str) -> Path:
    """Return the path of the log of an instance, also if the instance is gone and its log was set aside."""
    path = folder / f"{name}.log"
    gone = folder / GONE / path.name
    return gone if gone.exists() and not path.exists() else path


def _beside_log(folder: Path, name: str) -> list[Path]:
    """Return the rotated files and crash reports of an instance."""
    replica_and_time = re.compile(rf"{re.escape(name)}-\d+-[^-]*\.json")
    reports = [each for each in folder.glob("crashes/*.json") if replica_and_time.fullmatch(each.name)]
    return [*reports, *(each for each in folder.glob(f"{name}.log.*") if each.suffix[1:].isdecimal())]


def open_log(path: Path, limit_bytes: int, keep: int) -> int:
    """Open `path` for appending, rotated first if it is over the limit; other users cannot read it."""
    shrink(path, limit_bytes, keep)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
    with suppress(PermissionError):  # of another owner
        os.fchmod(descriptor, os.fstat(descriptor).st_mode & _MODE)  # one that is there may be wider
    return descriptor


def shrink(path: Path, limit_bytes: int, keep: int) -> bool:
    """Rotate, if it is over the limit, a file that processes may have open, by copy and truncation; True if so.

    Replicas share a log: were it renamed, those that run would write on in a file that is rotated away. The writers
    append at the new end. What is written in the microseconds between the last read and the truncation is lost;
    otherwise every library in a worker would have to reopen its log. On a full disk old files make room, the oldest
    first; if that is not enough, the file itself is not kept.
    """
    with _rotation:
        if file_size(path) <= limit_bytes:
            return False
        for number in range(keep, 1, -1):
            if _old(path, number - 1).exists():
                _old(path, number - 1).replace(_old(path, number))
        kept = keep
        while kept and not _copied(path, _old(path, 1)):
            kept = next((number for number in range(kept, 1, -1) if _old(path, number).exists()), 0)
            if kept:
                _old(path, kept).unlink()
        os.truncate(path, 0)
        return True


def _copied(path: Path, target: Path) -> bool:
    """Copy a file; False if the disk is full, which leaves no part of it."""
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
    try:
        with os.fdopen(descriptor, "wb") as copy, path.open("rb") as source:
            while chunk := source.read(_CHUNK_BYTES):
                copy.write(chunk)
                copy.flush()
    except OSError as error:
        target.unlink()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


async def rotate_regularly(paths: Callable[[], Iterable[Path]], limit_bytes: int, keep: int) -> None:
    """Rotate those of `paths` that are over the limit, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        for path in set(paths()):
            try:
                await asyncio.to_thread(shrink, path, limit_bytes, keep)
            except OSError as error:
                log.warning("log not rotated", extra={"path": str(path), "reason": str(error)})


def last_line(path: Path) -> str:
    """Return the last line that is not blank, cut to 300 characters; "" without one."""
    return _last_line(path)[:_TAIL_CHARS]


def last_warning(path: Path) -> str:
    """Return the last line if it may explain an exit: it is not a log event below warning."""
    line = _last_line(path)
    if line.startswith(_DUMP_ENDS) and (fatal := _fatal_error(_tail(path, _DUMP_BYTES))):
        return fatal
    try:
        event = json.loads(line)
        return str(event["message"])[:_TAIL_CHARS] if event["level"] in _SHOWN_LEVELS else ""
    except (ValueError, TypeError, KeyError):
        return line[:_TAIL_CHARS]  # not one of our events: a traceback, or output of a library


def _fatal_error(text: str) -> str:
    """Return the last fatal error of Python in a log, as `faulthandler` writes it, with the place; "" without one."""
    found = next(reversed(list(_FATAL.finditer(text))), None)
    if found is None:
        return ""
    place = _PLACE.search(text, found.end())
    return f"{found[0]}{f', at {place[1]}, line {place[2]}' if place else ''}"[:_TAIL_CHARS]


def _last_line(path: Path) -> str:
    return next((line.strip() for line in reversed(_tail(path).splitlines()) if line.strip()), "")


def _tail(path: Path, size: int = _TAIL_BYTES) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - size))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
