"""Stored files: owners, limits, ends, and what a kill leaves behind."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.api.batches.conftest import OWNER, Desk

from teimgr.api.batches import disk
from teimgr.api.batches.files import DAY_S, MIB
from teimgr.errors import ObjectNotFound, Overloaded, QuotaExceeded, Replaced, StorageFull, TooLarge


@pytest.fixture
async def store(desk: Desk) -> Desk:
    await desk.start(at_work=False, max_file_mb=2, max_key_mb=4, max_total_mb=5, max_files=3)
    return desk


def folder(desk: Desk) -> Path:
    return desk.settings.state_file.parent / "batches" / "files"


async def test_a_file_survives_the_daemon_and_is_private(store: Desk) -> None:
    data = os.urandom(MIB)  # more than one write
    file = await store.store(data)
    await store.stop()
    await store.start(at_work=False)

    assert store.batches.files.get(OWNER, file.id) == file
    assert store.batches.files.path(file.id).read_bytes() == data
    assert store.batches.files.stored_bytes == len(data)
    for path in (folder(store).parent, folder(store)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder(store).iterdir()} == {0o600}


async def test_a_file_is_that_of_its_owner_alone(store: Desk) -> None:
    file = await store.store(b"x")

    assert store.batches.files.of("other") == []
    with pytest.raises(ObjectNotFound, match=f"No such File object: {file.id}"):
        store.batches.files.get("other", file.id)
    with pytest.raises(ObjectNotFound):
        await store.batches.delete_file("other", file.id)


async def test_limits_are_named_and_what_was_written_is_removed(store: Desk) -> None:
    with pytest.raises(TooLarge, match=r"2 MiB \(batches.max_file_mb\)"):
        await store.store(bytes(2 * MIB + 1))
    await store.store(bytes(2 * MIB))
    await store.store(bytes(2 * MIB))
    with pytest.raises(QuotaExceeded, match=r"4 MiB \(batches.max_key_mb\)"):
        await store.store(b"x")
    with pytest.raises(QuotaExceeded, match=r"5 MiB \(batches.max_total_mb\)"):
        await store.store(bytes(2 * MIB), "other")
    await store.store(b"", OWNER)
    with pytest.raises(QuotaExceeded, match=r"3 files already, as many as batches\.max_files"):
        await store.store(b"", OWNER)

    assert len(list(folder(store).iterdir())) == 2 * 3
    assert store.batches.files.stored_bytes == 4 * MIB


async def test_uploads_are_bounded_in_number(store: Desk) -> None:
    files = store.batches.files
    files.settings = replace(files.settings, max_files=100)
    for number in range(32):
        await files.upload(f"owner {number % 4}").__aenter__()
    with pytest.raises(Overloaded, match="32 files are being uploaded"):
        files.upload("one more")
    with pytest.raises(Overloaded, match="8 files are being uploaded"):
        files.upload("owner 0")


async def test_an_expired_file_is_gone_at_once_and_deleted_later(store: Desk) -> None:
    file, other = await store.store(b"x", lifetime_s=3600), await store.store(b"y")
    assert file.expires == store.now + 3600
    assert other.expires == store.now + 30 * DAY_S

    store.now += 3600
    with pytest.raises(ObjectNotFound):
        store.batches.files.get(OWNER, file.id)
    assert store.batches.files.path(file.id).exists()
    await store.batches.sweep()

    assert store.batches.files.of(OWNER) == [other]
    assert {path.stem for path in folder(store).iterdir()} == {other.id}


async def test_what_a_kill_left_is_removed_at_the_next_start(store: Desk) -> None:
    file = await store.store(b"x")
    upload = await store.batches.files.upload(OWNER).__aenter__()
    await upload.write(bytes(MIB))  # killed before its end
    (folder(store) / "file-torn.json").write_text("{")
    assert len(list(folder(store).iterdir())) == 4
    await store.stop()
    await store.start(at_work=False)

    assert {path.stem for path in folder(store).iterdir()} == {file.id}


async def test_a_full_disk_is_an_error_of_its_own(store: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "pwrite", full)
    with pytest.raises(StorageFull, match="No space left"):
        await store.store(b"x")
    assert list(folder(store).iterdir()) == []
    assert store.batches.files.stored_bytes == 0


async def test_an_upload_at_a_handover_is_refused_as_one_to_be_repeated(store: Desk) -> None:
    """It ended in 500, with "cannot schedule new futures after shutdown"."""
    async with store.batches.files.upload(OWNER) as file:
        await file.write(bytes(MIB))
        store.batches.close()
        with pytest.raises(Replaced):
            await file.commit("a.jsonl", "batch", None)
    await store.start(at_work=False)

    assert list(folder(store).iterdir()) == []
    assert store.batches.files.stored_bytes == 0
