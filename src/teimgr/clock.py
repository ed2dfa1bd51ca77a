"""Times as RFC 3339 text in UTC."""

from __future__ import annotations

from datetime import UTC, datetime


def rfc3339(moment: datetime, timespec: str = "microseconds") -> str:
    """A moment in UTC, such as 2026-03-04T12:00:00.123456Z; `timespec` as `datetime.isoformat` has it."""
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def now_rfc3339() -> str:
    """The present time."""
    return rfc3339(datetime.now(UTC))
