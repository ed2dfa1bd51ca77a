"""Files of `/v1/files`: uploads and results of batches, with owner, expiry, and limits of bytes and number.

A file is `<id>.data` with metadata in `<id>.json`. The metadata is written last and deleted first, so a kill leaves
either a complete file or data without metadata, which the next start removes.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from teimgr.api.batches.disk import FILE_MODE, Disk, append_at, make_private_folder
from teimgr.config.sections import BatchSettings
from teimgr.errors import ObjectNotFound, Overloaded, QuotaExceeded, Replaced, TooLarge
from teimgr.files import write_atomically
from teimgr.spec import known

BATCH, BATCH_OUTPUT = "batch", "batch_output"
"""Purposes of uploads and of results of batches."""
DAY_S = 86_400
MIB = 2**20
_DATA, _FACTS = ".data", ".json"
_WRITE_BYTES = 512 * 1024
_MAX_UPLOADS, _MAX_UPLOADS_OF_OWNER = 32, 8  # concurrent


@dataclass(frozen=True, slots=True)
class StoredFile:
    """The metadata of a file. `owner` is the name of the API key; times are Unix times in seconds."""

    id: str
    owner: str
    filename: str
    purpose: str
    size: int
    created: float
    expires: float

    def as_object(self) -> dict[str, Any]:
        """OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.size,
            "created_at": int(self.created),
            "expires_at": int(self.expires),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class FileStore:
    """The files in one daemon's folder. The event loop owns the index; threads do the file work."""

    def __init__(
        self, folder: Path, settings: BatchSettings, disk: Disk, clock: Callable[[], float] = time.time
    ) -> None:
        self.settings = settings
        self.disk = disk
        self.clock = clock
        self._folder = folder
        self._files: dict[str, StoredFile] = {}
        self._bytes: Counter[str] = Counter()  # by owner, including uploads in progress
        self._uploads: Counter[str] = Counter()  # in progress, by owner

    @property
    def stored_bytes(self) -> int:
        return self._bytes.total()

    def load(self, unpublished: Mapping[str, tuple[str, int]]) -> None:
        """Read the folder, or create it; blocks.

        Data without facts is removed, except that of `unpublished`: owner and bytes by id.
        """
        make_private_folder(self._folder)
        found = [_read_facts(path) for path in self._folder.glob(f"*{_FACTS}")]
        for file in sorted(filter(None, found), key=lambda each: each.created):
            if self.path(file.id).is_file():
                self._files[file.id] = file
                self._bytes[file.owner] += file.size
        for id, (owner, size) in unpublished.items():
            if id not in self._files:  # otherwise the batch was not saved since
                self._bytes[owner] += size
        for path in self._folder.iterdir():
            if path.name.partition(".")[0] not in self._files.keys() | unpublished.keys():
                path.unlink()

    def path(self, id: str) -> Path:
        """Where the data of a file lies. `id` must be one that this package made."""
        return self._folder / f"{id}{_DATA}"

    def get(self, owner: str, id: str) -> StoredFile:
        """A file of `owner` that has not expired.

        Raises:
            ObjectNotFound: it does not exist.
        """
        file = self._files.get(id)
        if file is None or file.owner != owner or file.expires <= self.clock():
            raise ObjectNotFound("File object", id)
        return file

    def of(self, owner: str) -> list[StoredFile]:
        """The files of `owner` that have not expired, oldest first."""
        now = self.clock()
        return [file for file in self._files.values() if file.owner == owner and file.expires > now]

    def expired(self) -> list[StoredFile]:
        now = self.clock()
        return [file for file in self._files.values() if file.expires <= now]

    def upload(self, owner: str) -> Upload:
        """A new file of `owner`, to be written.

        Raises:
            QuotaExceeded: it has as many files as it may have.
            Overloaded: too many files are being uploaded.
        """
        for going_on, limit in ((self._uploads[owner], _MAX_UPLOADS_OF_OWNER), (self._uploads.total(), _MAX_UPLOADS)):
            if going_on >= limit:
                raise Overloaded(f"{limit} files are being uploaded; try again later")
        count = sum(file.owner == owner for file in self._files.values()) + self._uploads[owner]
        if count >= self.settings.max_files:
            raise QuotaExceeded(
                f"There are {self.settings.max_files} files already, as many as batches.max_files allows for one API"
                " key; delete some"
            )
        return Upload(self, owner)

    def upload_began(self, owner: str) -> None:
        self._uploads[owner] += 1

    def upload_ended(self, owner: str) -> None:
        self._uploads[owner] -= 1

    def reserve(self, owner: str, count: int) -> None:
        """Count `count` bytes more as those of `owner`.

        Raises:
            QuotaExceeded: they exceed what its files, or all files, may hold.
        """
        for used, limit_mb, name in (
            (self._bytes[owner], self.settings.max_key_mb, "max_key_mb"),
            (self.stored_bytes, self.settings.max_total_mb, "max_total_mb"),
        ):
            if used + count > limit_mb * MIB:
                raise QuotaExceeded(
                    f"The stored files would exceed {limit_mb} MiB (batches.{name}); delete some, or wait until they"
                    " expire"
                )
        self._bytes[owner] += count

    def release(self, owner: str, count: int) -> None:
        """Undo `reserve`."""
        self._bytes[owner] -= count

    def lifetime_s(self, asked_s: int | None = None) -> int:
        """Seconds from the creation of a file to its end."""
        return asked_s or self.settings.retention_days * DAY_S

    async def publish(self, file: StoredFile) -> None:
        """Make a file whose bytes are reserved and durably written visible to its owner; again: no effect.

        Raises:
            StorageFull: the disk has no room.
        """
        if file.id not in self._files:
            await self.disk.run(self._write_facts, file)
            self._files[file.id] = file

    async def delete(self, id: str) -> None:
        """Remove a file, if it is there."""
        if (file := self._files.pop(id, None)) is not None:
            self.release(file.owner, file.size)
            await self.disk.run(self.remove_data, id)

    def remove_data(self, id: str) -> None:
        """Delete what is on the disk; blocks."""
        self._facts(id).unlink(missing_ok=True)
        self.path(id).unlink(missing_ok=True)

    def _write_facts(self, file: StoredFile) -> None:
        write_atomically(self._facts(file.id), orjson.dumps(asdict(file)), mode=FILE_MODE, durable=True)

    def _facts(self, id: str) -> Path:
        return self._folder / f"{id}{_FACTS}"


