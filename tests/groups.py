"""A plugin of pytest for the processes of `python -m tests`: groups of files, each collected when its turn has come.

What shares a daemon is one group. A process that collected the whole suite would spend 20 s of processor time on it.
"""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NUMBER_BYTES = 4
"""Of the number of a group in the pipe."""
# Folders whose files share one daemon, or models that take long to make.
TOGETHER = ("outside_clients", "conformance", "contract", "worker/dialects")
# Files of a folder that share one daemon; the others of it have their own.
SHARING = {
    f"end_to_end/test_{name}.py": "end_to_end" for name in ("main_job", "bad_input", "output_dtype", "tables", "spaces")
}
# Files of a folder of `TOGETHER` that have a daemon of their own.
ALONE = ("conformance/test_recording.py",)
# The groups that take longest, which begin first: one that began last would end the run alone. By their processor time
# in a full run; an order that is somewhat old costs little.
LONGEST = (
    "conformance",
    "worker/dialects",
    "outside_clients",
    "cluster/test_ray_launcher.py",
    "api/page/test_browser.py",
    "end_to_end/test_faults.py",
    "faults/test_soak.py",
    "daemon/test_succession.py",
    "end_to_end",
    "end_to_end/test_rolling.py",
    "end_to_end/test_trusted_code.py",
    "docsite/test_commands.py",
    "api/page/test_fleet_in_browser.py",
    "end_to_end/test_upgrade.py",
    "end_to_end/test_on_demand.py",
    "cli/test_commands.py",
    "fuzz/test_fuzz.py",
    "fidelity/test_fidelity.py",
    "mux/test_process.py",
    "end_to_end/test_models_flow.py",
    "end_to_end/test_quickstart.py",
    "fuzz/victim/test_victim.py",
    "deploy/test_wheels.py",
    "engine/test_without_native_library.py",
    "control/supervision/test_manager.py",
    "control/supervision/test_muxes.py",
    "engine/test_model.py",
    "control/supervision/test_supervisor.py",
    "docsite/test_moving.py",
    "engine/test_hostile_models.py",
    "control/registry/test_tasks.py",
    "end_to_end/test_reported_clients.py",
    "conformance/test_recording.py",
    "worker/test_process.py",
    "contract",
)


def groups() -> list[list[Path]]:
    """The test files in groups, each for one process; those that take longest come first."""
    found: dict[str, list[Path]] = {name: [] for name in LONGEST}
    for path in sorted(HERE.rglob("test_*.py")):
        found.setdefault(_group_of(path.relative_to(HERE).as_posix()), []).append(path)
    if missing := [name for name in (*LONGEST, *ALONE) if not found.get(name)]:
        raise pytest.UsageError(f"tests/groups.py names what does not exist: {missing}")
    return list(found.values())


def _group_of(path: str) -> str:
    if path in ALONE:
        return path
    return next((folder for folder in TOGETHER if path.startswith(f"{folder}/")), SHARING.get(path, path))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--groups", type=int, required=True, metavar="FD", help="a pipe with the numbers of groups")


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> object:
    """Nothing is collected at the start."""
    return True


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> object:
    """Collect and run one group after the other, until the pipe has no more."""
    count = 0
    # A group is collected before the last test of the one before it has run: fixtures of the session stay.
    for item, following in itertools.pairwise(itertools.chain(_collected(session), [None])):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        count += 1
        if reason := session.shouldfail or session.shouldstop:
            raise session.Interrupted(reason)
    session.testscollected = count
    return True


def _collected(session: pytest.Session) -> Iterator[pytest.Item]:
    files = groups()
    while number := os.read(session.config.getoption("groups"), NUMBER_BYTES):
        gc.disable()  # imports and items leave hardly any garbage
        try:
            items = session.perform_collect([str(path) for path in files[int(number)]])
        finally:
            gc.enable()
        yield from items


class _Folder(pytest.Package):
    """A folder whose fixtures of the scope "package" end with the last of its tests, without an `__init__.py` too."""

    def setup(self) -> None:
        """Import nothing."""


_directories: dict[Path, pytest.Collector] = {}


@pytest.hookimpl(wrapper=True)
def pytest_collect_directory(
    path: Path, parent: pytest.Collector
) -> Generator[None, pytest.Collector, pytest.Collector]:
    """One node for each folder throughout: the fixtures of a conftest.py belong to the first."""
    found = yield
    if path not in _directories:
        _directories[path] = _Folder.from_parent(parent, path=path) if isinstance(found, pytest.Dir) else found
    return _directories[path]
