"""schemathesis over the OpenAPI document of the daemon, from a process of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.target import SEED, Target

ROOT = Path(__file__).resolve().parents[2]
# `Allow` is not judged: ids of models have slashes, so that /models/a/download is a model too and may be deleted.
CHECKS = (
    "server_error_is_documented",  # of rest_hooks.py
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)
ROUNDS = 12
EVERY_PHASE = "examples,coverage,fuzzing"


@dataclass
class Report:
    """What a run found; `output` is what schemathesis printed."""

    cases: int = 0
    failures: list[str] = field(default_factory=list)
    output: str = ""


def run(target: Target, cases: int, folder: Path, phases: str = EVERY_PHASE) -> Report:
    """At least `cases` requests, in rounds of different seeds, until something is found.

    The phase "coverage" walks every boundary of the document, which takes its time and is the same every time.
    """
    report = Report()
    for serial in range(ROUNDS):
        missing = cases - report.cases
        if missing <= 0 or report.failures:
            break
        _round(target, report, math.ceil(missing / _operations_with_input(target)), SEED + serial, phases, folder)
    return report


def _round(target: Target, report: Report, examples: int, seed: int, phases: str, folder: Path) -> None:
    said = folder / f"schemathesis-{seed}.json"
    command = [
        *(str(Path(sys.executable).with_name("schemathesis")), "run", f"{target.daemon.api}/openapi.json"),
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
    report.failures += found or ([f"schemathesis ended with {done.returncode}"] if done.returncode else [])


def _operations_with_input(target: Target) -> int:
    """Those that more than one case can be made for."""
    with urllib.request.urlopen(f"{target.daemon.api}/openapi.json") as reply:
        paths = json.load(reply)["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    return sum(1 for operation in operations if "requestBody" in operation or operation.get("parameters"))
