"""The records of batches: one file each, and an index in memory."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

from teimgr.api.batches.batch_record import Batch, BatchProgress, Status
from teimgr.api.batches.disk import FILE_MODE, Disk, append_at, cut_at, make_private_folder
from teimgr.api.batches.files import FileStore
from teimgr.errors import ObjectNotFound
from teimgr.files import write_atomically

log = logging.getLogger(__name__)

MAX_ENDED = 1000  # ended batches kept per owner
_RECORD = ".json"


@dataclass(frozen=True, slots=True)
class ResultLine:
    """A finished request: its row, its line in one of the two files, and the tokens of its input."""

    row: int
    data: bytes
    is_error: bool
    tokens: int = 0


class BatchStore:
    """The batches in one folder. The event loop owns the index; threads do the file work."""

    def __init__(self, folder: Path, disk: Disk, files: FileStore) -> None:
        self._folder = folder
        self._disk = disk
        self._files = files
        self._batches: dict[str, Batch] = {}
        self._saving: dict[str, asyncio.Lock] = {}  # saves of a batch run one at a time

    def load(self) -> None:
        """Read the folder, or create it; blocks. Records that cannot be read are left where they are, and logged."""
        make_private_folder(self._folder)
        found = [_read(path) for path in self._folder.glob(f"*{_RECORD}")]
        for batch in sorted(filter(None, found), key=lambda each: each.created):
            self._batches[batch.id] = batch

    def get(self, owner: str, id: str) -> Batch:
        """A batch of `owner`.

        Raises:
            ObjectNotFound: it does not exist.
        """
        batch = self._batches.get(id)
        if batch is None or batch.owner != owner:
            raise ObjectNotFound("batch", id)
        return batch

    def of(self, owner: str) -> list[Batch]:
        """The batches of `owner`, oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    def unfinished(self) -> list[Batch]:
        """All batches that have not ended, oldest first."""
        return [batch for batch in self._batches.values() if not batch.status.is_final]

    def ended_before(self, moment: float) -> list[Batch]:
        """Batches that ended before `moment`."""
        return [batch for batch in self._batches.values() if batch.ended is not None and batch.ended < moment]

    def unpublished(self) -> dict[str, tuple[str, int]]:
        """The results of unfinished batches: owner and committed bytes by the id of the file."""
        return {
            part.id: (batch.owner, part.size)
            for batch in self.unfinished()
            for part in (batch.progress.output, batch.progress.error)
        }

    def by_status(self) -> Counter[Status]:
        return Counter(batch.status for batch in self._batches.values())

    async def add(self, batch: Batch) -> None:
        """Keep a new batch; the oldest ended one of its owner may go.

        Raises:
            StorageFull: the disk has no room; the batch is not kept.
        """
        self._batches[batch.id] = batch
        try:
            await self.save(batch)
        except BaseException:
            self._batches.pop(batch.id, None)
            raise
        ended = [each for each in self.of(batch.owner) if each.status.is_final]
        for each in ended[: max(0, len(ended) - MAX_ENDED)]:
            await self.remove(each)

    async def save(self, batch: Batch) -> None:
        """Write the record of the batch as it is now, durably; no effect once it is removed.

        Raises:
            StorageFull: the disk has no room; the record is that of before.
        """
        async with self._lock(batch):
            if batch.id in self._batches:
                await self._disk.run(self._write, batch.id, batch.to_record())

    async def commit(self, batch: Batch, lines: list[ResultLine]) -> None:
        """Append results to the files of the batch and then, with their lengths, to its record; all or nothing.

        What a kill leaves behind these lengths is cut off by the next commit to the file, or by `cut_tails`.

        Raises:
            QuotaExceeded: the owner's files, or all files, may not hold more.
            StorageFull: the disk has no room.
        """
        outputs = b"".join(line.data for line in lines if not line.is_error)
        errors = b"".join(line.data for line in lines if line.is_error)
        size = len(outputs) + len(errors)
        async with self._lock(batch):
            before = batch.progress
            after = BatchProgress(
                replace(
                    before.output,
                    size=before.output.size + len(outputs),
                    lines=before.output.lines + sum(not line.is_error for line in lines),
                ),
                replace(
                    before.error,
                    size=before.error.size + len(errors),
                    lines=before.error.lines + sum(line.is_error for line in lines),
                ),
                before.done.with_rows(line.row for line in lines),
                before.tokens + sum(line.tokens for line in lines),
            )
            self._files.reserve(batch.owner, size)
            try:
                await self._disk.run(self._write_results, batch.id, before, outputs, errors, batch.to_record(after))
            except BaseException:
                self._files.release(batch.owner, size)
                raise
            batch.advance(after)

    async def cut_tails(self, batch: Batch) -> None:
        """Cut both files of results to what is committed: behind it are lines that a kill left without a record."""
        async with self._lock(batch):
            for part in (batch.progress.output, batch.progress.error):
                await self._disk.run(cut_at, self._files.path(part.id), part.size)

    async def remove(self, batch: Batch) -> None:
        """Forget an ended batch; its files stay until they expire."""
        self._batches.pop(batch.id, None)
        async with self._lock(batch):  # after a save in progress, which would restore the record
            await self._disk.run(lambda: self._path(batch.id).unlink(missing_ok=True))
        self._saving.pop(batch.id, None)

    def _write_results(self, id: str, before: BatchProgress, outputs: bytes, errors: bytes, record: bytes) -> None:
        for part, data in ((before.output, outputs), (before.error, errors)):
            if data:
                append_at(self._files.path(part.id), part.size, data)
        self._write(id, record)

    def _write(self, id: str, record: bytes) -> None:
        write_atomically(self._path(id), record, mode=FILE_MODE, durable=True)

    def _lock(self, batch: Batch) -> asyncio.Lock:
        return self._saving.setdefault(batch.id, asyncio.Lock())

    def _path(self, id: str) -> Path:
        return self._folder / f"{id}{_RECORD}"


def _read(path: Path) -> Batch | None:
    try:
        return Batch.from_record(path.read_bytes())
    except (ValueError, KeyError, TypeError) as error:
        log.error("cannot read the record of a batch", extra={"path": str(path), "error": str(error)})
        return None
