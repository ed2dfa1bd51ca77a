"""Which lines of a log are wanted: by the level and the time that structured lines say."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import orjson

from teimgr.errors import ValidationError
from teimgr.logs import LEVELS

# TEI's word and ours.
_TIMES = ("ts", "timestamp")


@dataclass(frozen=True, slots=True)
class LogFilter:
    """At least this level, not before this moment; None for any. A line that is no event, such as one of a traceback,
    goes with the event before it."""

    level: int | None = None
    since: datetime | None = None

    @classmethod
    def of(cls, level: str | None, since: str | None) -> LogFilter:
        """What a query says: a level's word, and a moment in RFC 3339 or seconds ago.

        Raises:
            ValidationError: one of them is no such thing.
        """
        if level is not None and level.lower() not in LEVELS:
            raise ValidationError(f"level: no level {level!r}; known: {', '.join(LEVELS)}")
        return cls(None if level is None else LEVELS[level.lower()], None if since is None else _moment(since))

    @property
    def takes_all(self) -> bool:
        """Whether nothing is left out."""
        return self.level is None and self.since is None

    def sieve(self) -> Callable[[str], bool]:
        """What says of each line whether it is wanted; it is asked in order."""
        wanted = self.since is None  # what stands before the first event has no time that we know of

        def takes(line: str) -> bool:
            nonlocal wanted
            event = _event(line)
            wanted = wanted if event is None else self._wants(event)
            return wanted

        return (lambda line: True) if self.takes_all else takes

    def _wants(self, event: dict[str, Any]) -> bool:
        level = LEVELS.get(str(event.get("level", "")).lower(), logging.INFO)
        if self.level is not None and level < self.level:
            return False
        return self.since is None or (moment := _time_of(event)) is None or moment >= self.since


def _event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = orjson.loads(line)
    except ValueError:
        return None
    return event if "level" in event else None


def _time_of(event: dict[str, Any]) -> datetime | None:
    said = next((event[key] for key in _TIMES if key in event), None)
    try:
        return _aware(datetime.fromisoformat(said)) if isinstance(said, str) else None
    except ValueError:
        return None


def _moment(text: str) -> datetime:
    try:
        return datetime.now(UTC) - timedelta(seconds=float(text))
    except (ValueError, OverflowError):
        pass
    try:
        return _aware(datetime.fromisoformat(text.replace(" ", "+")))  # a plus sign that the query did not escape
    except ValueError:
        raise ValidationError(f"since: {text!r} is neither seconds ago nor a moment in RFC 3339") from None


def _aware(moment: datetime) -> datetime:
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
