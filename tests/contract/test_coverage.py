"""Every clause has a test, every mark a clause, and the page that says so is of today."""

from __future__ import annotations

from tests.contract import report


def test_every_clause_has_a_test() -> None:
    assert report.faults() == []


def test_the_page_is_up_to_date() -> None:
    assert report.FILE.read_text() == report.text(), "run: python -m tests.contract"
