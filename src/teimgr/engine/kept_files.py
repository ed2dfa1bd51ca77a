"""Small files that one load of a model keeps for the next; read only if no other user can have written them."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from teimgr.files import write_atomically

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PrivateCacheFile:
    """A file of at most `max_bytes` in a folder of at most `max_files`, which is created if it is missing.

    Only files that belong to this user and that others may not write are read. Errors of the disk are logged and do not
    fail a load.
    """

    path: Path
    max_bytes: int
    max_files: int

    def read(self) -> bytes | None:
        try:
            content = _read_own(self.path, self.max_bytes)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s is not used: %s", self.path, error)
            return None
        with suppress(OSError):
            os.utime(self.path)  # the least recently used files are removed first
        return content

    def write(self, content: bytes) -> None:
        if len(content) > self.max_bytes:
            return
        folder = self.path.parent
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_own(folder.lstat(), folder)
            write_atomically(self.path, content, mode=0o600)
            self._remove_oldest()
        except OSError as error:
            log.warning("%s cannot be written: %s", self.path, error)

    def discard(self) -> None:
        with suppress(OSError):
            self.path.unlink(missing_ok=True)

    def _remove_oldest(self) -> None:
        """Keep the `max_files` files that were used last; a half-written one counts too."""
        files = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(self.path.parent)]
        for _, path in sorted(files, reverse=True)[self.max_files :]:
            Path(path).unlink(missing_ok=True)


Identity = tuple[object, ...]


class TooManyFiles(OSError):
    """The folder has more files than a model."""


def identities(folders: Iterable[Path], most: int) -> list[Identity]:
    """The identity of every file in `folders` and below, in order, as `identity`; raises OSError, TooManyFiles."""
    found: list[Identity] = []
    for folder in sorted(folders):
        for path in files_of(folder):
            if len(found) == most:
                raise TooManyFiles(f"{folder} has more than {most} files")
            found.append(identity(path))
    return found


def files_of(folder: Path) -> Iterator[str]:
    """The files in a folder and below, in order."""
    for root, folders, names in os.walk(folder):
        folders.sort()
        yield from (os.path.join(root, name) for name in sorted(names))  # noqa: PTH118  hundreds at each load


def identity(path: str) -> Identity:
    """What identifies a file's content as `make` does: of the file, or of that which a link leads to, as in the cache
    of the hub. No user can set the time of the last change, so a file that was rewritten in place has another one.
    """
    found = os.stat(path)  # noqa: PTH116
    return path, found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _read_own(path: Path, most: int) -> bytes:
    """Raises OSError: it is missing, or someone else may have written it, or it is too large."""
    _check_own(path.parent.lstat(), path.parent)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        _check_own(found, path)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most:
            raise OSError(f"{path} is not a file of at most {most} bytes")
        return file.read(most)


def _check_own(found: os.stat_result, path: Path) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or stat.S_ISLNK(found.st_mode):
        raise PermissionError(f"{path} can be written by other users")
