"""The files of a folder as rows: images and the pages of PDF documents, or sounds."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from teimgr.client.corpus.sources import FAULT, MAX_FILE_BYTES, TEXT, FileKind, TextSource
from teimgr.errors import InvalidConfig, InvalidInput
from teimgr.wire import pdf_pages

SUFFIXES = {
    "image": frozenset(
        (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".heic", ".avif", ".jxl", ".svg", ".pdf")
    ),
    "audio": frozenset(
        (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".m4a", ".aac", ".aif", ".aiff", ".au", ".wma")
    ),
}
"""Suffixes of files that become rows, also of formats that the server refuses: their rows fail visibly."""
PDF = ".pdf"
_PATH, _PAGE = "path", "page"
_PIECE_BYTES = 4 << 20


def is_file_to_embed(path: Path) -> bool:
    """True if a path is named as an image, a PDF document or a sound."""
    return any(path.suffix.lower() in suffixes for suffixes in SUFFIXES.values())


class FolderSource(TextSource):
    """The images, or the sounds, of a folder and its subfolders, in the order of their paths, which are the column
    `path` of the output.

    Each page of a PDF document is an image, with its number in the column `page`; without documents that column is left
    out. Hidden files and files with other suffixes are left out. All paths are held in memory, but only some files at a
    time. A path of a file gives the rows of that file.
    """

    has_files = True

    def __init__(
        self, path: Path, text_column: str | None, keep: Sequence[str] | None, kind: FileKind = "image"
    ) -> None:
        """Raise InvalidConfig if the file does not exist, or a column is asked for that files lack."""
        if not path.exists():
            raise InvalidConfig(f"{path}: no such file or folder")
        self._folder, self._names = (
            (path, sorted(_names(path, SUFFIXES[kind]))) if path.is_dir() else (path.parent, [path.name])
        )
        self._has_documents = any(map(_is_document, self._names))
        columns = [_PATH, *([_PAGE] if self._has_documents else [])]
        if text_column is not None or list(keep or columns) != columns:
            raise InvalidConfig(f"{path}: files of a folder have no columns but {' and '.join(columns)}")
        super().__init__(path, _PATH, columns)
        self.kept = pa.schema([(name, pa.utf8() if name == _PATH else pa.int32()) for name in columns])
        self.labels = tuple(columns)
        if not self._names:
            what, endings = "image" if kind == "image" else "sound", ", ".join(sorted(SUFFIXES[kind]))
            raise InvalidConfig(f"{path}: no {what} in this folder or below: none of {endings}")
        if self._has_documents and not pdf_pages.IS_THERE:
            first = next(filter(_is_document, self._names))
            raise InvalidConfig(f"{self._folder / first}: {pdf_pages.WAY_OUT}")
        self.rows = None if self._has_documents else len(self._names)
        self._pages: dict[str, int] = {}  # of documents that were passed over
        self._begun = 0

    def identity(self) -> dict[str, Any]:
        """Identify the source by the names, sizes and times of all files."""
        digest = hashlib.sha256()
        for name in self._names:
            try:
                status = (self._folder / name).stat()
                mark = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            except OSError:
                mark = f"{name}\0\n"
            digest.update(mark.encode(errors="surrogateescape"))
        return {"source": str(self.path.absolute()), "files": digest.hexdigest()}

    def position(self) -> float | None:
        return self._begun / len(self._names) if self._has_documents else None

    def batches(self, first_row: int, size: int) -> Iterator[pa.RecordBatch]:
        rows: list[_Row] = []
        held = 0
        for row in self._files(first_row):
            count = len(row.data or b"")
            if rows and (len(rows) >= size or held + count > _PIECE_BYTES):
                yield self._batch_of(rows)
                rows, held = [], 0
            rows.append(row)
            held += count
        if rows:
            yield self._batch_of(rows)

    def _files(self, first_row: int) -> Iterator[_Row]:
        left = first_row
        for begun, name in enumerate(self._names):
            self._begun = begun
            if not _is_document(name):
                if not left:
                    yield _Row(name, None, *_read(self._folder / name))
                left -= left > 0
                continue
            if left and name not in self._pages:
                self._pages[name] = _count(self._folder / name)
            if left and left >= self._pages[name]:
                left -= self._pages[name]
                continue
            yield from _pages(self._folder / name, name, left + 1)
            left = 0

    def _batch_of(self, rows: Sequence[_Row]) -> pa.RecordBatch:
        columns = {
            TEXT: pa.array([row.data for row in rows], pa.large_binary()),
            FAULT: pa.array([row.fault for row in rows], pa.utf8()),
            _PATH: pa.array([row.shown_name for row in rows], pa.utf8()),
            _PAGE: pa.array([row.page for row in rows], pa.int32()),
        }
        names = [TEXT, FAULT, *self.keep]
        return pa.RecordBatch.from_arrays([columns[name] for name in names], names=names)


class _Row(NamedTuple):
    """The bytes of a file, or why it has none; `page` is the number of a page of a document."""

    name: str
    page: int | None
    data: bytes | None
    fault: str | None

    @property
    def shown_name(self) -> str:
        return self.name.encode(errors="surrogateescape").decode(errors="replace")


def _names(folder: Path, suffixes: Set[str]) -> Iterator[str]:
    for where, inner, names in os.walk(folder):
        inner[:] = [name for name in inner if not name.startswith(".")]
        for name in names:
            if not name.startswith(".") and Path(name).suffix.lower() in suffixes:
                yield str((Path(where) / name).relative_to(folder))


def _is_document(name: str) -> bool:
    return Path(name).suffix.lower() == PDF


def _count(path: Path) -> int:
    """Return the number of rows of a document: one for each page, or one with the reason why it cannot be read."""
    try:
        return pdf_pages.page_count(path) if path.is_file() else 1
    except (InvalidInput, OSError):
        return 1


def _pages(path: Path, name: str, first: int) -> Iterator[_Row]:
    """Return the pages of a document from number `first` on; a page that cannot be read is a row without a file."""
    at = first
    try:
        if not path.is_file():  # a pipe would never end
            raise OSError("no file")
        for at, image in enumerate(pdf_pages.pages(path, first), first):
            if isinstance(image, InvalidInput):
                yield _Row(name, at, None, _reason(image))
            else:
                yield _Row(name, at, image, None)
    except InvalidInput as error:
        yield _Row(name, None, None, _reason(error))
    except OSError as error:
        yield _Row(name, None, None, error.strerror or str(error))


def _reason(error: InvalidInput) -> str:
    return error.message.removeprefix("Input validation error: ")


def _read(path: Path) -> tuple[bytes | None, str | None]:
    """Return the bytes of a file, or the reason why they are missing."""
    try:
        if not path.is_file():  # a pipe would never end
            return None, "no file"
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        return None, error.strerror or str(error)
    return (data, None) if len(data) <= MAX_FILE_BYTES else (None, f"a file of over {MAX_FILE_BYTES >> 20} MiB")
