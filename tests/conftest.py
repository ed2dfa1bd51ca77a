"""What holds for every test of the suite, and the list of what failed."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in workers; before any test imports torch

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("suite", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """Undo the `logs.setup` of a process that a test runs in its own: it changes the records that later tests see."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    for handler in root.handlers[:]:
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: imports and items leave hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave what exists now out of garbage collections: the tests, and the modules of torch and transformers.

    Each load of an engine collects, a few hundred loads in a run; with all of this a collection takes a third of a
    second of processor time.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Append what failed to the file that FAILED_TESTS_FILE names, an id on each line; `.ci/run` reads it."""
    if file := os.environ.get("FAILED_TESTS_FILE"):
        reports = terminalreporter.getreports("failed") + terminalreporter.getreports("error")
        with Path(file).open("a") as failed:
            failed.writelines(f"{name}\n" for name in dict.fromkeys(report.nodeid for report in reports))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Captured output in characters that can go from process to process: some tests print none such."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report
