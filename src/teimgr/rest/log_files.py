"""A log as it grows, through the rotations of its files; a reader that falls behind them is told that it missed some.

A file is known by its first bytes, which begin with a time: rotation moves it to `.1`, `.2`, …, by renaming or by
copying, and a reader that stood in it reads on there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

CHUNK_BYTES = 2**20
LINE_LIMIT_BYTES = 64 * 2**10
CUT = " … [line cut]"


class Piece(NamedTuple):
    """One file of a log; a last line without its end counts."""

    path: Path
    lines: int


def pieces(log: Path) -> list[Piece]:
    """The files of a log, oldest first; empty when there is none."""
    found = [_piece(path) for path in reversed((log, *rotated(log)))]
    return [piece for piece in found if piece is not None]


def complete_pieces(log: Path) -> tuple[list[Piece], int]:
    """As `pieces`, without a last line that has no end yet; and the size of the newest file up to there."""
    lines, size, seen = 0, 0, 0
    parts = [piece for piece in pieces(log) if piece.path != log]
    try:
        with log.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if ends := chunk.count(b"\n"):
                    lines, size = lines + ends, seen + chunk.rindex(b"\n") + 1
                seen += len(chunk)
    except FileNotFoundError:  # the next line makes it
        return parts, 0
    return [*parts, Piece(log, lines)], size


def read_lines(parts: list[Piece], start: int, end: int) -> Iterator[str]:
    """Lines [start, end) of the whole; what is no UTF-8 is replaced, lines over `LINE_LIMIT_BYTES` are cut."""
    before = 0
    for path, lines in parts:
        first, last = max(start - before, 0), min(end - before, lines)
        if first < last:
            yield from islice(_read_from(path, first), last - first)
        before += lines


def rotated(log: Path) -> Iterator[Path]:
    """The rotated files of a log, newest first."""
    number = 1
    while (path := log.with_name(f"{log.name}.{number}")).exists():
        yield path
        number += 1


def _piece(path: Path) -> Piece | None:
    lines, last = 0, b""
    try:
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                lines += chunk.count(b"\n")
                last = chunk[-1:]
    except FileNotFoundError:  # rotated away since it was listed
        return None
    return Piece(path, lines + (last not in (b"", b"\n")))


def _read_from(path: Path, skip: int) -> Iterator[str]:
    with path.open("rb") as file:
        _skip_lines(file, skip)
        while line := file.readline(LINE_LIMIT_BYTES):
            tail = "" if line.endswith(b"\n") or not _skip_rest(file) else CUT
            yield line.rstrip(b"\r\n").decode("utf-8", "replace") + tail


def _skip_rest(file: BinaryIO) -> bool:
    """Go to the next line; false when there was nothing left of this one."""
    some = False
    while rest := file.readline(CHUNK_BYTES):
        some = True
        if rest.endswith(b"\n"):
            break
    return some


def _skip_lines(file: BinaryIO, count: int) -> None:
    while count and (chunk := file.read(CHUNK_BYTES)):
        ends = chunk.count(b"\n")
        if ends >= count:
            file.seek(_after_line(chunk, count) - len(chunk), os.SEEK_CUR)
            return
        count -= ends


def _after_line(chunk: bytes, count: int) -> int:
    position = 0
    for _ in range(count):
        position = chunk.index(b"\n", position) + 1
    return position


CHUNK_BYTES_LOG_FOLLOW = 256 * 2**10
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
        chunk = _read(files[at], self._position, CHUNK_BYTES_LOG_FOLLOW)
        while not chunk and at + 1 < len(files):
            found += self._leave()
            at += 1
            chunk = _read(files[at], 0, CHUNK_BYTES_LOG_FOLLOW)
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
