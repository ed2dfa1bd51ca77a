"""The catalogue of families: its page is that of its rows and figures, and has what its readers count on."""

from __future__ import annotations

from pathlib import Path

from bench.families.document import DOCUMENT, document, figures
from bench.families.evidence import CLAIMS
from bench.families.table import ROWS

REFUSED = {
    *("refused-qwen3-vl", "refused-embeddinggemma2", "refused-gliner", "refused-gguf"),
    *("rerank-jina-v3.5", "refused-relative-positions", "refused-unknown-weight"),
}
_OF_ALL = ("rule", "verified", "TEI", "roles", "entities", "files", "loads")


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


def test_each_claim_of_the_issue_has_rows_that_are_exact_or_refused_and_tests_that_exist() -> None:
    records, tests = figures()["rows"], Path(__file__).resolve().parents[1]
    numbers = [claim.number for claim in CLAIMS]

    assert numbers == [*(f"W{i}" for i in range(1, 9)), *(f"R{i}" for i in range(1, 16)), *_OF_ALL, "§3"]
    for claim in CLAIMS:
        assert claim.tests, claim.number
        for key in claim.keys:
            assert records[key]["state"] == ("refused" if key in REFUSED else "exact"), (claim.number, key)
        for test in claim.tests:
            file, _, function = test.partition("::")
            assert f"def {function}(" in (tests / file).read_text(), (claim.number, test)


def test_rows_in_other_types_are_near_or_refused() -> None:
    found = figures()
    types, exact = found["types"], {key for key, record in found["rows"].items() if record["state"] == "exact"}

    assert set(types) == {"bfloat16", "int8"}
    for dtype, records in types.items():
        assert set(records) <= exact, dtype
        assert {record["state"] for record in records.values()} <= {"near", "refused", "wrong"}, dtype
        far = {key: record["auto"] for key, record in records.items() if record["state"] == "wrong"}
        # Experts, linear attention, and one adapter with random weights; a request alone has them in fewer bits.
        assert set(far) <= {"qwen2-moe", "gpt-oss", "qwen3-5", "jina-v5-nano-clustering"}, dtype
        assert set(far.values()) <= {"float32"}, dtype
