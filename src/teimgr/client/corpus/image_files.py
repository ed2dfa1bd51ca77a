"""The image files of a folder as rows."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from teimgr.client.corpus.sources import FAULT, MAX_FILE_BYTES, TEXT, TextSource
from teimgr.errors import InvalidConfig

SUFFIXES = frozenset(
    (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".jxl", ".svg")
)
"""Of image files, also of formats that the server refuses: their rows fail, and no picture is missed in silence."""
_PATH = "path"
_PIECE_BYTES = 4 << 20


class FolderSource(TextSource):
    """The images of a folder and of all folders in it, in the order of their paths; the column `path` is copied.

    Hidden files and files of other suffixes are left out. The paths are held in memory, the files some at a time.
    """

    has_images = True
    label = _PATH

    def __init__(self, path: Path, text_column: str | None, keep: Sequence[str] | None) -> None:
        """Raises InvalidConfig: the folder has no image, or a column is asked for that files do not have."""
        if text_column is not None or list(keep or [_PATH]) != [_PATH]:
            raise InvalidConfig(f"{path}: a folder of images has no columns but {_PATH}")
        super().__init__(path, _PATH, [_PATH])
        self.kept = pa.schema([(_PATH, pa.utf8())])
        self._names = sorted(_names(path))
        if not self._names:
            raise InvalidConfig(f"{path}: no image in this folder or below: none of {', '.join(sorted(SUFFIXES))}")
        self.rows = len(self._names)

    def identity(self) -> dict[str, Any]:
        """By the names, sizes and times of all files."""
        digest = hashlib.sha256()
        for name in self._names:
            try:
                status = (self.path / name).stat()
                mark = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            except OSError:
                mark = f"{name}\0\n"
            digest.update(mark.encode(errors="surrogateescape"))
        return {"source": str(self.path.absolute()), "files": digest.hexdigest()}

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        names: list[str] = []
        files: list[bytes | None] = []
        faults: list[str | None] = []
        held = 0
        for name in self._names[first_row:]:
            data, fault = _read(self.path / name)
            if names and (len(names) >= size or held + len(data or b"") > _PIECE_BYTES):
                yield self._rows(names, files, faults)
                names, files, faults, held = [], [], [], 0
            names.append(name.encode(errors="surrogateescape").decode(errors="replace"))
            files.append(data)
            faults.append(fault)
            held += len(data or b"")
        if names:
            yield self._rows(names, files, faults)

    def _rows(self, names: list[str], files: list[bytes | None], faults: list[str | None]) -> pa.RecordBatch:
        columns = [pa.array(files, pa.large_binary()), pa.array(faults, pa.utf8()), pa.array(names, pa.utf8())]
        return pa.RecordBatch.from_arrays(columns, names=[TEXT, FAULT, _PATH])


def _names(folder: Path) -> Iterator[str]:
    for where, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in SUFFIXES:
                yield str((Path(where) / name).relative_to(folder))


def _read(path: Path) -> tuple[bytes | None, str | None]:
    """The bytes of a file, or why it has none."""
    try:
        if not path.is_file():  # a pipe would never end
            return None, "no file"
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return None, error.strerror or str(error)
    return (data, None) if len(data) <= MAX_FILE_BYTES else (None, f"an image of over {MAX_FILE_BYTES >> 20} MiB")
