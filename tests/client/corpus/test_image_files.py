"""Folders of image files as rows, and tables whose column holds files; no server is needed to read them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import csv
from tests.support.models.dual_encoders import pdf_of

from teimgr.client.corpus.image_files import FolderSource
from teimgr.client.corpus.sources import open_source
from teimgr.client.payloads import pack_texts
from teimgr.errors import InvalidConfig
from teimgr.wire import pdf_pages
from teimgr.wire.arrow_inputs import has_files

FILES = {"a.jpg": b"A", "b/c.PNG": b"C", "b/d/e.webp": b"E", "z.tiff": b"Z"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in {**FILES, "notes.txt": b"no", ".hidden.png": b"no", ".cache/f.png": b"no"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("first_row", range(5))
def test_the_images_of_a_folder_are_rows_by_their_paths(folder: Path, first_row: int) -> None:
    source = FolderSource(folder, None, None)
    batches = list(source.batches(first_row, 3))
    assert source.rows == len(FILES)
    assert [path for batch in batches for path in batch["path"].to_pylist()] == list(FILES)[first_row:]
    assert [data for batch in batches for data in batch["text"].to_pylist()] == list(FILES.values())[first_row:]
    assert all(0 < batch.num_rows <= 3 for batch in batches)


def test_a_file_that_cannot_be_read_is_a_row_with_the_reason(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jpg")
    (folder / "gone.jpg").symlink_to(folder / "nowhere")
    with (folder / "large.jpg").open("wb") as file:
        file.truncate((16 << 20) + 1)
    [batch] = FolderSource(folder, None, None).batches(0, 10)
    faults = {row["path"]: row["fault"] for row in batch.to_pylist() if row["fault"]}
    assert faults == {"gone.jpg": "no file", "large.jpg": "a file of over 16 MiB", "pipe.jpg": "no file"}


PAGE = (72, 36, "0 0 1 rg 0 0 72 36 re f")
ROWS = [("a.jpg", None), ("b/c.PNG", None), ("b/d/e.webp", None), ("b/no.pdf", None)]
ROWS += [*(("m.PDF", page) for page in (1, 2, 3)), ("z.tiff", None)]


@pytest.mark.parametrize("first_row", [0, 3, 5, 7, 8])
def test_each_page_of_a_document_is_a_row(folder: Path, first_row: int) -> None:
    (folder / "m.PDF").write_bytes(pdf_of(PAGE, (36, 36, ""), PAGE))
    (folder / "b" / "no.pdf").write_bytes(b"no document")
    source = FolderSource(folder, None, None)
    rows = [row for batch in source.batches(first_row, 3) for row in batch.to_pylist()]
    assert [(row["path"], row["page"]) for row in rows] == ROWS[first_row:]
    broken = [row["fault"] for row in rows if row["path"] == "b/no.pdf"]
    assert broken == (["the PDF is broken, or no PDF"] if first_row <= 3 else [])
    images = [row["text"] for row in rows if row["page"]]
    assert images == list(pdf_pages.pages(folder / "m.PDF", max(first_row - 3, 1)))[: len(images)]
    assert (source.rows, source.labels) == (None, ("path", "page"))


def test_a_document_alone_is_read_page_by_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.pdf").write_bytes(pdf_of(PAGE, PAGE))
    [batch] = FolderSource(tmp_path / "a.pdf", None, None).batches(0, 10)
    assert [(row["path"], row["page"], row["fault"]) for row in batch.to_pylist()] == [
        ("a.pdf", page, None) for page in (1, 2)
    ]
    with pytest.raises(InvalidConfig, match=r"b\.pdf: no such file"):
        FolderSource(tmp_path / "b.pdf", None, None)
    monkeypatch.setattr(pdf_pages, "IS_THERE", False)
    with pytest.raises(InvalidConfig, match=r"a\.pdf: PDF documents are read by pypdfium2.* pip install"):
        FolderSource(tmp_path, None, None)


def test_of_a_model_of_sounds_the_sounds_are_rows(folder: Path) -> None:
    (folder / "b" / "horn.WAV").write_bytes(b"H")
    [batch] = FolderSource(folder, None, None, "audio").batches(0, 10)
    assert [(row["path"], row["text"]) for row in batch.to_pylist()] == [("b/horn.WAV", b"H")]
    with pytest.raises(InvalidConfig, match=r"no sound in this folder or below: none of \.aac"):
        FolderSource(folder / "b" / "d", None, None, "audio")
    pq.write_table(pa.table({"audio": [b"H"]}), folder / "a.parquet")
    source = open_source(folder / "a.parquet")
    assert (source.text_column, source.has_files) == ("audio", True)


def test_a_changed_folder_is_another_job(folder: Path) -> None:
    before = FolderSource(folder, None, None).identity()
    assert FolderSource(folder, None, None).identity() == before
    (folder / "b" / "c.PNG").write_bytes(b"other")
    assert FolderSource(folder, None, None).identity() != before


@pytest.mark.parametrize("given", [("text", None), (None, ["id"])], ids=["column", "keep"])
def test_a_folder_without_images_or_with_columns_is_refused(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, given: tuple[Any, Any]
) -> None:
    with pytest.raises(InvalidConfig, match="no columns but path"):
        FolderSource(folder, *given)
    with pytest.raises(InvalidConfig, match=r"no image in this folder or below: none of \.avif"):
        FolderSource(tmp_path_factory.mktemp("empty"), None, None)


def _arrow(table: pa.Table, path: Path) -> None:
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


@pytest.mark.parametrize(("suffix", "write"), [(".parquet", pq.write_table), (".arrow", _arrow)])
def test_a_column_of_files_is_read_some_rows_at_a_time(
    suffix: str, write: Callable[[pa.Table, Path], None], tmp_path: Path
) -> None:
    file = tmp_path / f"a{suffix}"
    structs = [{"bytes": b"%d" % row, "path": None} for row in range(70)]
    structs[2] = {"bytes": None, "path": "/etc/passwd"}
    write(pa.table({"id": range(70), "image": structs}), file)
    source = open_source(file)
    batches = list(source.batches(1, 2048))
    assert source.text_column == "image"
    assert max(batch.num_rows for batch in batches) <= 32
    assert [data for batch in batches for data in batch["text"].to_pylist()] == [
        None if row == 2 else b"%d" % row for row in range(1, 70)
    ]
    assert batches[0]["fault"].to_pylist()[:3] == [None, "the row has no `bytes`: a `path` is not opened", None]
    assert batches[0]["id"][0].as_py() == 1
    assert has_files(pack_texts(batches[0].column("text")), "image")


@pytest.mark.parametrize(("suffix", "write"), [(".parquet", pq.write_table), (".arrow", _arrow)])
def test_a_dictionary_of_files_is_a_column_of_files(
    suffix: str, write: Callable[[pa.Table, Path], None], tmp_path: Path
) -> None:
    files = pa.array([b"\xff0", b"\xff1", None, b"\xff0"])
    write(pa.table({"image": files.dictionary_encode()}), tmp_path / f"a{suffix}")
    source = open_source(tmp_path / f"a{suffix}")
    [batch] = source.batches(0, 10)
    assert (source.text_column, source.has_files, batch["text"].type) == ("image", True, pa.binary())
    assert batch["text"].to_pylist() == files.to_pylist()


def test_a_dictionary_of_numbers_is_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": pa.array([1]).dictionary_encode()}), tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match="'text' holds int64, not strings or files"):
        open_source(tmp_path / "a.parquet")


@pytest.mark.parametrize("cells", [["https://example.com/a.png"], [[b"file"]]], ids=["string", "list"])
def test_a_column_image_of_other_things_is_not_taken_for_texts_or_files(tmp_path: Path, cells: list[Any]) -> None:
    pq.write_table(pa.table({"image": cells}), tmp_path / "a.parquet")
    with pytest.raises(
        InvalidConfig, match=r"no column 'text'; .*'image' holds (string|list.*), not the bytes of files"
    ):
        open_source(tmp_path / "a.parquet")


@pytest.mark.parametrize("column", ["image", "audio"])
@pytest.mark.parametrize("suffix", [".parquet", ".csv"])
def test_paths_in_a_column_of_files_are_not_embedded_as_texts(suffix: str, column: str, tmp_path: Path) -> None:
    table = pa.table({column: ["pictures/0.jpg"]})
    if suffix == ".csv":
        csv.write_csv(table, tmp_path / "a.csv")
    else:
        pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InvalidConfig, match=f"'{column}' holds strings, and needs the bytes of files"):
        open_source(tmp_path / f"a{suffix}", column)
