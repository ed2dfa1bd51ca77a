"""schemathesis over the OpenAPI documents of the daemon and of the instances' ports, from a process of its own."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from tests.fuzz.target import FLEET, SEED, Target

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
# Methods are not judged, since paths overlap: /models/a/download is a model too and may be deleted, and
# /instances/actions an instance that may be changed. `tests/api/rest/test_error_answers.py` has the 405.
CHECKS = (
    "server_error_is_documented",  # of rest_hooks.py
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
ROUND_CASES = 2_000
MAX_ROUNDS = 50  # of a document with so little input that no round makes its number of cases
BOUNDARIES = "examples,coverage"
FUZZING = "fuzzing"
_serials = count()


@dataclass
class Report:
    """What a run found; `output` is what schemathesis printed."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    output: str = ""


@dataclass(frozen=True)
class _Document:
    """An OpenAPI document, and where what it describes is served."""

    url: str
    base: str

    def operations_with_input(self) -> int:
        """Those that more than one case can be made for."""
        with urllib.request.urlopen(self.url) as reply:
            paths = json.load(reply)["paths"]
        operations = [operation for path in paths.values() for operation in path.values()]
        return sum(1 for operation in operations if "requestBody" in operation or operation.get("parameters"))


def run(
    target: Target,
    cases: int,
    folder: Path,
    boundaries: bool = True,
    first_seed: int = 0,
    instances: Sequence[str] = tuple(FLEET),
) -> Report:
    """At least `cases` requests, four fifths to the daemon and the rest to the instances' ports, until one is wrong.

    `boundaries` walks every boundary of the daemon's document first, which takes its time and is the same every time.
    Runs with another `first_seed` have other cases.
    """
    report = Report()
    ports = [f"http://127.0.0.1:{target.ports[name]}" for name in instances]
    for base in ports:
        _fuzz(_Document(f"{base}/api-doc/openapi.json", base), report, report.cases + cases // 20, folder, first_seed)
    daemon = _Document(f"{target.daemon.api}/openapi.json", target.daemon.api)
    if boundaries:
        _round(daemon, report, 1, SEED, BOUNDARIES, folder)
    _fuzz(daemon, report, cases, folder, first_seed)
    return report


def _fuzz(document: _Document, report: Report, until: int, folder: Path, first_seed: int) -> None:
    """Rounds of different seeds, until the report has so many cases."""
    operations = document.operations_with_input()
    for serial in range(MAX_ROUNDS):
        missing = min(until - report.cases, ROUND_CASES)
        if missing <= 0 or report.failures:
            break
        _round(document, report, math.ceil(missing / operations), SEED + first_seed + serial, FUZZING, folder)


def _round(document: _Document, report: Report, examples: int, seed: int, phases: str, folder: Path) -> None:
    said = folder / f"schemathesis-{next(_serials)}.json"
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", document.url, "--url", document.base),
        *("--checks", ",".join(CHECKS), "--phases", phases, "--continue-on-failure"),
        *("--max-examples", str(examples), "--seed", str(seed), "--generation-database", "none"),
        *("--suppress-health-check", "all", "--request-timeout", "30", "--warnings", "off"),
        *("--workers", "1"),  # CPython 3.11 cannot compile in two threads at once, and hypothesis does
        *("--report", "json", "--report-json-path", str(said)),
    ]
    environ = os.environ | {"SCHEMATHESIS_HOOKS": "tests.fuzz.rest_hooks", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    report.output += done.stdout + done.stderr
    facts = json.loads(said.read_text()) if said.exists() else {}
    report.cases += facts.get("test_cases", {}).get("generated", 0)
    found = [f"{each['title']} ({each['count']})" for kind in ("failures", "errors") for each in facts.get(kind, [])]
    log.info("%s, %s, seed %d: %d cases, %s", document.base, phases, seed, report.cases, found or "nothing found")
    report.failures += found or ([f"schemathesis ended with {done.returncode}"] if done.returncode else [])
