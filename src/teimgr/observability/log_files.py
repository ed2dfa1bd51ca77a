"""Reading a log and its rotated files: slices by line numbers, and appended lines.

A log is read across its rotated files. A follower identifies a file by its first bytes, which start with a time:
rotation moves its content to `.1`, `.2`, …, by renaming or by copying, and the follower continues there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from pathlib import Path
from typing import BinaryIO, NamedTuple

CHUNK_BYTES = 2**20
LINE_LIMIT_BYTES = 64 * 2**10
CUT = " … [line cut]"
FOLLOW_CHUNK_BYTES = 256 * 2**10
_HEAD_BYTES = 512


class Piece(NamedTuple):
    """One file of a log: its lines and bytes. The last line may be unfinished (`has_rest`)."""

    path: Path
    lines: int
    complete_bytes: int
    has_rest: bool


def rotated(log: Path) -> Iterator[Path]:
    """Return the rotated files of a log, newest first."""
    return takewhile(Path.exists, (log.with_name(f"{log.name}.{number}") for number in count(1)))


def pieces(log: Path) -> list[Piece]:
    """Return the files of a log, oldest first; empty if it has none."""
    return [piece for path in reversed((log, *rotated(log))) if (piece := _scan(path)) is not None]


def read_lines(parts: list[Piece], start: int, end: int) -> Iterator[str]:
    """Return lines [start, end) of all files; invalid UTF-8 is replaced, lines over `LINE_LIMIT_BYTES` are cut."""
    before = 0
    for path, lines, *_ in parts:
        first, last = max(start - before, 0), min(end - before, lines)
        if first < last:
            yield from islice(_read_from(path, first), last - first)
        before += lines


def _scan(path: Path) -> Piece | None:
    """Count the lines of a file; None if it does not exist, for instance just after a rotation."""
    lines = complete_bytes = size = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if ends := chunk.count(b"\n"):
                    lines, complete_bytes = lines + ends, size + chunk.rindex(b"\n") + 1
                size += len(chunk)
    except FileNotFoundError:
        return None
    has_rest = size > complete_bytes
    return Piece(path, lines + has_rest, complete_bytes, has_rest)


def _read_from(path: Path, skip: int) -> Iterator[str]:
    with path.open("rb") as file:
        _skip_lines(file, skip)
        while line := file.readline(LINE_LIMIT_BYTES):
            tail = "" if line.endswith(b"\n") or not _skip_rest(file) else CUT
            yield line.rstrip(b"\r\n").decode("utf-8", "replace") + tail


def _skip_rest(file: BinaryIO) -> bool:
    """Seek to the next line; False if the present line had no more bytes."""
    some = False
    while rest := file.readline(CHUNK_BYTES):
        some = True
        if rest.endswith(b"\n"):
            break
    return some


def _skip_lines(file: BinaryIO, lines: int) -> None:
    while lines and (chunk := file.read(CHUNK_BYTES)):
        ends = chunk.count(b"\n")
        if ends >= lines:
            position = 0
            for _ in range(lines):
                position = chunk.index(b"\n", position) + 1
            file.seek(position - len(chunk), os.SEEK_CUR)
            return
        lines -= ends


@dataclass(frozen=True, slots=True)
class Gap:
    """Lines that a follower missed, and the reason."""

    reason: str = "lines were rotated away before they were read"


class Follower:
    """Reads the lines appended to `log`, from `position` in the file of that name.

    It holds one unfinished line of at most `LINE_LIMIT_BYTES`, and reads at most one chunk at a time.
    """

    def __init__(self, log: Path, position: int) -> None:
        self._log = log
        self._position = position
        self._head = _read(log, 0, min(position, _HEAD_BYTES))
        self._before = b""  # the head of the file before this one
        self._rest = b""
        self._skipping = False

    def read(self) -> list[str | Gap]:
        """Return the lines completed since the last call, at most a chunk; possibly empty."""
        found: list[str | Gap] = []
        files = [*reversed([*rotated(self._log)]), self._log]
        at = self._find(files)
        if at is None:
            found += [*self._next_file(), Gap()]
            at = 0
        chunk = self._read_on(files[at])
        if chunk is None:  # rotated since it was found; the next call looks for it again
            return found
        while not chunk and at + 1 < len(files):
            found += self._next_file()
            at += 1
            chunk = _read(files[at], 0, FOLLOW_CHUNK_BYTES)
        return [*found, *self._lines(chunk)]

    def _read_on(self, path: Path) -> bytes | None:
        """Return what was appended to the file at `path`; None if that is no longer the current one."""
        try:
            with path.open("rb") as file:
                if file.read(len(self._head)) != self._head:
                    return None
                file.seek(self._position)
                return file.read(FOLLOW_CHUNK_BYTES)
        except FileNotFoundError:
            return None

    def _find(self, files: list[Path]) -> int | None:
        """Return the index of the current file in `files`, oldest first; None if it was rotated away."""
        newest_first = range(len(files) - 1, -1, -1)
        if self._head:
            return next((at for at in newest_first if _begins(files[at], self._head, self._position)), None)
        if not self._before:
            return len(files) - 1
        before = next((at for at in newest_first if _begins(files[at], self._before, 0)), None)
        return None if before is None else min(before + 1, len(files) - 1)

    def _next_file(self) -> Iterator[str]:
        """Go to the beginning of another file. An unfinished line of the last one stays incomplete."""
        if self._rest:
            yield _text(self._rest)
        self._before, self._head, self._position = self._head or self._before, b"", 0
        self._rest, self._skipping = b"", False

    def _lines(self, chunk: bytes) -> Iterator[str]:
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
    """True if a file starts with `head` and has at least `size` bytes."""
    return _read(path, 0, len(head)) == head and (not size or path.stat().st_size >= size)


def _read(path: Path, position: int, size: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(position)
            return file.read(size)
    except FileNotFoundError:
        return b""
