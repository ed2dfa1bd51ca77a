"""A selected part of the suite without the native library, in a process of its own: torch's operators serve."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from tests.support.native import LIBRARY

ROOT = Path(__file__).parents[2]
# Where the library's absence matters: batching and the choice of it, pooling, lanes on one thread. The real model
# without it: `tests/deploy/test_wheels.py`.
FILES = (
    "tests/engine/fidelity/test_fidelity_gate.py",
    "tests/engine/heads/test_pooling.py",
    "tests/engine/test_engine.py",
)
SELECTED = "test_fidelity_gate or test_pooling or both_lanes or failed_rows or overtakes"
# Tests that must be among those that passed, so that a change of a name does not empty the selection.
AMONG_THEM = (
    "test_packing_is_used_where_it_gives_the_librarys_vectors[bert-Batching.BY_RUN]",
    "test_pooling_is_its_formula[mean-None-False]",
    "test_both_lanes_at_once_give_each_text_its_own_results[dense]",
)
REASONS = {
    "needs the native library",
    "needs the native library and a CPU that multiplies bytes",
}


@pytest.mark.skipif(os.environ.get("TEIMGR_NATIVE") == "0", reason="this run is without the native library")
@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="there is no C compiler")
def test_it_is_there_where_a_compiler_is() -> None:
    """Else its tests would be skipped, and nothing would be shown of it."""
    assert LIBRARY is not None


@pytest.mark.timeout(300)
def test_a_part_of_the_suite_passes_without_it(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            f"--junitxml={report}",
            f"--basetemp={tmp_path / 'base'}",
            "-k",
            SELECTED,
            *FILES,
        ],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "FAILED_TESTS"))}
        | {"TEIMGR_NATIVE": "0", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]

    cases = list(ET.parse(report).iter("testcase"))
    skipped = {case.attrib["name"]: skip.attrib["message"] for case in cases for skip in case.findall("skipped")}
    passed = {case.attrib["name"] for case in cases} - skipped.keys()
    assert not set(AMONG_THEM) - passed
    assert set(skipped.values()) <= REASONS
    assert "test_int8_is_taken_where_it_is_asked_for_and_reported_with_its_closeness" in skipped
