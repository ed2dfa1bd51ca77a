"""Every clause has a case, every case a clause, and the page that says so is of today."""

from __future__ import annotations

from tests.conformance import report, test_sequences
from tests.conformance.clauses import CLAUSES
from tests.conformance.sequences import SEQUELS


def test_every_clause_has_a_case_and_every_case_a_clause() -> None:
    assert len(set(CLAUSES)) == len(CLAUSES)
    assert set(report.cases_of()) == set(CLAUSES)


def test_sequels_are_tests() -> None:
    assert not [sequel.test for sequel in SEQUELS if not hasattr(test_sequences, sequel.test)]


def test_the_page_is_up_to_date() -> None:
    assert report.FILE.read_text() == report.text(), "run: python -m tests.conformance"
