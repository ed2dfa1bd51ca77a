"""Times as text."""

from __future__ import annotations

from datetime import UTC, datetime

from teimgr.clock import now_rfc3339, rfc3339


def test_a_time_is_utc_with_microseconds() -> None:
    noon = datetime(2026, 3, 4, 12, tzinfo=UTC)
    assert rfc3339(noon) == "2026-03-04T12:00:00.000000Z"
    assert rfc3339(noon, "auto") == "2026-03-04T12:00:00Z"


def test_now_can_be_read_back() -> None:
    assert abs((datetime.now(UTC) - datetime.fromisoformat(now_rfc3339())).total_seconds()) < 60
