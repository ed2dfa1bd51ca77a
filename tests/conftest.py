"""How the suite is shared out between processes: what shares a daemon stays together."""

from __future__ import annotations

import gc
import itertools
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

HERE = Path(__file__).parent
# Folders whose files share one daemon, or models that take long to make.
TOGETHER = ("outside_clients", "conformance", "contract", "worker/dialects")
# Files of a folder that share one daemon; the others of it have their own.
SHARING = {
    f"end_to_end/test_{name}.py": "end_to_end" for name in ("main_job", "bad_input", "output_dtype", "tables", "spaces")
}
# Files of a folder of `TOGETHER` that have a daemon of their own.
ALONE = ("conformance/test_recording.py",)
# The groups that take longest, which begin first: one that began last would end the run alone. Of a full run with
# --durations=0; an order that is somewhat old costs little.
LONGEST = (
    "conformance",
    "worker/dialects",
    "docsite/test_commands.py",
    "outside_clients",
    "end_to_end/test_quickstart.py",
    "conformance/test_recording.py",
    "end_to_end/test_batches.py",
    "engine/test_native_validity.py",
    "cluster/test_ray_launcher.py",
    "end_to_end/test_faults.py",
    "api/page/test_browser.py",
    "end_to_end/test_readme.py",
    "engine/test_engine.py",
    "deploy/test_wheels.py",
    "docsite/test_moving.py",
    "end_to_end/test_configuration.py",
    "end_to_end/test_documented_commands.py",
    "fuzz/victim/test_victim.py",
    "engine/test_wordpiece.py",
    "fuzz/test_fuzz.py",
    "contract",
    "end_to_end",
)


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


@pytest.hookimpl(tryfirst=True)  # before the hook of xdist, which reads the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put each test in the group of its file, or of the files that it shares something with; the longest come first.

    Groups are handed out in this order with `--no-loadscope-reorder`; else those of the most tests come first, and a
    file of two tests that take two minutes comes last.
    """
    if missing := [name for name in (*LONGEST, *ALONE) if not (HERE / name).exists()]:
        raise pytest.UsageError(f"tests/conftest.py names what does not exist: {missing}")
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    order: dict[pytest.Item, int] = {}
    for path, of_file in itertools.groupby(items, lambda item: item.path):
        group = _group_of(path.relative_to(HERE).as_posix())
        mark, rank = pytest.mark.xdist_group(group), ranks.get(group, len(ranks))
        for item in of_file:
            item.add_marker(mark)
            order[item] = rank
    items.sort(key=order.__getitem__)


def _group_of(path: str) -> str:
    if path in ALONE:
        return path
    return next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), SHARING.get(path, path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage meanwhile: imports and items leave hardly any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Leave what exists now out of garbage collections: ten thousand tests and the modules of torch and transformers.

    Each load of an engine collects, a few hundred loads in a run; with all of this a collection takes a third of a
    second of processor time.
    """
    if session.config.getoption("loadgroup", False) and not all("@" in item.nodeid for item in session.items):
        raise pytest.UsageError("xdist did not see the groups: each test would start what its file shares")
    gc.collect()
    gc.freeze()


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
