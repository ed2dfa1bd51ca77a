"""The catalogue of families: its page is that of its rows and figures, and has what its readers count on."""

from __future__ import annotations

from bench.families.document import DOCUMENT, document, figures
from bench.families.table import ROWS


def test_the_page_is_generated_from_the_rows_and_their_figures() -> None:
    assert DOCUMENT.read_text() == document(ROWS, figures()), "run: python -m bench fidelity --families"


def test_no_row_is_wrong_and_few_are_refused_each_with_a_reason() -> None:
    records = figures()["rows"]
    states = {key: record["state"] for key, record in records.items()}
    refused = [key for key, state in states.items() if state == "refused"]

    assert set(records) <= {row.key for row in ROWS}
    assert set(states.values()) == {"exact", "refused"}
    assert len(refused) <= 12
    assert all(records[key]["reason"] for key in refused)
    assert sum(state == "exact" for state in states.values()) >= 180


def test_rows_have_keys_of_their_own_and_the_list_of_tei_is_whole() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    assert sum(row.is_in_tei_readme for row in ROWS) == 25
