"""Each test file is run by one process of `python -m tests`, and what shares a daemon by the same."""

from __future__ import annotations

from itertools import chain

from tests.groups import HERE, TOGETHER, groups


def test_every_file_is_in_one_group_and_every_shared_folder_is_one() -> None:
    found = groups()

    assert sorted(chain.from_iterable(found)) == sorted(HERE.rglob("test_*.py"))
    for folder in TOGETHER:
        assert sum(any(path.is_relative_to(HERE / folder) for path in group) for group in found) <= 2, folder


def test_groups_that_take_long_come_first() -> None:
    first = [group[0].relative_to(HERE).parts[0] for group in groups()[:2]]

    assert first == ["conformance", "worker"]
