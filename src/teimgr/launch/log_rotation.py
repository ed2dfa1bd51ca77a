"""Log rotation by size: `name.log`, and `name.log.1` (newest) to `name.log.<keep>`. The last line of a log."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

_TAIL_BYTES = 4096
_TAIL_CHARS = 300
_SHOWN_LEVELS = ("warning", "error", "critical")


def open_log(path: Path, limit_bytes: int, keep: int) -> int:
    """Open `path` for appending, rotated first if it is over the limit. No process may be writing to it then."""
    if _size(path) > limit_bytes:
        _shift(path, keep)
        path.replace(_old(path, 1)) if keep else path.unlink()
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def shrink(path: Path, limit_bytes: int, keep: int) -> bool:
    """Rotate, if it is over the limit, a file that a worker has open, by copy and truncation; True if it was rotated.

    The writer appends at the new end. A line that is written between copy and truncation is lost; otherwise every
    library in a worker would have to reopen its log.
    """
    if _size(path) <= limit_bytes:
        return False
    _shift(path, keep)
    if keep:
        shutil.copyfile(path, _old(path, 1))
    os.truncate(path, 0)
    return True


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


def _shift(path: Path, keep: int) -> None:
    for number in range(keep, 1, -1):
        if _old(path, number - 1).exists():
            _old(path, number - 1).replace(_old(path, number))


def _old(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
