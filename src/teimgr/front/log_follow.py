"""A log as it grows, through the rotations of its files; a reader that falls behind them is told that it missed some.

A file is known by its first bytes, which begin with a time: rotation moves it to `.1`, `.2`, …, by renaming or by
copying, and a reader that stood in it reads on there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from teimgr.front.log_lines import CUT, LINE_LIMIT_BYTES, rotated

CHUNK_BYTES = 256 * 2**10
_HEAD_BYTES = 512


@dataclass(frozen=True, slots=True)
class Gap:
    """Lines were rotated away before they were read."""


class Follower:
    """Reads what is appended to `log`, from `position` in the file of that name.

    It holds one unfinished line of at most `LINE_LIMIT_BYTES`, and reads at most `CHUNK_BYTES` at a time.
    """

    def __init__(self, log: Path, position: int) -> None:
        self._log = log
        self._position = position
        self._head = _read(log, 0, min(position, _HEAD_BYTES))
        self._before = b""  # the head of the file that was read before this one
        self._rest = b""
        self._skipping = False

    def read(self) -> list[str | Gap]:
        """What was completed since, at most a chunk of it; empty when there is nothing yet."""
        found: list[str | Gap] = []
        files = [*reversed([*rotated(self._log)]), self._log]
        at = self._find(files)
        if at is None:
            found += [*self._leave(), Gap()]
            at = 0
        chunk = _read(files[at], self._position, CHUNK_BYTES)
        while not chunk and at + 1 < len(files):
            found += self._leave()
            at += 1
            chunk = _read(files[at], 0, CHUNK_BYTES)
        return [*found, *self._take(chunk)]

    def _find(self, files: list[Path]) -> int | None:
        """Which of `files`, the oldest first, this reader stands in; None when it is none of them any more."""
        newest_first = range(len(files) - 1, -1, -1)
        if self._head:
            return next((at for at in newest_first if _begins(files[at], self._head, self._position)), None)
        if not self._before:
            return len(files) - 1
        before = next((at for at in newest_first if _begins(files[at], self._before, 0)), None)
        return None if before is None else min(before + 1, len(files) - 1)

    def _leave(self) -> Iterator[str]:
        """Stand at the beginning of another file; what was unfinished will not be completed any more."""
        if self._rest:
            yield _text(self._rest)
        self._before, self._head, self._position = self._head or self._before, b"", 0
        self._rest, self._skipping = b"", False

    def _take(self, chunk: bytes) -> Iterator[str]:
        if len(self._head) == self._position:
            self._head = (self._head + chunk)[:_HEAD_BYTES]
        self._position += len(chunk)
        *complete, rest = (self._rest + chunk).split(b"\n")
        for line in complete:
            if not self._skipping:
                yield _text(line)
            self._skipping = False
        if not self._skipping and len(rest) > LINE_LIMIT_BYTES:
            yield _text(rest)
            self._skipping = True
        self._rest = b"" if self._skipping else rest


def _text(line: bytes) -> str:
    tail = CUT if len(line) > LINE_LIMIT_BYTES else ""
    return line[:LINE_LIMIT_BYTES].rstrip(b"\r").decode("utf-8", "replace") + tail


def _begins(path: Path, head: bytes, size: int) -> bool:
    """Whether a file begins so and is of at least that size."""
    return _read(path, 0, len(head)) == head and (not size or path.stat().st_size >= size)


def _read(path: Path, position: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(size)
    except FileNotFoundError:
        return b""
