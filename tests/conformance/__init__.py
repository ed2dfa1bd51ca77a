"""TEI's contract as tables of cases, each with its clause; `python -m tests.conformance` writes docs/conformance.md."""
