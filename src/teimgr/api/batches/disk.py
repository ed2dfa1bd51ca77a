"""Threads for the file work of this package, and the error of a full disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from teimgr.errors import Replaced, StorageFull
from teimgr.files import NO_ROOM

FILE_MODE, FOLDER_MODE = 0o600, 0o700
_THREADS = 3

ResultT = TypeVar("ResultT")


class Disk:
    """Runs file work on at most `_THREADS` threads, so that a slow disk delays nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, "batch files")
        self._is_closed = False

    async def run(self, work: Callable[..., ResultT], *arguments: object) -> ResultT:
        """The result of `work(*arguments)`. Work that has begun ends, also where its caller is cancelled.

        Raises:
            StorageFull: the disk, or this user's quota of it, has no room.
            Replaced: the folder is the next daemon's now.
            OSError: another failure of the disk.
        """
        if self._is_closed:
            raise Replaced
        working = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            # Its changes must not continue after this call.
            await asyncio.wait({working})
            if not working.cancelled():
                working.exception()  # marks it as retrieved
            elif (task := asyncio.current_task()) is not None and not task.cancelling():  # by `close`
                raise Replaced from None
            raise
        except OSError as error:
            if error.errno in NO_ROOM:
                raise StorageFull(f"No room on the disk: {error.strerror}") from error
            raise

    def close(self) -> None:
        """Wait for the work that has begun; later work is refused."""
        self._is_closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)


def make_private_folder(folder: Path) -> None:
    """Create `folder`, which only this user may read; its parent exists."""
    folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
    folder.chmod(FOLDER_MODE)


def cut_at(path: Path, size: int) -> None:
    """Make the file no longer than `size`, durably; a shorter or missing one stays as it is."""
    with suppress(FileNotFoundError), path.open("r+b") as file:
        if os.fstat(file.fileno()).st_size > size:
            file.truncate(size)
            os.fsync(file.fileno())


def append_at(path: Path, offset: int, data: bytes) -> None:
    """Make the file end with `data` at `offset`, durably; it is created where `offset` is 0.

    Raises:
        OSError: the disk refused. What was written behind `offset` is cut off, as far as the disk allows.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        os.ftruncate(descriptor, offset)
        written = 0
        try:
            while written < len(data):
                written += os.pwrite(descriptor, memoryview(data)[written:], offset + written)
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, offset)
            raise
    finally:
        os.close(descriptor)
