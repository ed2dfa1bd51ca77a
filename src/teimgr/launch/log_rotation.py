"""Log rotation by size: `name.log`, and `name.log.1` (newest) to `name.log.<keep>`. The last line of a log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

CHECK_INTERVAL_S = 30.0
_MODE = 0o640
_CHUNK_BYTES = 2**20
_TAIL_BYTES = 4096
_TAIL_CHARS = 300
_SHOWN_LEVELS = ("warning", "error", "critical")
# One rotation at a time: a worker may start while its siblings' log is rotated on a thread.
_rotation = threading.Lock()

log = logging.getLogger(__name__)


def open_log(path: Path, limit_bytes: int, keep: int) -> int:
    """Open `path` for appending, rotated first if it is over the limit; other users cannot read it."""
    shrink(path, limit_bytes, keep)
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE)
    with suppress(PermissionError):  # of another owner
        os.fchmod(descriptor, os.fstat(descriptor).st_mode & _MODE)  # one of an earlier version may be wider
    return descriptor


def shrink(path: Path, limit_bytes: int, keep: int) -> bool:
    """Rotate, if it is over the limit, a file that processes may have open, by copy and truncation; True if so.

    Replicas share a log: were it renamed, those that run would write on in a file that is rotated away. The writers
    append at the new end. What is written in the microseconds between the last read and the truncation is lost;
    otherwise every library in a worker would have to reopen its log.
    """
    with _rotation:
        if _size(path) <= limit_bytes:
            return False
        for number in range(keep, 1, -1):
            if _old(path, number - 1).exists():
                _old(path, number - 1).replace(_old(path, number))
        if keep:
            descriptor = os.open(_old(path, 1), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
            with os.fdopen(descriptor, "wb") as copy, path.open("rb") as source:
                while chunk := source.read(_CHUNK_BYTES):
                    copy.write(chunk)
                    copy.flush()
        os.truncate(path, 0)
        return True


async def rotate_regularly(paths: Callable[[], Iterable[Path]], limit_bytes: int, keep: int) -> None:
    """Rotate those of `paths` that are over the limit, until cancelled."""
    while True:
        await asyncio.sleep(CHECK_INTERVAL_S)
        for path in set(paths()):
            try:
                await asyncio.to_thread(shrink, path, limit_bytes, keep)
            except OSError as error:
                log.warning("log not rotated", extra={"path": str(path), "reason": str(error)})


def last_line(path: Path) -> str:
    """The last line that is not blank, cut to 300 characters; "" without one."""
    return _last_line(path)[:_TAIL_CHARS]


def last_warning(path: Path) -> str:
    """The last line if it may explain an exit: not a log event below warning."""
    line = _last_line(path)
    try:
        event = json.loads(line)
        return str(event["message"])[:_TAIL_CHARS] if event["level"] in _SHOWN_LEVELS else ""
    except (ValueError, TypeError, KeyError):
        return line[:_TAIL_CHARS]  # not one of our events: a traceback, or output of a library


def _last_line(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
