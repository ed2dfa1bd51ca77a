"""Logging set-up of every process: one event per line, as JSON or in readable columns.

An event is a message and fields: `log.info("worker ready", extra={"instance": name, "load_s": 1.2})` becomes
`{"ts": …, "level": "info", "logger": …, "message": "worker ready", "instance": …, "load_s": 1.2}`. Within a
request its `request_id` is added, and `trace_id` and `span_id` where it belongs to a trace.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import signal
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, TextIO

from teimgr.errors import InvalidConfig
from teimgr.observability.request_context import CURRENT
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
"""Writes the Python stacks of a worker to its log. Ignored by default, so by workers of an earlier version too."""

_STYLES = {"DEBUG": "dim", "INFO": "green", "WARNING": "yellow", "ERROR": "red", "CRITICAL": "bold red"}
_OWN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}
_ONE_LINE = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {ord("\n"): "\\n", ord("\t"): "\t"}


def setup(level: str = "info", format: str = "json", stream: TextIO | None = None) -> None:
    """Send every logger's events to `stream` (standard output by default), in place of an earlier set-up.

    `level` is a level, or directives such as "warn,teimgr.mux=debug"; `format` is "json" or "pretty".

    Raises:
        InvalidConfig: a level has no such name.
    """
    levels = parse_levels(level)
    stream = stream or sys.stdout
    handler = _Handler(stream)
    handler.setFormatter(JsonFormatter() if format == "json" else PrettyFormatter(_paint(stream)))
    root = logging.getLogger()
    for old in [handler for handler in root.handlers if isinstance(handler, _Handler)]:
        root.removeHandler(old)
        for name in old.directed:
            logging.getLogger(name).setLevel(logging.NOTSET)
    root.addHandler(handler)
    root.setLevel(levels.pop("", logging.INFO))
    for name, number in levels.items():
        logging.getLogger(name).setLevel(number)
    handler.directed = tuple(levels)


def write_stacks_on_signal() -> None:
    """Have `STACKS_SIGNAL` write the stacks of all threads to standard error, whatever the interpreter is doing."""
    faulthandler.register(STACKS_SIGNAL, file=2)


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
    """The `extra` fields of the event in order, then those of the request context."""
    context = CURRENT.get()
    fields = {name: value for name, value in vars(record).items() if name not in _OWN}
    return fields if context is None else fields | context.log_fields()


class JsonFormatter(logging.Formatter):
    """One JSON object per event; a traceback is its field `exception`."""

    def format(self, record: logging.LogRecord) -> str:
        event = {
            "ts": rfc3339(datetime.fromtimestamp(record.created, UTC)),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event, default=str)


class PrettyFormatter(logging.Formatter):
    """Aligned columns: time, level, message, fields, logger; a traceback follows on lines of its own."""

    def __init__(self, paint: Paint = lambda text, style: text) -> None:
        super().__init__()
        self._paint = paint

    def format(self, record: logging.LogRecord) -> str:
        clock = datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = [f"{name}={value}".translate(_ONE_LINE) for name, value in fields_of(record).items()]
        columns = (
            self._paint(clock, "dim"),
            self._paint(f"{record.levelname.lower():<8}", _STYLES.get(record.levelname, "bold")),
            f"{record.getMessage().translate(_ONE_LINE):<36}",
            *(self._paint(field, "cyan") for field in fields),
            self._paint(record.name, "dim"),
        )
        line = " ".join(columns)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _Handler(logging.StreamHandler[TextIO]):
    """The handler that `setup` installs; `directed` are the loggers that it gave levels of their own."""

    directed: tuple[str, ...] = ()


def _paint(stream: TextIO) -> Paint:
    if not stream.isatty():
        return lambda text, style: text
    from rich.color import ColorSystem
    from rich.style import Style

    return lambda text, style: Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
