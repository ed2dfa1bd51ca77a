"""Each test file is run by one process of `python -m tests`, and what shares a daemon by the same."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

from tests.groups import HERE, TOGETHER, groups, pytest_collect_directory


def test_every_file_is_in_one_group_and_every_shared_folder_is_one() -> None:
    found = groups()

    assert sorted(chain.from_iterable(found)) == sorted(HERE.rglob("test_*.py"))
    for folder in TOGETHER:
        assert sum(any(path.is_relative_to(HERE / folder) for path in group) for group in found) <= 2, folder


def test_groups_that_take_long_come_first() -> None:
    first = [group[0].relative_to(HERE).parts[0] for group in groups()[:2]]

    assert first == ["conformance", "worker"]


def test_a_daemon_ends_with_the_files_that_share_it(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The daemon of a session's fixture, with its workers, ran on beside all groups after its own."""
    of_session = re.compile(r'scope="session"\)\ndef \w+\([^)]*\) -> Iterator\[.*DaemonProcess')
    hook = pytest_collect_directory(tmp_path, request.session)
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(pytest.Dir.from_parent(request.session, path=tmp_path))

    assert [path for path in HERE.rglob("*.py") if of_session.search(path.read_text())] == []
    assert isinstance(ended.value.value, pytest.Package)  # else pytest takes the session for the scope "package"
