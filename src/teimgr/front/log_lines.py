"""Lines of a log and of its rotated files, read without ever holding the log.

`x.log.2`, `x.log.1`, `x.log` are one text, oldest first. Two passes: one counts line ends, one seeks and reads. A log
that is rotated between the two gives fewer lines than counted, never wrong memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
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