class Upload:
    """A file while it is received: `write` its parts, then `commit`. Without `commit` the block's end removes it."""

    def __init__(self, store: FileStore, owner: str) -> None:
        self.id = new_file_id()
        self.size = 0
        self._store = store
        self._owner = owner
        self._written = 0
        self._pending = bytearray()
        self._is_committed = False

    async def __aenter__(self) -> Self:
        self._store.upload_began(self._owner)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._store.upload_ended(self._owner)
        if not self._is_committed:
            self._store.release(self._owner, self.size)
            with suppress(Replaced):  # the next daemon removes uncommitted files
                await self._store.disk.run(self._store.remove_data, self.id)

    async def write(self, data: bytes) -> None:
        """Append `data`.

        Raises:
            TooLarge: the file exceeds `max_file_mb`.
            QuotaExceeded: as `FileStore.reserve`.
            StorageFull: the disk has no room.
        """
        limit_mb = self._store.settings.max_file_mb
        if self.size + len(data) > limit_mb * MIB:
            raise TooLarge(f"The file is larger than {limit_mb} MiB (batches.max_file_mb)")
        self._store.reserve(self._owner, len(data))
        self.size += len(data)
        self._pending += data
        if len(self._pending) >= _WRITE_BYTES:
            await self._flush()

    async def commit(self, filename: str, purpose: str, lifetime_s: int | None) -> StoredFile:
        """Keep the file; `lifetime_s` is None for the usual time.

        Raises:
            StorageFull: the disk has no room.
        """
        path, offset, data = self._store.path(self.id), self._written, bytes(self._pending)
        await self._store.disk.run(append_at, path, offset, data)
        now = self._store.clock()
        expires = now + self._store.lifetime_s(lifetime_s)
        file = StoredFile(self.id, self._owner, filename, purpose, self.size, now, expires)
        await self._store.publish(file)
        self._is_committed = True
        return file

    async def _flush(self) -> None:
        data, self._pending = self._pending, bytearray()
        await self._store.disk.run(_append, self._store.path(self.id), data)
        self._written += len(data)


def _append(path: Path, data: bytes | bytearray) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "ab", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]


def _read_facts(path: Path) -> StoredFile | None:
    try:
        return StoredFile(**known(StoredFile, orjson.loads(path.read_bytes())))
    except (ValueError, TypeError):  # damaged or foreign; its data is removed too
        return None


def newest_first(files: Iterable[StoredFile]) -> list[StoredFile]:
    return sorted(files, key=lambda file: file.created, reverse=True)
