"""The table of coverage: every clause, its cases, and where they run."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.conformance import grpc_recording, recording, rest_recording, tables
from tests.conformance.case import GRPC_SURFACES, HTTP_SURFACES
from tests.conformance.clauses import CLAUSES, ELSEWHERE
from tests.conformance.sequences import SEQUELS

FILE = Path(__file__).parents[2] / "docs" / "conformance.md"

_HEAD = """\
# Conformance with TEI and tei-manager

<!-- Written by `python -m tests.conformance`. -->

The cases are in `tests/conformance`, and every one runs in `just test`. A clause is a section of the contract of Text
Embeddings Inference and what it requires; those that begin with `mux` are of tei-manager's
on its gRPC port. A case is one request with its exact status, headers and body.

| Clause | Cases | Where |
|---|---|---|
"""

_REPLAY = """
## Beside the real TEI

Every run of the tests sends 5,479 requests to instance ports and compares the answers with those that TEI 1.9.3 gave
(`tests/conformance/recorded`). Statuses, headers, texts and the order of keys are compared to the letter, numbers
within the difference of the two engines.

| Answers | Lines |
|---|---|
"""

_GRPC_REPLAY = """
721 gRPC calls of `tei.v1`, streams included, are sent to the same ports. Codes, texts, the number and order of replies
and the keys of their metadata are compared. Names of prompts in a text may have any order, as in TEI, and the replies
before the failure of a stream, which TEI loses, are not compared.

| Calls | Lines |
|---|---|
"""

_REST_REPLAY = """
## Beside the real tei-manager

343 calls of the management API are sent, in their order, as to tei-manager 0.12. Statuses, the methods in `allow`, CORS
headers and JSON are compared; fields that teimgr has in addition are allowed. Every error of teimgr's is `{"error",
"code", "timestamp"}`, where the real one's are plain text for what its framework refuses.

| Answers | Calls |
|---|---|
"""

_BOUNDS = """
## Bounds

Of the lines that no decision is about, the share that may differ, and what differs in those above
(`tests/conformance/test_recording.py` asserts them):

| What | At most | HTTP | gRPC |
|---|---|---|---|
"""

_TAIL = """
Clauses that no request can show here:

| Clause | Why, or where |
|---|---|
"""


def cases_of() -> dict[str, dict[str, int]]:
    """How many cases each clause has on each surface."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for http in tables.HTTP:
        for surface in http.surfaces:
            found[http.clause][surface] += 1
    for other in (*tables.GRPC, *SEQUELS):
        for surface in other.surfaces:
            found[other.clause][surface] += 1
    return found


def text() -> str:
    """The Markdown file."""
    found = cases_of()
    order = list(dict.fromkeys((*HTTP_SURFACES, *GRPC_SURFACES)))
    lines = [
        f"| {clause} | {max(found[clause].values(), default=0)} | {_where(found[clause], order)} |"
        for clause in CLAUSES
    ]
    return (
        _HEAD
        + "\n".join((*lines, f"| **{len(CLAUSES)} clauses** | {_total(found)} | |"))
        + "\n"
        + _TAIL
        + _elsewhere()
        + _REPLAY
        + _replay(recording.RESULT, recording.DECIDED)
        + _GRPC_REPLAY
        + _replay(grpc_recording.RESULT, grpc_recording.DECIDED)
        + _BOUNDS
        + _bounds()
        + _REST_REPLAY
        + _replay(rest_recording.RESULT, rest_recording.DECIDED)
    )


def _replay(result: Path, decided: Iterable[str]) -> str:
    rows = [f"| {level} | {count} |" for level, count in json.loads(result.read_text()).items()]
    return "\n".join((*rows, "", "What differs by decision:", "", *(f"* {why}." for why in decided), ""))


def _bounds() -> str:
    """The shares that differ, by the bounds of acceptance."""
    results = [json.loads(result.read_text()) for result in (recording.RESULT, grpc_recording.RESULT)]

    def row(what: str, most: str, *levels: str) -> str:
        shares = []
        for result in results:
            whole = sum(result.values()) - result.get(recording.DECIDED_LEVEL, 0)
            shares.append(f"{100 * sum(result.get(level, 0) for level in levels) / whole:.2f} %")
        return f"| {what} | {most} | {' | '.join(shares)} |"

    return "\n".join(
        (
            row("status or kind of body", "0.3 %", recording.STATUS),
            row("JSON and headers", "0.3 %", recording.VALUES, recording.HEADERS),
            row("words without the position", "1 %", recording.WORDS),
            row("to the letter", "3 %", recording.WORDS, recording.POSITION),
            "",
        )
    )


def _where(surfaces: dict[str, int], order: list[str]) -> str:
    return "; ".join(surface for surface in order if surface in surfaces)


def _total(found: dict[str, dict[str, int]]) -> str:
    cases = len(tables.HTTP) + len(tables.GRPC) + len({sequel.test for sequel in SEQUELS})
    runs = sum(sum(surfaces.values()) for surfaces in found.values())
    return f"{cases}, {runs} runs"


def _elsewhere() -> str:
    return "".join(f"{line}\n" for line in _rows())


def _rows() -> Iterator[str]:
    for clause, why in ELSEWHERE.items():
        yield f"| {clause} | {why} |"
