"""How the suite is shared out between processes: what shares a daemon stays together."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in workers; before any test imports torch

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")

HERE = Path(__file__).parent
# Folders whose files share one daemon, or models that take long to make.
TOGETHER = ("outside_clients", "conformance", "contract", "worker/dialects", "fuzz")
# Files of a folder that share one daemon; the others of it have their own.
SHARING = {f"end_to_end/test_{name}.py": "end_to_end" for name in ("main_job", "bad_input", "output_dtype", "tables")}


@pytest.hookimpl(tryfirst=True)  # before the hook of xdist, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test in the group of its file, or of the files that it shares something with."""
    for item in items:
        path = item.path.relative_to(HERE).as_posix()
        group = next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), SHARING.get(path, path))
        item.add_marker(pytest.mark.xdist_group(group))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what failed into the file that FAILED_TESTS_FILE names, an id on each line; `.ci/run` reads it."""
    if file := os.environ.get("FAILED_TESTS_FILE"):
        reports = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
        ids = dict.fromkeys(report.nodeid.rpartition("@")[0] for report in reports)  # xdist appends @ and the group
        Path(file).write_text("".join(f"{name}\n" for name in ids))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Captured output in characters that can go from process to process: some tests print none such."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
