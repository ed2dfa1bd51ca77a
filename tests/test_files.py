"""Atomic replacement of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from teimgr.files import duplicate, write_atomically


def test_a_file_is_replaced_whole_and_nothing_else_stays_in_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomically(path, b"old")
    write_atomically(path, b"new", durable=True)
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_replaced_file_is_kept_under_its_second_name(tmp_path: Path) -> None:
    path, previous = tmp_path / "state", tmp_path / "state.prev"
    write_atomically(path, b"1", mode=0o600, previous=previous)
    assert not previous.exists()
    assert path.stat().st_mode & 0o777 == 0o600
    write_atomically(path, b"2", mode=0o600, previous=previous)
    assert (path.read_bytes(), previous.read_bytes()) == (b"2", b"1")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match=f"No space left on device: '{path}.tmp'"):
        write_atomically(path, b"new", durable=True)
    assert path.read_bytes() == b"old"


def test_a_duplicate_is_a_copy_where_links_are_not_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"text", mode=0o600)

    def no_links(self: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", no_links)
    duplicate(path, tmp_path / "second")
    second = tmp_path / "second"
    assert second.read_bytes() == b"text"
    assert second.stat().st_mode & 0o777 == 0o600
    assert second.stat().st_ino != path.stat().st_ino
