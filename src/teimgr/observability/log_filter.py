"""Selects lines of a log by level and by time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from teimgr.errors import ValidationError
from teimgr.observability.logs import LEVELS


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Minimum level and earliest time; None for any.

    A line that is not a JSON event, such as one of a traceback, is kept or dropped with the event before it.
    """

    level: int | None = None
    since: datetime | None = None

    @classmethod
    def of(cls, level: str | None, since: str | None) -> LogFilter:
        """Make the filter of a query: the name of a level, and a time in RFC 3339 or in seconds ago.

        Raises:
            ValidationError: an unknown level or an invalid time.
        """
        if level is not None and level.lower() not in LEVELS:
            raise ValidationError(f"level: no level {level!r}; known: {', '.join(LEVELS)}")
        return cls(None if level is None else LEVELS[level.lower()], None if since is None else _since(since))

    @property
    def takes_all(self) -> bool:
        return self.level is None and self.since is None

    def to_json(self) -> dict[str, Any]:
        """Return plain values, for another host."""
        return {"level": self.level, "since": self.since.isoformat() if self.since else None}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> LogFilter:
        """The inverse of `to_json`. Raises ValueError, TypeError and KeyError."""
        level, since = values["level"], values["since"]
        return cls(None if level is None else int(level), datetime.fromisoformat(since) if since else None)

    def predicate(self) -> Callable[[str], bool]:
        """Whether to keep a line, for the lines of a log in their order."""
        kept = self.since is None  # lines before the first event have no known time

        def keeps(line: str) -> bool:
            nonlocal kept
            if (event := event_of(line)) is not None:
                level = LEVELS.get(str(event.get("level", "")).lower(), logging.INFO)
                is_late = self.since is None or (moment := time_of(event)) is None or moment >= self.since
                kept = is_late and (self.level is None or level >= self.level)
            return kept

        return (lambda line: True) if self.takes_all else keeps


def event_of(line: str) -> dict[str, Any] | None:
    """Return the event of a line; None if the line is not JSON."""
    try:
        event = orjson.loads(line) if line.startswith("{") else {}
    except ValueError:
        return None
    return event if "level" in event else None


def time_of(event: Mapping[str, Any]) -> datetime | None:
    """Return the time of a log line, if it has one: `ts` of ours, `timestamp` of TEI's."""
    text = event.get("ts", event.get("timestamp"))
    try:
        return _aware(datetime.fromisoformat(text)) if isinstance(text, str) else None
    except ValueError:
        return None


def _since(text: str) -> datetime:
    with suppress(ValueError, OverflowError):
        return datetime.now(UTC) - timedelta(seconds=float(text))
    try:
        return _aware(datetime.fromisoformat(text.replace(" ", "+")))  # an unescaped plus sign in the query
    except ValueError:
        raise ValidationError(f"since: {text!r} is neither seconds ago nor a moment in RFC 3339") from None


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
